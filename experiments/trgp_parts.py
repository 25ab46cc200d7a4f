"""Parts in which ``TRGPPlugin`` differs from the published TRGP, one at a time, and ways to merge its scales.

    became study experiments/studies/trgp-permuted-digits.toml
    became study experiments/studies/trgp-free-stage-permuted-digits.toml

docs/methods.md has the results. ``TRGPPlugin(reference=True)`` has the first three together.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from avalanche.training.templates import SupervisedTemplate
from torch import Tensor, nn

from became_avalanche import BecameMergePlugin, MergeInputs, TRGPPlugin
from became_avalanche.merging.rules import became
from became_avalanche.strategy.protocols import StageAware


class Slip(TRGPPlugin):
    """The strongest new direction of each later task is part of the task's subspace, but not protected."""

    def update_memory(self, name: str, observed: Any) -> None:
        before = self.memory[name]["protected"].shape[-1] if name in self.memory else None
        super().update_memory(name, observed)
        if before is not None:
            self.memory[name]["protected"][..., before : before + 1] = False


class Gate(TRGPPlugin):
    """A task without trust in the first layer scales no layer."""

    def _trust_regions(self, strategy: SupervisedTemplate, num_workers: int) -> dict[str, dict[int, nn.Parameter]]:
        trusted = super()._trust_regions(strategy, num_workers)
        return trusted if next(iter(self.layers.protected)) in trusted else {}


class Unscaled(TRGPPlugin):
    """The memory is made of the inputs that layers have without scaling."""

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._activate(strategy.model, None)
        super().after_training_exp(strategy, **kwargs)


class Repaired(Gate, Unscaled):
    """The published TRGP without its slip: gate, unscaled memory, and a basis just below the first threshold."""

    def update_memory(self, name: str, observed: Any) -> None:
        self.reference = name not in self.memory
        super().update_memory(name, observed)
        self.reference = False


class SharedAlone(BecameMergePlugin):
    """λ is that of the parameters that tasks share, with the new head but without the scales."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.rule = _without_scales


def _without_scales(inputs: MergeInputs) -> float:
    fisher: dict[str, Tensor] = {name: diagonal for name, diagonal in inputs.fisher.items() if ":" not in name}
    coefficient = became(replace(inputs, fisher=fisher))
    assert isinstance(coefficient, float)
    return coefficient


class SlowFreeStage(BecameMergePlugin, StageAware):
    """The free stage starts at a fraction of the learning rate."""

    def __init__(self, fraction: float = 0.3, **options: Any) -> None:
        super().__init__(**options)
        self.fraction = fraction

    def on_stage_start(self, strategy: SupervisedTemplate, stage: int) -> None:
        if stage == 2:
            for group in strategy.optimizer.param_groups:
                group["lr"] *= self.fraction

"""Variants of the BECAME merge, as plugins that a study names: one change each, everything else as in the paper.

    became study experiments/studies/became-plus-split-digits.toml

docs/merging.md has the results. Variants that are options of ``BecameMergePlugin``, such as the exact Fisher
information, are written as options in the studies.
"""

from __future__ import annotations

from collections.abc import Callable, Container

import torch
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor

from became_avalanche import BecameMergePlugin
from became_avalanche.merging.fisher import Batch
from became_avalanche.merging.rules import MergeInputs
from became_avalanche.strategy.passes import data_pass
from became_avalanche.strategy.protocols import StageAware
from became_avalanche.strategy.weights import interpolate, restore, snapshot, trainable

REFIT_EPOCHS = 5
SMOOTHING = 0.1


class Refit(BecameMergePlugin):
    """After the merge, trains the current head for a few epochs. Everything that earlier tasks use is frozen."""

    def on_merged(self, strategy: SupervisedTemplate, inputs: MergeInputs, run: Callable[[int], None]) -> None:
        shared = [parameter for name, parameter in trainable(strategy).items() if _used_before(inputs, name)]
        with self.free_training(strategy, min(REFIT_EPOCHS, strategy.train_epochs)):
            try:
                for parameter in shared:
                    parameter.requires_grad_(False)
                run(3)
            finally:
                for parameter in shared:
                    parameter.requires_grad_(True)


def _used_before(inputs: MergeInputs, name: str) -> bool:
    return name in inputs.precision and bool(inputs.precision[name].any())


class ProjectedAfter(BecameMergePlugin):
    """After the merge, trains a third stage with projection."""

    def on_merged(self, strategy: SupervisedTemplate, inputs: MergeInputs, run: Callable[[int], None]) -> None:
        run(3)


class Average(BecameMergePlugin, StageAware):
    """Takes as ``θ̂`` the mean of the weights at the ends of the epochs of stage 2, all but the last.

    A stage of one epoch has no such mean, and ``θ̂`` is where it ends.
    """

    def on_stage_start(self, strategy: SupervisedTemplate, stage: int) -> None:
        self.total: dict[str, Tensor] = {}
        self.count = 0

    def before_training_epoch(self, strategy: SupervisedTemplate, **kwargs: object) -> None:
        if strategy.clock.train_exp_epochs > 0:
            for name, weight in snapshot(strategy).items():
                self.total[name] = self.total[name] + weight if name in self.total else weight
            self.count += 1

    def choose_candidate(self, strategy: SupervisedTemplate, base: dict[str, Tensor]) -> dict[str, Tensor]:
        mean = {name: total / self.count for name, total in self.total.items() if total.is_floating_point()}
        return {**snapshot(strategy), **mean}


class ValidationFisher(BecameMergePlugin):
    """Estimates the Fisher information on the validation data of the task."""

    def estimate_fisher(
        self, strategy: SupervisedTemplate, names: Container[str], num_workers: int
    ) -> dict[str, Tensor]:
        training = strategy.experience
        experience = training.logging()
        strategy.experience = experience.origin_stream.benchmark.streams["valid"][experience.current_experience]
        try:
            return super().estimate_fisher(strategy, names, num_workers)
        finally:
            strategy.experience = training


class SmoothedFisher(BecameMergePlugin):
    """Estimates the Fisher information with smoothed labels."""

    def estimate_fisher(
        self, strategy: SupervisedTemplate, names: Container[str], num_workers: int
    ) -> dict[str, Tensor]:
        parameters = {name: parameter for name, parameter in trainable(strategy).items() if name in names}
        loss = torch.nn.CrossEntropyLoss(label_smoothing=SMOOTHING)
        dataset, size = strategy.experience.dataset, strategy.train_mb_size
        with data_pass(strategy, dataset, size, self.fisher.n_samples, num_workers) as batches:
            passes = (
                Batch(loss(strategy.mb_output, strategy.mb_y), strategy.mb_output, strategy.mb_y) for _ in batches
            )
            return self.fisher(passes, strategy.model, parameters)


class MiddleFisher(BecameMergePlugin):
    """Estimates the Fisher information of the merge at the middle of the path instead of at its end ``θ̂``."""

    _middle: dict[str, Tensor] | None = None

    def choose_candidate(self, strategy: SupervisedTemplate, base: dict[str, Tensor]) -> dict[str, Tensor]:
        candidate = snapshot(strategy)
        self._middle = interpolate(base, candidate, 0.5, 0.5)
        return candidate

    def estimate_fisher(
        self, strategy: SupervisedTemplate, names: Container[str], num_workers: int
    ) -> dict[str, Tensor]:
        middle, self._middle = self._middle, None  # the second estimate, for Λ, is at θ*
        if middle is None:
            return super().estimate_fisher(strategy, names, num_workers)
        candidate = snapshot(strategy)
        restore(strategy, middle)
        try:
            return super().estimate_fisher(strategy, names, num_workers)
        finally:
            restore(strategy, candidate)

"""Connector: Towards Better Plasticity-Stability Trade-off (Lin et al., CVPR 2022)."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
import torch.nn.functional as F
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor, nn

from became_avalanche.plugins.merge import BecameMergePlugin
from became_avalanche.strategy.heads import growing_heads
from became_avalanche.strategy.protocols import StageAware
from became_avalanche.strategy.stages import StagedPlugin, finish_merge, projections_suspended
from became_avalanche.strategy.weights import back_to, interpolate, restore, snapshot


class ConnectorPlugin(StagedPlugin, StageAware):
    """Trains each experience in two branches from the same weights and merges them with 1/t.

    From the second experience ``t`` on:

    1. stage 1 trains with whatever projection plugins are in the list (as published: ``NSCLPlugin``): ``θ_p``;
    2. stage 2 starts again from the weights that the experience began with, with these plugins suspended, and with the
       squared distance to the features of the model before the experience, their mean, added to the loss: ``θ_q``;
    3. the model becomes ``(1 − 1/t) θ_p + (1/t) θ_q``.

    With ``BecameMergePlugin`` in the list, that plugin merges the two branches, with its own coefficient.
    """

    def __init__(self, distillation: float = 1.0, head: str | None = None) -> None:
        """Init.

        :param distillation: weight of the distance between features.
        :param head: name of the module whose input are the features; by default the task head, or the last Linear of
            a model that has none.
        """
        super().__init__()
        if not distillation >= 0:
            raise ValueError(f"distillation must be at least 0; got {distillation}")
        self.distillation = distillation
        self.head = head
        self._start: dict[str, Tensor] = {}
        self._features: _Features | None = None
        self._old_model: nn.Module | None = None
        self._head_name = ""

    def stages(self, strategy: SupervisedTemplate) -> bool:
        """Leave it to ``BecameMergePlugin`` if there is one."""
        return not any(isinstance(plugin, BecameMergePlugin) for plugin in strategy.plugins)

    def run_stages(self, strategy: SupervisedTemplate, run: Callable[[int], None], **kwargs: Any) -> None:
        run(1)
        if self.t > 0:
            theta_p = snapshot(strategy)
            with back_to(strategy, theta_p), projections_suspended(strategy):
                run(2)
            with self.timed("merge"):
                share = 1 / (self.t + 1)
                restore(strategy, interpolate(theta_p, snapshot(strategy), share, share))
                finish_merge(strategy)

    def on_stage_start(self, strategy: SupervisedTemplate, stage: int) -> None:
        """Note where the experience starts, and start the second branch there."""
        if stage == 1:
            self._forget()
            self._start = snapshot(strategy)
            return
        restore(strategy, self._start)
        self._old_model = deepcopy(strategy.model).eval()
        self._head_name = self._find_head(strategy.model)

    def before_forward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if self._old_model is not None:
            self._features = _Features(strategy.model, self._head_name)

    def before_backward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if self._features is None or self._old_model is None:
            return
        features, self._features = self._features.taken(), None
        model, strategy.model = strategy.model, self._old_model
        old_features = _Features(self._old_model, self._head_name)
        try:
            with torch.no_grad():
                strategy.forward()
        finally:
            strategy.model = model
        strategy.loss += self.distillation * F.mse_loss(features, old_features.taken())

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._forget()

    def _forget(self) -> None:
        if self._features is not None:  # left over if an iteration was broken off
            self._features.taken()
        self._start, self._features, self._old_model = {}, None, None

    def _find_head(self, model: nn.Module) -> str:
        modules = dict(model.named_modules())
        if self.head is not None:
            if self.head not in modules:
                raise ValueError(f"head names {self.head!r}, which the model does not have; it has {list(modules)[1:]}")
            return self.head
        heads = (
            list(growing_heads(model))
            or [name for name, module in modules.items() if isinstance(module, nn.Linear)][-1:]
        )
        if len(heads) != 1:
            raise ValueError(
                f"ConnectorPlugin compares the features that go into the head, but the model has {len(heads)} heads"
                f"{': ' if heads else ''}{', '.join(heads)}; name the module with head=..."
            )
        return heads[0]


class _Features:
    """The input of a module in the next forward pass. Nothing stays on the model: others may want to copy it."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self._value: Tensor
        self._hook = model.get_submodule(name).register_forward_pre_hook(self._keep)

    def taken(self) -> Tensor:
        self._hook.remove()
        return self._value

    def _keep(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._value = args[0]

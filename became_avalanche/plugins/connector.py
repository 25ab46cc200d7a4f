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

    1. Stage 1 trains with the projection plugins in the list (as published: ``NSCLPlugin``). It ends at ``θ_p``.
    2. Stage 2 starts again from the weights before the experience. The projection plugins are suspended. The loss
       includes the mean squared distance between the features of the model and those of the model before the
       experience. Stage 2 ends at ``θ_q``.
    3. The model becomes ``(1 − 1/t) θ_p + (1/t) θ_q``.

    If ``BecameMergePlugin`` is in the list too, it merges the two branches with its own coefficient.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from became_avalanche import ConnectorPlugin, MultiHeadMLP, NSCLPlugin, split_digits
    >>> model, plugins = MultiHeadMLP(), [NSCLPlugin(), ConnectorPlugin()]
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    >>> strategy = Naive(model=model, optimizer=optimizer, train_mb_size=64, evaluator=None, plugins=plugins)
    >>> _ = strategy.train(split_digits().train_stream[:2])
    >>> plugins[1].t  # tasks learned
    2
    """

    def __init__(self, distillation: float = 1.0, head: str | None = None) -> None:
        """Init.

        :param distillation: weight of the distance between features in the loss.
        :param head: name of the module whose inputs are the features. By default this is the task head, or the last
            Linear layer if the model has no task head.
        """
        super().__init__()
        if not distillation >= 0:
            raise ValueError(f"distillation must be at least 0; got {distillation}")
        self.distillation = distillation
        self.head = head
        self._start: dict[str, Tensor] = {}
        self._features: _InputRecorder | None = None
        self._old_model: nn.Module | None = None
        self._head_name = ""

    def stages(self, strategy: SupervisedTemplate) -> bool:
        """Return False if ``BecameMergePlugin`` is in the list, which then runs the stages."""
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
        """Store the weights before stage 1, and go back to them before stage 2."""
        if stage == 1:
            self._clear()
            self._start = snapshot(strategy)
            return
        restore(strategy, self._start)
        self._old_model = deepcopy(strategy.model).eval()
        self._head_name = self._find_head(strategy.model)

    def before_forward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if self._old_model is not None:
            self._features = _InputRecorder(strategy.model, self._head_name)

    def before_backward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if self._features is None or self._old_model is None:
            return
        features, self._features = self._features.take(), None
        model, strategy.model = strategy.model, self._old_model
        old_features = _InputRecorder(self._old_model, self._head_name)
        try:
            with torch.no_grad():
                strategy.forward()
        finally:
            strategy.model = model
        strategy.loss += self.distillation * F.mse_loss(features, old_features.take())

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._clear()

    def _clear(self) -> None:
        if self._features is not None:  # left over from an interrupted iteration
            self._features.take()
        self._start, self._features, self._old_model = {}, None, None

    def _find_head(self, model: nn.Module) -> str:
        modules = dict(model.named_modules())
        if self.head is not None:
            if self.head not in modules:
                raise ValueError(
                    f"the model has no module {self.head!r}, which head=... names; choose one of: "
                    f"{', '.join(list(modules)[1:])}"
                )
            return self.head
        heads = (
            list(growing_heads(model))
            or [name for name, module in modules.items() if isinstance(module, nn.Linear)][-1:]
        )
        if len(heads) != 1:
            raise ValueError(
                f"ConnectorPlugin compares the inputs of the head and needs one head, but the model has {len(heads)} "
                f"heads{': ' if heads else ''}{', '.join(heads)}; choose the module with head=..."
            )
        return heads[0]


class _InputRecorder:
    """Records the input of a module in the next forward pass.

    ``take`` removes the hook again, so that the model can be copied between iterations.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._value: Tensor
        self._hook = model.get_submodule(name).register_forward_pre_hook(self._record)

    def take(self) -> Tensor:
        """Return the recorded input and remove the hook."""
        self._hook.remove()
        return self._value

    def _record(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self._value = args[0]

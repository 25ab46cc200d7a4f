"""BECAME: Bayesian continual learning with adaptive model merging (ICML 2025)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from avalanche.training.templates import SupervisedTemplate
from avalanche.training.templates.base_sgd import PeriodicEval
from torch import Tensor, nn

from became_avalanche.merging.fisher import accumulate, batched_fisher, fit
from became_avalanche.merging.rules import Merge, became, norm, quadratic_form
from became_avalanche.plugins.passes import data_pass
from became_avalanche.plugins.projection import GradientProjectionPlugin
from became_avalanche.plugins.stages import StagedPlugin, publish


@dataclass(frozen=True)
class MergeRecord:
    """What a merge did, with Δ = θ̂ − θ_GP and d = θ_GP − θ*_{t-1}."""

    t: int
    """The task, counted from 1."""
    coefficient: float
    """λ."""
    plasticity: float
    """Δᵀ F_t(θ̂) Δ."""
    stability: float
    """Δᵀ Λ_{t-1} Δ."""
    drift: float
    """dᵀ Λ_{t-1} d."""
    drift_along_delta: float
    """dᵀ Λ_{t-1} Δ, which Eq. 20 takes for zero."""
    delta_norm: float
    """‖Δ‖."""
    drift_norm: float
    """‖d‖."""
    seconds: float
    """Time of the merge: both Fisher informations, the coefficient and the new weights."""


class BecameMergePlugin(StagedPlugin):
    """Trains each experience twice, projected and then free, and merges the two weight vectors in closed form.

    From the second experience on:

    1. stage 1 trains with whatever projection plugins are in the list: ``θ_GP``;
    2. stage 2 starts again from ``θ_GP`` with these plugins suspended: ``θ̂``;
    3. ``λ = Δᵀ F_t(θ̂) Δ / Δᵀ (F_t(θ̂) + Λ_{t-1}) Δ`` with ``Δ = θ̂ − θ_GP`` (Eq. 20);
    4. the model becomes ``θ* = θ_GP + λ Δ``, and ``Λ_t = Λ_{t-1} + F_t(θ*)``.

    The memory of the projection plugins is then updated on ``θ*``, in whatever order the plugins are listed. The first
    experience is trained once. Stage 2 starts as a plain training would: fresh optimizer state, learning rate schedule
    and early stopping. Without a projection plugin, stage 1 is free as well. Other people's plugins work in both
    stages.

    All parameters are merged with one λ, the current head included; floating-point buffers (running statistics) too.
    """

    def __init__(self, *, epochs: int | None = None) -> None:
        """Init.

        :param epochs: epochs of stage 2, if not as many as the strategy's ``train_epochs``.
        """
        super().__init__()
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs of stage 2 must be at least 1, or None for the strategy's; got {epochs}")
        self.epochs = epochs
        self.t = 0
        """Tasks learned."""
        self.precision: dict[str, Tensor] = {}
        """Diagonal of Λ_t, by parameter name."""
        self.merges: list[MergeRecord] = []
        """One record per merge, so none for the first experience."""

    def state_dict(self) -> dict[str, Any]:
        """All that later merges depend on, as tensors and plain values."""
        return {"t": self.t, "precision": dict(self.precision), "merges": [asdict(record) for record in self.merges]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that ``state_dict`` returned."""
        if set(state) != {"t", "precision", "merges"}:
            raise ValueError(f"not the state of a {type(self).__name__}: it has the keys {sorted(state)}")
        self.t = state["t"]
        self.precision = dict(state["precision"])
        self.merges = [MergeRecord(**record) for record in state["merges"]]

    def run_stages(self, strategy: SupervisedTemplate, run: Callable[[int], None], **kwargs: Any) -> None:
        workers = kwargs.get("num_workers", 0)
        theta_previous = _weights(strategy.model)
        run(1)
        if self.t > 0:
            theta_gp = _weights(strategy.model)
            with self._free_training(strategy):
                run(2)
            self._merge(strategy, theta_previous, theta_gp, workers)
        else:
            self.precision = self._fisher(strategy, theta_previous, workers)
        self.t += 1

    def _merge(
        self, strategy: SupervisedTemplate, theta_previous: dict[str, Tensor], theta_gp: dict[str, Tensor], workers: int
    ) -> None:
        start = perf_counter()
        theta_hat = _weights(strategy.model)
        try:
            fisher = self._fisher(strategy, theta_previous, workers)
            precision = {name: fit(self.precision.get(name), diagonal) for name, diagonal in fisher.items()}
            merge = Merge(self.t + 1, theta_previous, theta_gp, theta_hat, fisher, precision)
            coefficient = became(merge)
            theta = {name: torch.lerp(theta_gp[name], theta_hat[name], coefficient) for name in theta_gp}
            _set_weights(strategy.model, theta)
            fisher = self._fisher(strategy, theta_previous, workers)  # at θ*
            self.precision = accumulate(self.precision, fisher)
        except Exception:
            _set_weights(strategy.model, theta_gp)  # the weights that are sure to be sound
            raise
        strategy.make_optimizer(reset_optimizer_state=True)  # its state belongs to θ̂, not to θ*
        for plugin in strategy.plugins:
            if isinstance(plugin, PeriodicEval):
                plugin.do_final = plugin.eval_every > -1  # what was evaluated in the last epoch was θ̂
        record = _record(merge, coefficient, perf_counter() - start)
        self.merges.append(record)
        for name, value in (
            ("Lambda", record.coefficient),
            ("Plasticity", record.plasticity),
            ("Stability", record.stability),
        ):
            publish(self, strategy, name, value)

    def _fisher(self, strategy: SupervisedTemplate, names: Container[str], workers: int) -> dict[str, Tensor]:
        """F_t at the present weights: true labels, all training data of the experience, batches as in training.

        :param names: the parameters to look at; evaluations during the experience may have added heads that it does
            not train.
        """
        trainable = ((name, p) for name, p in strategy.model.named_parameters() if p.requires_grad)
        parameters = {name: parameter for name, parameter in trainable if name in names}
        dataset = strategy.experience.dataset
        with data_pass(strategy, dataset, strategy.train_mb_size, num_workers=workers) as batches:
            fisher = batched_fisher(((strategy.criterion(), size) for size in batches), parameters)
        for name, diagonal in fisher.items():
            if not diagonal.isfinite().all():
                raise ValueError(
                    f"the Fisher information of task {self.t + 1} is not finite, first in {name}: the training has "
                    "diverged; lower the learning rate"
                )
        return fisher

    @contextmanager
    def _free_training(self, strategy: SupervisedTemplate) -> Iterator[None]:
        """Stage 2: no projection, and its own number of epochs."""
        train_epochs = strategy.train_epochs
        with ExitStack() as suspensions:
            for plugin in strategy.plugins:
                if isinstance(plugin, GradientProjectionPlugin):
                    suspensions.enter_context(plugin.suspended())
            try:
                strategy.train_epochs = self.epochs or train_epochs
                yield
            finally:
                strategy.train_epochs = train_epochs


def _record(merge: Merge, coefficient: float, seconds: float) -> MergeRecord:
    delta, drift = merge.delta, merge.drift
    return MergeRecord(
        t=merge.t,
        coefficient=coefficient,
        plasticity=quadratic_form(delta, merge.fisher, delta),
        stability=quadratic_form(delta, merge.precision, delta),
        drift=quadratic_form(drift, merge.precision, drift),
        drift_along_delta=quadratic_form(drift, merge.precision, delta),
        delta_norm=norm(delta),
        drift_norm=norm(drift),
        seconds=seconds,
    )


def _floats(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and floating-point buffers by name."""
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if tensor.is_floating_point():
            yield name, tensor


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in _floats(model)}


@torch.no_grad()
def _set_weights(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """In place, so that the optimizer and the schedules keep their parameters."""
    for name, tensor in _floats(model):
        if name in weights:
            tensor.copy_(weights[name])

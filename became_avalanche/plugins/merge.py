"""BECAME: Bayesian continual learning with adaptive model merging (ICML 2025)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite
from time import perf_counter
from typing import Any

import torch
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor

from became_avalanche.merging.fisher import Batch, Fisher, accumulate, fit
from became_avalanche.merging.rules import RULES, Merge, Rule, mean_coefficient, norm, quadratic_form
from became_avalanche.plugins.passes import data_pass
from became_avalanche.plugins.projection import GradientProjectionPlugin
from became_avalanche.plugins.stages import StagedPlugin, finish_merge, projections_suspended, publish
from became_avalanche.plugins.weights import interpolate, restore, snapshot, trainable


@dataclass(frozen=True)
class MergeRecord:
    """What a merge did, with Δ = θ̂ − θ_GP and d = θ_GP − θ*_{t-1}."""

    t: int
    """The task, counted from 1."""
    coefficient: float
    """λ; if the rule gives more than one, their mean over all elements that moved."""
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
    and early stopping. Other people's plugins work in both stages.

    Without a projection plugin there is one stage, free from ``θ*_{t-1}``, whose ``θ̂`` is merged with ``θ*_{t-1}``, as
    in the paper's ablation. What no earlier task has learned, such as the new head, is taken from ``θ̂``.

    All parameters are merged with one λ, the current head included; floating-point buffers (running statistics) too.
    Other rules take the place of Eq. 20 by name, or as a function of the ``Merge``.
    """

    _STATE = ("t", "precision", "previous_fisher", "merges")

    def __init__(
        self,
        *,
        rule: str | Rule = "became",
        fisher: str | Fisher = "batched",
        epochs: int | None = None,
        keep_path: bool = False,
    ) -> None:
        """Init.

        :param rule: how far to go from ``θ_GP`` to ``θ̂``: "became", "became-tensor" (one λ per tensor), "became-exact"
            (without the assumption that ``θ_GP`` is as good for old tasks as ``θ*_{t-1}``), "one-over-t", "constant"
            (0.4), "cofima", "imm-mode" (one λ per element) or "none"; or a function that gets a ``Merge`` and returns a
            number, or by parameter name a tensor.
        :param fisher: how the Fisher information is estimated, by name or as an object with more to say: "batched",
            "batched-sampled", "empirical", "sampled" or "exact"; see ``Fisher``.
        :param epochs: epochs of stage 2, if not as many as the strategy's ``train_epochs``.
        :param keep_path: keep all that the last merge was made of in ``path``, for ``scan_path``; four times the size
            of the model.
        """
        super().__init__()
        if epochs is not None and epochs < 1:
            raise ValueError(f"epochs of stage 2 must be at least 1, or None for the strategy's; got {epochs}")
        if isinstance(rule, str) and rule not in RULES:
            raise ValueError(f"unknown rule {rule!r}; there is {', '.join(RULES)}, or pass a function of a Merge")
        self.rule = RULES[rule] if isinstance(rule, str) else rule
        self.fisher = Fisher(fisher) if isinstance(fisher, str) else fisher
        self.epochs = epochs
        self.keep_path = keep_path
        self.path: Merge | None = None
        """The last merge, if it is kept."""
        self.precision: dict[str, Tensor] = {}
        """Diagonal of Λ_t, by parameter name."""
        self.previous_fisher: dict[str, Tensor] = {}
        """Diagonal of F_t(θ̂_t), by parameter name, if the rule asks for it with ``needs_previous_fisher = True``."""
        self.merges: list[MergeRecord] = []
        """One record per merge, so none for the first experience."""

    def state_dict(self) -> dict[str, Any]:
        """All that later merges depend on, and the records of the earlier ones."""
        return {**super().state_dict(), "merges": [asdict(record) for record in self.merges]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that ``state_dict`` returned."""
        super().load_state_dict(state)
        self.merges = [MergeRecord(**record) for record in state["merges"]]

    def run_stages(self, strategy: SupervisedTemplate, run: Callable[[int], None], **kwargs: Any) -> None:
        workers = kwargs.get("num_workers", 0)
        theta_previous = snapshot(strategy)
        run(1)
        if self.t == 0:
            self.precision = self._fisher(strategy, theta_previous, workers)
            self._remember(self.precision)
        elif any(isinstance(plugin, GradientProjectionPlugin) for plugin in strategy.plugins):
            theta_gp = snapshot(strategy)
            with self._free_training(strategy):
                run(2)
            self._merge(strategy, theta_previous, theta_gp, workers)
        else:
            self._merge(strategy, theta_previous, None, workers)

    def _merge(
        self,
        strategy: SupervisedTemplate,
        theta_previous: dict[str, Tensor],
        theta_gp: dict[str, Tensor] | None,
        workers: int,
    ) -> None:
        start = perf_counter()
        theta_hat = snapshot(strategy)
        sound = theta_gp or theta_previous
        if theta_gp is None:
            theta_previous = theta_gp = self._with_new(theta_previous, theta_hat, trainable(strategy))
        try:
            fisher = self._fisher(strategy, theta_previous, workers)
            precision = {name: fit(self.precision.get(name), diagonal) for name, diagonal in fisher.items()}
            merge = Merge(self.t + 1, theta_previous, theta_gp, theta_hat, fisher, precision, self.previous_fisher)
            coefficient = self.rule(merge)
            mean = mean_coefficient(coefficient, merge.delta)
            if not isfinite(mean):
                raise ValueError(f"the rule {self.rule} gave a coefficient that is not finite for task {merge.t}")
            restore(strategy, interpolate(theta_gp, theta_hat, coefficient, mean))
            # what a plugin trains for this task alone needs no precision: no later task moves it
            shared = {name for name, _ in strategy.model.named_parameters()} & theta_previous.keys()
            self.precision = accumulate(self.precision, self._fisher(strategy, shared, workers))  # at θ*
        except Exception:
            restore(strategy, sound)
            raise
        self._remember(fisher)
        self.path = merge if self.keep_path else None
        finish_merge(strategy)
        record = _record(merge, mean, perf_counter() - start)
        self.merges.append(record)
        for name, value in (
            ("Lambda", record.coefficient),
            ("Plasticity", record.plasticity),
            ("Stability", record.stability),
        ):
            publish(self, strategy, name, value)

    def _with_new(self, old: dict[str, Tensor], new: dict[str, Tensor], parameters: Iterable[str]) -> dict[str, Tensor]:
        """``old``, but ``new`` where no task has left a precision: a new head, new units of a head that grows."""
        result = dict(old)
        for name in parameters:
            if name in old:
                precision = self.precision.get(name)
                known = None if precision is None or not precision.any() else torch.ones_like(precision)
                result[name] = torch.where(fit(known, new[name]).bool(), old[name], new[name])
        return result

    def _remember(self, fisher: dict[str, Tensor]) -> None:
        if getattr(self.rule, "needs_previous_fisher", False):
            self.previous_fisher = fisher

    def _fisher(self, strategy: SupervisedTemplate, names: Container[str], workers: int) -> dict[str, Tensor]:
        """F_t at the present weights, on training data of the experience in batches as in training.

        :param names: the parameters to look at; evaluations during the experience may have added heads that it does
            not train.
        """
        parameters = {name: parameter for name, parameter in trainable(strategy).items() if name in names}
        dataset = strategy.experience.dataset
        with data_pass(strategy, dataset, strategy.train_mb_size, self.fisher.n_samples, workers) as batches:
            passes = (Batch(strategy.criterion(), strategy.mb_output, strategy.mb_y) for _ in batches)
            fisher = self.fisher(passes, strategy.model, parameters)
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
        with projections_suspended(strategy):
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

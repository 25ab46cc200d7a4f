"""BECAME: Bayesian continual learning with adaptive model merging (ICML 2025)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Container, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from math import isfinite
from statistics import fmean
from time import perf_counter
from typing import Any, Literal, get_args

import torch
from avalanche.training.plugins import LRSchedulerPlugin
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor

from became_avalanche.files import look_up
from became_avalanche.merging.fisher import Batch, Fisher, accumulate, zero_padded
from became_avalanche.merging.rules import (
    RULES,
    MergeInputs,
    PreviousFisherRule,
    Rule,
    mean_coefficient,
    norm,
    quadratic_form,
)
from became_avalanche.results.record import MergeRecord
from became_avalanche.strategy.divergence import DivergenceError
from became_avalanche.strategy.passes import data_pass, mean_loss
from became_avalanche.strategy.protocols import RestoresBest, Suspendable
from became_avalanche.strategy.stages import StagedPlugin, finish_merge, projections_suspended, publish
from became_avalanche.strategy.weights import back_to, interpolate, restore, snapshot, trainable

Candidate = Literal["best", "last"]
Buffers = Literal["merged", "base"]
NewHead = Literal["candidate", "merged", "apart"]

REFERENCE: dict[str, Any] = {
    "fisher": Fisher("batched-argmax", reduction="batches", mode="train", shuffle=False),
    "candidate": "last",
    "buffers": "base",
    "new_head": "merged",
    "own_precision": True,
}
"""Settings of ``BecameMergePlugin(reference=True)``: those of public scripts that match the paper."""


UNSTABLE = 1.1
"""Stage 2 is called unstable if its first epoch has this many times the loss of the first epoch of stage 1."""


class BecameMergePlugin(StagedPlugin):
    """Trains each experience twice, with and without projection, and merges both weight vectors in closed form.

    From the second experience on:

    1. Stage 1 trains with the projection plugins in the list. It ends at ``θ_GP``.
    2. Stage 2 continues from ``θ_GP`` with these plugins suspended. It ends at ``θ̂``.
    3. The coefficient is ``λ = Δᵀ F_t(θ̂) Δ / Δᵀ (F_t(θ̂) + Λ_{t-1}) Δ`` with ``Δ = θ̂ − θ_GP`` (Eq. 20).
    4. The model becomes ``θ* = θ_GP + λ Δ``, and ``Λ_t = Λ_{t-1} + F_t(θ*)``.

    The first experience is trained once, without a merge. The projection plugins update their memory at ``θ*``; the
    order of the plugins in the list does not matter. Stage 2 restarts optimizer, learning rate schedule and early
    stopping. Plugins that are not ``Suspendable`` are active in both stages.

    All parameters are merged with one λ, including the current head and floating-point buffers (running statistics).
    Other rules can replace Eq. 20, by name or as a function of ``MergeInputs``.

    **Without projection.** If no plugin in the list is ``Suspendable``, there is one stage. It starts at ``θ*_{t-1}``,
    and its result ``θ̂`` is merged with ``θ*_{t-1}``, as in the paper's ablation. Parameters that no earlier task has
    learned, such as the new head, count in λ and are taken from ``θ̂``.

    **Variants.** A subclass can override ``choose_candidate`` (which weights are ``θ̂``), ``estimate_fisher`` (how the
    Fisher information is estimated) and ``on_merged`` (what follows the merge, such as a third stage).

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from became_avalanche import BecameMergePlugin, GPMPlugin, MultiHeadMLP, split_digits
    >>> model, plugins = MultiHeadMLP(), [GPMPlugin(), BecameMergePlugin()]
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> strategy = Naive(model=model, optimizer=optimizer, train_mb_size=64, evaluator=None, plugins=plugins)
    >>> _ = strategy.train(split_digits().train_stream[:3])
    >>> [(record.t, 0 <= record.coefficient <= 1) for record in plugins[1].merges]
    [(2, True), (3, True)]
    """

    needs_loss = True
    STATE = ("t", "precision", "previous_fisher", "merges")

    def __init__(
        self,
        *,
        rule: str | Rule = "became",
        fisher: str | Fisher = "batched",
        epochs: int | None = None,
        rate: float = 1.0,
        candidate: Candidate = "best",
        buffers: Buffers = "merged",
        new_head: NewHead = "candidate",
        own_precision: bool = False,
        train_own: bool = True,
        reference: bool = False,
        keep_last_merge: bool = False,
    ) -> None:
        """Init.

        :param rule: rule for λ: "became" (Eq. 20), "became-tensor" (one λ per tensor), "became-exact" (without the
            assumption that ``θ_GP`` is as good for old tasks as ``θ*_{t-1}``), "one-over-t", "constant" (0.4),
            "cofima", "imm-mode" (one λ per element) or "none" (no merge); or a function of ``MergeInputs`` that returns
            a number, or a dictionary of tensors by parameter name.
        :param fisher: how the Fisher information is estimated: "batched", "batched-sampled", "batched-argmax",
            "empirical", "sampled" or "exact"; or a ``Fisher``, which has more options.
        :param epochs: epochs of stage 2; None for the strategy's ``train_epochs``.
        :param rate: learning rate of stage 2, as a fraction of that of stage 1. Without projection the loss is more
            curved, so a rate that suits stage 1 can be too high for stage 2; a warning then says so.
        :param candidate: which weights of the free stage are ``θ̂`` if a plugin such as ``PlateauPlugin`` restores the
            best weights: "best", or "last" for the weights after the last step.
        :param buffers: "merged" interpolates floating-point buffers (running statistics) with λ; "base" keeps all
            buffers of ``θ_GP``.
        :param new_head: without projection, how to treat parameters that no earlier task has learned. With "candidate"
            they count in λ and are taken from ``θ̂``. With "merged" they count in λ and are interpolated from their
            initial values like all other parameters. With "apart" they do not count in λ and are taken from ``θ̂``.
        :param own_precision: whether to keep a precision for parameters that plugins train outside the model (the
            scales of TRGP). Every task reuses their names, so the scales of a task are weighed with the precision of
            the scales of earlier tasks.
        :param train_own: whether stage 2 trains the parameters that plugins train outside the model (the scales of
            TRGP). With False they stay as stage 1 left them, so they do not count in λ.
        :param reference: merge like public scripts that match the paper (the authors have published no code). This sets
            ``fisher``, ``candidate``, ``buffers``, ``new_head`` and ``own_precision`` to the values in ``REFERENCE``.
        :param keep_last_merge: keep the inputs of the last merge in ``last_merge``, for ``scan_path``. They take about
            five times the memory of the model.
        """
        super().__init__()
        if epochs is not None and epochs < 1:
            raise ValueError(
                f"epochs of stage 2 must be at least 1, or None for the strategy's train_epochs; got {epochs}"
            )
        if not (rate > 0 and isfinite(rate)):
            raise ValueError(f"rate is a fraction of the learning rate and must be above 0; got {rate}")
        settings: dict[str, Any] = {
            "fisher": fisher,
            "candidate": candidate,
            "buffers": buffers,
            "new_head": new_head,
            "own_precision": own_precision,
        }
        if reference:
            _refuse_overrides(settings)
            settings = REFERENCE
        for name, allowed in (("candidate", Candidate), ("buffers", Buffers), ("new_head", NewHead)):
            if settings[name] not in get_args(allowed):
                raise ValueError(f"{name} must be one of: {', '.join(get_args(allowed))}; got {settings[name]!r}")
        self.rule = look_up("rule", rule, RULES) if isinstance(rule, str) else rule
        self.fisher: Fisher = Fisher(settings["fisher"]) if isinstance(settings["fisher"], str) else settings["fisher"]
        self.candidate: Candidate = settings["candidate"]
        self.buffers: Buffers = settings["buffers"]
        self.new_head: NewHead = settings["new_head"]
        self.own_precision: bool = settings["own_precision"]
        self.train_own = train_own
        self.epochs = epochs
        self.rate = rate
        self.keep_last_merge = keep_last_merge
        self.last_merge: MergeInputs | None = None
        """Inputs of the rule in the last merge, with ``keep_last_merge=True``."""
        self.precision: dict[str, Tensor] = {}
        """Diagonal of Λ_t, by parameter name."""
        self.previous_fisher: dict[str, Tensor] = {}
        """Diagonal of F_t(θ̂_t), by parameter name, if the rule is a ``PreviousFisherRule``."""
        self.merges: list[MergeRecord] = []
        """One record per merge. The first experience has none."""
        self._theta_previous: dict[str, Tensor] = {}
        self._frozen: set[str] = set()
        self._first_losses: dict[int, list[Tensor]] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later merges depend on, and the records of earlier merges."""
        return {**super().state_dict(), "merges": [record.model_dump() for record in self.merges]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that ``state_dict`` returned."""
        super().load_state_dict(state)
        self.merges = [MergeRecord(**record) for record in state["merges"]]

    def reset(self) -> None:
        """Reset the plugin to its initial state, for a run with another model."""
        super().reset()
        self.last_merge, self._theta_previous, self._frozen = None, {}, set()

    def remembered(self) -> Collection[str]:
        """Return the names of the model's parameters that have a precision."""
        return [name for name in self.precision if ":" not in name]

    # -------------------------------------------------------------------------------------------------- for variants

    def choose_candidate(self, strategy: SupervisedTemplate, base: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return all weights of the candidate ``θ̂`` after stage 2: by default the current weights.

        :param strategy: the strategy.
        :param base: ``θ_GP``, the other end of the merge; without projection ``θ*_{t-1}``.
        """
        return snapshot(strategy)

    def estimate_fisher(
        self, strategy: SupervisedTemplate, names: Container[str], num_workers: int
    ) -> dict[str, Tensor]:
        """Return the diagonal of F_t at the current weights, by parameter name.

        It is called at ``θ̂`` for the merge and then at ``θ*`` for Λ; in the first experience only once. By default it
        uses the training data of the experience with eval transforms, in batches of ``train_mb_size``.

        :param strategy: the strategy.
        :param names: the parameters to include. This leaves out heads that an evaluation during the experience has
            added and that the experience does not train.
        :param num_workers: number of worker processes that load the data.
        """
        parameters = {name: parameter for name, parameter in trainable(strategy).items() if name in names}
        with data_pass(
            strategy,
            strategy.experience.dataset,
            strategy.train_mb_size,
            self.fisher.n_samples,
            num_workers,
            train_mode=self.fisher.mode == "train",
            shuffle=self.fisher.shuffle,
        ) as batches:
            passes = (Batch(mean_loss(strategy, size), strategy.mb_output, strategy.mb_y) for size in batches)
            return self.fisher(passes, strategy.model, parameters)

    def on_merged(self, strategy: SupervisedTemplate, inputs: MergeInputs, run: Callable[[int], None]) -> None:
        """Do something after each merge, when the model is at ``θ*`` and Λ is updated. By default nothing happens.

        :param strategy: the strategy.
        :param inputs: the inputs of the merge.
        :param run: ``run(3)`` trains the experience once more, with projection; within ``free_training`` without it.
        """

    @contextmanager
    def free_training(self, strategy: SupervisedTemplate, epochs: int | None = None) -> Iterator[None]:
        """Return a context in which stages run without projection, with the ``rate`` of this plugin.

        :param strategy: the strategy.
        :param epochs: epochs of each stage; None for the ``epochs`` option of this plugin.
        """
        train_epochs = strategy.train_epochs
        own = [parameter for name, parameter in trainable(strategy).items() if ":" in name and not self.train_own]
        with projections_suspended(strategy):
            try:
                strategy.train_epochs = epochs or self.epochs or train_epochs
                self._rate_factor = self.rate
                for parameter in own:
                    parameter.requires_grad_(False)
                yield
            finally:
                strategy.train_epochs = train_epochs
                self._rate_factor = 1.0
                for parameter in own:
                    parameter.requires_grad_(True)

    # ------------------------------------------------------------------------------------------------------- details

    def on_task_start(self, strategy: SupervisedTemplate) -> None:
        parameters = trainable(strategy)
        if complex_ones := [name for name, parameter in parameters.items() if parameter.is_complex()]:
            raise ValueError(
                f"{type(self).__name__} cannot merge complex parameters, such as {complex_ones[0]}: store the real and "
                "the imaginary part as two real parameters"
            )
        if unfrozen := [name for name in parameters if name in self._frozen and name not in self.precision]:
            warnings.warn(
                f"{unfrozen[0]}{', ...' if len(unfrozen) > 1 else ''} was frozen in earlier tasks and trains now: "
                f"{type(self).__name__} has no precision for it, so λ is too large and earlier tasks may be forgotten; "
                "let all parameters train from the first task on, or keep these frozen",
                stacklevel=2,
            )
        self._frozen |= {name for name, _ in strategy.model.named_parameters()} - parameters.keys()
        self._theta_previous = snapshot(strategy)
        self._first_losses = {}

    def before_training(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().before_training(strategy, **kwargs)
        if self.rate == 1:
            return
        if not any(isinstance(plugin, Suspendable) for plugin in strategy.plugins):
            raise ValueError(
                f"{type(self).__name__}(rate={self.rate}) changes the learning rate of stage 2, but without a "
                "projection plugin there is only one stage: leave out rate"
            )
        if any(isinstance(plugin, LRSchedulerPlugin) for plugin in strategy.plugins):
            raise ValueError(
                f"{type(self).__name__}(rate={self.rate}) changes the learning rate of stage 2, which "
                "LRSchedulerPlugin sets: remove one of them, or use PlateauPlugin instead of LRSchedulerPlugin"
            )

    def after_training_iteration(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().after_training_iteration(strategy, **kwargs)
        if strategy.clock.train_exp_epochs == 0:
            self._first_losses.setdefault(self._stage, []).append(strategy.loss.detach())

    def run_stages(self, strategy: SupervisedTemplate, run: Callable[[int], None], **kwargs: Any) -> None:
        num_workers = kwargs.get("num_workers", 0)
        theta_previous, self._theta_previous = self._theta_previous, {}
        theta_gp = None
        if self.t == 0:
            run(1)
            self.precision = self._fisher(strategy, theta_previous, num_workers)
            self._store_previous_fisher(self.precision)
            return
        if any(isinstance(plugin, Suspendable) for plugin in strategy.plugins):
            run(1)
            theta_gp = snapshot(strategy)
            with back_to(strategy, theta_previous):
                _refuse_divergence(theta_gp, self.t + 1)
            with back_to(strategy, theta_gp), self.free_training(strategy), self._keeping_candidate(strategy):
                run(2)
            self._warn_if_unstable()
        else:
            with self._keeping_candidate(strategy):
                run(1)
        inputs = self._merge(strategy, theta_previous, theta_gp, num_workers)
        self.on_merged(strategy, inputs, run)

    def _warn_if_unstable(self) -> None:
        """Warn if the loss rose in the first epoch of stage 2, well above the loss of the first epoch of stage 1."""
        first, second = ([float(loss) for loss in self._first_losses.pop(stage, [])] for stage in (1, 2))
        if first and second and second[0] < fmean(first) < fmean(second) / UNSTABLE:
            warnings.warn(
                f"stage 2 of task {self.t + 1} was unstable: in its first epoch the loss rose from {second[0]:.3g} to "
                f"{fmean(second):.3g} on average, above the {fmean(first):.3g} of the first epoch of stage 1; the "
                "merge may lose what both stages have learned. Lower the learning rate of stage 2: "
                f"{type(self).__name__}(rate=0.1)",
                stacklevel=2,
            )

    def _merge(
        self,
        strategy: SupervisedTemplate,
        theta_previous: dict[str, Tensor],
        theta_gp: dict[str, Tensor] | None,
        num_workers: int,
    ) -> MergeInputs:
        start, fisher_before = perf_counter(), self.seconds["fisher"]
        base = theta_gp or theta_previous
        with back_to(strategy, base):
            theta_hat = self.choose_candidate(strategy, base)
            restore(strategy, theta_hat)
            projected, parameters = theta_gp is not None, trainable(strategy)
            if theta_gp is None:
                if self.new_head == "apart":
                    theta_previous = self._with_new_parameters(theta_previous, theta_hat, parameters)
                theta_gp = theta_previous
            fisher = self._fisher(strategy, theta_previous, num_workers)
            precision = {name: zero_padded(self.precision.get(name), diagonal) for name, diagonal in fisher.items()}
            inputs = MergeInputs(
                self.t + 1, theta_previous, theta_gp, theta_hat, fisher, precision, self.previous_fisher
            )
            coefficient = self.rule(inputs)
            mean = mean_coefficient(coefficient, inputs.delta)
            if not isfinite(mean):
                raise ValueError(
                    f"the rule {self.rule} returned a coefficient that is not finite for task {inputs.t}: {mean}"
                )
            merged = interpolate(theta_gp, theta_hat, coefficient, mean)
            if not projected and self.new_head == "candidate":
                merged = self._with_new_parameters(merged, theta_hat, parameters)
            if self.buffers == "base":
                merged.update({name: theta_gp[name] for name, _ in strategy.model.named_buffers() if name in theta_gp})
            restore(strategy, merged)
            # parameters that a plugin trains for this task only need no precision: no later task changes them
            of_model = {name for name, _ in strategy.model.named_parameters()}
            shared = theta_previous.keys() if self.own_precision else theta_previous.keys() & of_model
            self.precision = accumulate(self.precision, self._fisher(strategy, shared, num_workers))  # at θ*
        self._store_previous_fisher(fisher)
        self.last_merge = inputs if self.keep_last_merge else None
        finish_merge(strategy)
        seconds = perf_counter() - start
        self.seconds["merge"] += seconds - (self.seconds["fisher"] - fisher_before)
        record = _make_record(inputs, mean, seconds)
        self.merges.append(record)
        for name, value in (
            ("Lambda", record.coefficient),
            ("Plasticity", record.plasticity),
            ("Stability", record.stability),
        ):
            publish(self, strategy, name, value)
        return inputs

    @contextmanager
    def _keeping_candidate(self, strategy: SupervisedTemplate) -> Iterator[None]:
        """Return a context in which a stage ends with the weights that ``candidate`` asks for."""
        with ExitStack() as kept:
            for plugin in strategy.plugins:
                if self.candidate == "last" and isinstance(plugin, RestoresBest):
                    kept.enter_context(plugin.keeping_last())
            yield

    def _with_new_parameters(
        self, old: dict[str, Tensor], new: dict[str, Tensor], parameters: Iterable[str]
    ) -> dict[str, Tensor]:
        """Return ``old`` with the values of ``new`` where no task has a precision: new heads, new units of a head."""
        result = dict(old)
        for name in parameters:
            if name in old:
                precision = self.precision.get(name)
                known = None if precision is None or not precision.any() else torch.ones_like(precision)
                result[name] = torch.where(zero_padded(known, new[name]).bool(), old[name], new[name])
        return result

    def _store_previous_fisher(self, fisher: dict[str, Tensor]) -> None:
        if isinstance(self.rule, PreviousFisherRule):
            self.previous_fisher = fisher

    def _fisher(self, strategy: SupervisedTemplate, names: Container[str], num_workers: int) -> dict[str, Tensor]:
        """Call ``estimate_fisher``, measure its time, and raise a DivergenceError if the result is not finite."""
        with self.timed("fisher"):
            fisher = self.estimate_fisher(strategy, names, num_workers)
        for name, diagonal in fisher.items():
            if not diagonal.isfinite().all():
                raise DivergenceError(f"the Fisher information of task {self.t + 1} is not finite, first in {name}")
        return fisher


def _refuse_divergence(weights: dict[str, Tensor], t: int) -> None:
    """Raise a DivergenceError if the weights after stage 1 are not finite."""
    for name, weight in weights.items():
        if not weight.isfinite().all():
            raise DivergenceError(f"after stage 1 of task {t} the weights are not finite, first in {name}")


def _make_record(inputs: MergeInputs, coefficient: float, seconds: float) -> MergeRecord:
    delta, drift = inputs.delta, inputs.drift
    return MergeRecord(
        t=inputs.t,
        coefficient=coefficient,
        plasticity=quadratic_form(delta, inputs.fisher, delta),
        stability=quadratic_form(delta, inputs.precision, delta),
        drift=quadratic_form(drift, inputs.precision, drift),
        drift_along_delta=quadratic_form(drift, inputs.precision, delta),
        delta_norm=norm(delta),
        drift_norm=norm(drift),
        seconds=seconds,
    )


def _refuse_overrides(settings: dict[str, Any]) -> None:
    """Raise a ValueError if an option that ``reference=True`` sets does not have its default value."""
    defaults = signature(BecameMergePlugin.__init__).parameters
    for name, value in settings.items():
        if value != defaults[name].default:
            raise ValueError(
                f"reference=True sets {name} itself; got {name}={value!r}: leave out {name}, or leave out reference "
                f"and set each of these options: {', '.join(settings)}"
            )

"""Merging rules: how far to move from the weights of the projected stage to those of the free stage."""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from became_avalanche.merging.fisher import zero_padded

Weights: TypeAlias = Mapping[str, Tensor]


@dataclass(frozen=True)
class MergeInputs:
    """The inputs of a merging rule. Tensors are keyed by parameter name.

    For task ``t``, ``anchor`` is ``θ*_{t-1}``, ``base`` is ``θ_GP`` and ``candidate`` is ``θ̂``. ``fisher`` and
    ``precision`` are the diagonals of ``F_t(θ̂)`` and ``Λ_{t-1}``.

    A rule is a function of these inputs. It returns how far to move from ``base`` to ``candidate``:

    >>> import torch
    >>> from became_avalanche import MergeInputs
    >>> from became_avalanche.merging.rules import RULES
    >>> base, candidate = {"w": torch.zeros(2)}, {"w": torch.tensor([1.0, 2.0])}
    >>> fisher, precision = {"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([1.0, 0.5])}
    >>> inputs = MergeInputs(2, base, base, candidate, fisher, precision)
    >>> round(RULES["became"](inputs), 3)  # (3 · 1² + 1 · 2²) / (4 · 1² + 1.5 · 2²)
    0.7
    >>> RULES["one-over-t"](inputs)
    0.5
    """

    t: int
    """Number of the task, counted from 1."""
    anchor: Weights
    """θ*_{t-1}: the merged weights of the previous task."""
    base: Weights
    """θ_GP: the weights after the projected stage. Without projection, the same object as ``anchor``."""
    candidate: Weights
    """θ̂: the weights after the free stage."""
    fisher: Weights
    """Diagonal of F_t(θ̂)."""
    precision: Weights
    """Diagonal of Λ_{t-1}, the sum of the Fisher information of all earlier tasks at their merged weights."""
    previous_fisher: Weights = field(default_factory=dict)
    """Diagonal of F_{t-1}(θ̂_{t-1}): the previous task alone, before its merge. Empty unless the rule is a
    ``PreviousFisherRule``."""

    @property
    def projected(self) -> bool:
        """Whether ``base`` has learned the task by gradient projection."""
        return self.base is not self.anchor

    @property
    def delta(self) -> dict[str, Tensor]:
        """Δ = θ̂ − θ_GP, in float64."""
        return {name: self.candidate[name].double() - self.base[name].double() for name in self.fisher}

    @property
    def drift(self) -> dict[str, Tensor]:
        """d = θ_GP − θ*_{t-1}, in float64."""
        return {name: self.base[name].double() - self.anchor[name].double() for name in self.fisher}


def quadratic_form(left: Weights, diagonal: Weights, right: Weights) -> float:
    """Return ``leftᵀ diag(diagonal) right``, in float64."""
    return sum(float((left[name].double() * diagonal[name].double() * right[name].double()).sum()) for name in left)


def norm(weights: Weights) -> float:
    """Return ``‖weights‖`` over all tensors, in float64."""
    return sqrt(sum(float(tensor.double().square().sum()) for tensor in weights.values()))


Coefficient: TypeAlias = float | Mapping[str, Tensor]
"""How far to move from ``base`` to ``candidate``: one number for all parameters, or by parameter name a tensor with one
number or with one number per element."""

Rule: TypeAlias = Callable[[MergeInputs], Coefficient]


class PreviousFisherRule(ABC):
    """Base class of rules that use ``MergeInputs.previous_fisher``, which is kept only for them.

    >>> import torch
    >>> from became_avalanche import MergeInputs, PreviousFisherRule
    >>> class ShareOfFisher(PreviousFisherRule):
    ...     def __call__(self, inputs):
    ...         return {name: now / (now + inputs.previous_fisher[name]) for name, now in inputs.fisher.items()}
    >>> zeros, ones, threes = ({"w": torch.full((2,), value)} for value in (0.0, 1.0, 3.0))
    >>> ShareOfFisher()(MergeInputs(2, zeros, zeros, ones, fisher=threes, precision=ones, previous_fisher=ones))
    {'w': tensor([0.7500, 0.7500])}
    """

    @abstractmethod
    def __call__(self, inputs: MergeInputs) -> Coefficient:
        """Return how far to move from ``base`` to ``candidate``."""


@dataclass(frozen=True)
class Became:
    """The coefficient of BECAME in closed form (Eq. 20):

        λ = Δᵀ F_t(θ̂) Δ / Δᵀ (F_t(θ̂) + Λ_{t-1}) Δ,

    for all parameters together, per tensor, or per element (``granularity``). Per element it is ``F / (F + Λ)``, the
    mode of IMM.

    Eq. 20 assumes ``dᵀ Λ_{t-1} Δ`` to be zero, with ``d = θ_GP − θ*_{t-1}``. ``exact_anchor`` subtracts this term from
    the numerator and clips the result to [0, 1].

    Where stage 2 did not change the weights, λ = 0. Where it changed them but both terms of the denominator are zero,
    λ = 1/t. For all parameters together, a warning says so.
    """

    granularity: Literal["global", "tensor", "element"] = "global"
    exact_anchor: bool = False

    def __post_init__(self) -> None:
        if self.granularity not in ("global", "tensor", "element"):
            raise ValueError(f"granularity must be 'global', 'tensor' or 'element'; got {self.granularity!r}")

    def __call__(self, inputs: MergeInputs) -> Coefficient:
        if self.granularity == "global":
            return self._of_all_parameters(inputs)
        weights = {}
        for name, step in inputs.delta.items():
            fisher, precision = inputs.fisher[name].double(), inputs.precision[name].double()
            plasticity, stability = fisher * step.square(), precision * step.square()
            anchor = precision * inputs.drift[name] * step if self.exact_anchor else torch.zeros_like(step)
            if self.granularity == "tensor":
                plasticity, stability, anchor = plasticity.sum(), stability.sum(), anchor.sum()
                step = step.abs().sum()
            ratio = ((plasticity - anchor) / (plasticity + stability)).clamp(0, 1)
            ratio = torch.where(plasticity + stability == 0, 1 / inputs.t, ratio)
            weights[name] = torch.where(step == 0, 0.0, ratio)
        return weights

    def _of_all_parameters(self, inputs: MergeInputs) -> float:
        delta = inputs.delta
        if not any(step.any() for step in delta.values()):
            return 0.0
        plasticity = quadratic_form(delta, inputs.fisher, delta)
        stability = quadratic_form(delta, inputs.precision, delta)
        if plasticity + stability == 0:
            warnings.warn(
                f"task {inputs.t}: the Fisher information of this task and of all earlier tasks is zero along the "
                f"merging path, so Eq. 20 is undefined; merging with 1/t = {1 / inputs.t:.3f} instead",
                stacklevel=3,
            )
            return 1 / inputs.t
        if self.exact_anchor:
            exact = plasticity - quadratic_form(inputs.drift, inputs.precision, delta)
            return min(1.0, max(0.0, exact / (plasticity + stability)))
        return plasticity / (plasticity + stability)  # Eq. 20


@dataclass(frozen=True)
class Constant:
    """The same coefficient for each task, as in CoMA."""

    alpha: float = 0.4

    def __call__(self, inputs: MergeInputs) -> float:
        return self.alpha


@dataclass(frozen=True)
class CoFiMA(PreviousFisherRule):
    """``α F_t / ((1 − α) F_{t-1} + α F_t)`` for each element, with the Fisher information of the previous task alone.

    Where both are zero, it is α. For parameters that the previous task did not have (a new head), ``F_{t-1}`` is zero.
    """

    alpha: float = 0.4

    def __call__(self, inputs: MergeInputs) -> dict[str, Tensor]:
        weights = {}
        for name, fisher in inputs.fisher.items():
            now = self.alpha * fisher.double()
            before = (1 - self.alpha) * zero_padded(inputs.previous_fisher.get(name), fisher).double()
            weights[name] = torch.where(now + before == 0, self.alpha, now / (now + before))
        return weights


def one_over_t(inputs: MergeInputs) -> float:
    """Return 1/t: the mean of all tasks, if ``base`` is the mean of the earlier ones (IMM-mean, Connector)."""
    return 1 / inputs.t


def none(inputs: MergeInputs) -> float:
    """Do not merge: keep the weights after the first stage. Without projection, ``candidate`` is that stage."""
    return 0.0 if inputs.projected else 1.0


became = Became()

RULES: dict[str, Rule] = {
    "became": became,
    "became-tensor": Became("tensor"),
    "became-exact": Became(exact_anchor=True),
    "one-over-t": one_over_t,
    "constant": Constant(),
    "cofima": CoFiMA(),
    "imm-mode": Became("element"),
    "none": none,
}


def mean_coefficient(coefficient: Coefficient, delta: Weights) -> float:
    """Return the mean of a coefficient over all elements that moved."""
    if not isinstance(coefficient, Mapping):
        return float(coefficient)
    moved = {name: delta[name] != 0 for name in coefficient}
    total = sum(float((weight * moved[name]).sum()) for name, weight in coefficient.items())
    return total / max(1, sum(int(mask.sum()) for mask in moved.values()))

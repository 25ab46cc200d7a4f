"""How far to go from the stable weights to the plastic ones."""

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
    """Everything that a rule may look at. Tensors are keyed by parameter name."""

    t: int
    """The task, counted from 1."""
    anchor: Weights
    """θ*_{t-1}: the merged weights of the previous task."""
    base: Weights
    """θ_GP: the weights after the projected stage. Without projection, the anchor."""
    candidate: Weights
    """θ̂: the weights after the free stage."""
    fisher: Weights
    """Diagonal of F_t(θ̂)."""
    precision: Weights
    """Diagonal of Λ_{t-1}, the sum of the Fisher information of all earlier tasks at their merged weights."""
    previous_fisher: Weights = field(default_factory=dict)
    """Diagonal of F_{t-1}(θ̂_{t-1}), of the previous task alone before its merge; empty unless the rule is a
    ``PreviousFisherRule``."""

    @property
    def projected(self) -> bool:
        """Whether the path starts from weights that have learned the task by gradient projection."""
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
    """``leftᵀ diag(diagonal) right``, in float64."""
    return sum(float((left[name].double() * diagonal[name].double() * right[name].double()).sum()) for name in left)


def norm(weights: Weights) -> float:
    """``‖weights‖`` over all tensors, in float64."""
    return sqrt(sum(float(tensor.double().square().sum()) for tensor in weights.values()))


Coefficient: TypeAlias = float | Mapping[str, Tensor]
"""How far to go from ``base`` to ``candidate``: one number, or by name one per tensor or one per element."""

Rule: TypeAlias = Callable[[MergeInputs], Coefficient]


class PreviousFisherRule(ABC):
    """A rule that looks at ``MergeInputs.previous_fisher``. Inherit from it, and that Fisher information is kept."""

    @abstractmethod
    def __call__(self, inputs: MergeInputs) -> Coefficient:
        """How far to go from ``base`` to ``candidate``."""


@dataclass(frozen=True)
class Became:
    """The coefficient in closed form:

        λ = Δᵀ F_t(θ̂) Δ / Δᵀ (F_t(θ̂) + Λ_{t-1}) Δ,

    for all parameters together, for each tensor, or for each element. Element by element it is ``F / (F + Λ)``, the
    mode of IMM.

    Eq. 20 assumes ``dᵀ Λ_{t-1} Δ`` to be zero, with ``d = θ_GP − θ*_{t-1}``. ``exact_anchor`` subtracts it from the
    numerator and cuts the result off at 0 and 1.

    Where stage 2 did not move, λ = 0. Where it moved and neither Fisher information sees anything, 1/t; with a warning
    if that is so for all parameters together.
    """

    granularity: Literal["global", "tensor", "element"] = "global"
    exact_anchor: bool = False

    def __post_init__(self) -> None:
        if self.granularity not in ("global", "tensor", "element"):
            raise ValueError(f"granularity must be 'global', 'tensor' or 'element'; got {self.granularity!r}")

    def __call__(self, inputs: MergeInputs) -> Coefficient:
        if self.granularity == "global":
            return self._of_all(inputs)
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

    def _of_all(self, inputs: MergeInputs) -> float:
        delta = inputs.delta
        if not any(step.any() for step in delta.values()):
            return 0.0
        plasticity = quadratic_form(delta, inputs.fisher, delta)
        stability = quadratic_form(delta, inputs.precision, delta)
        if plasticity + stability == 0:
            warnings.warn(
                f"task {inputs.t}: the Fisher information of this task and that of the earlier ones vanish along the "
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
    """The same for each task, as in CoMA."""

    alpha: float = 0.4

    def __call__(self, inputs: MergeInputs) -> float:
        return self.alpha


@dataclass(frozen=True)
class CoFiMA(PreviousFisherRule):
    """``α F_t / ((1 − α) F_{t-1} + α F_t)`` for each element, with the Fisher information of the previous task alone.

    Where both vanish, α. What the previous task did not have (a new head) has no Fisher information there.
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
    """The mean of all tasks, if each starts from the mean of those before (IMM-mean, Connector)."""
    return 1 / inputs.t


def none(inputs: MergeInputs) -> float:
    """No merge: the weights after the first stage, which is the only one without projection."""
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
    """The mean of a coefficient over all elements that moved."""
    if not isinstance(coefficient, Mapping):
        return float(coefficient)
    moved = {name: delta[name] != 0 for name in coefficient}
    total = sum(float((weight * moved[name]).sum()) for name, weight in coefficient.items())
    return total / max(1, sum(int(mask.sum()) for mask in moved.values()))

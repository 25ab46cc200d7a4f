"""How far to go from the stable weights to the plastic ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from math import sqrt

from torch import Tensor

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Merge:
    """All that a rule may look at. Tensors are keyed by parameter name."""

    t: int
    """The task, counted from 1."""
    anchor: Weights
    """θ*_{t-1}: the merged weights of the previous task."""
    base: Weights
    """θ_GP: the weights after the projected stage."""
    candidate: Weights
    """θ̂: the weights after the free stage."""
    fisher: Weights
    """Diagonal of F_t(θ̂)."""
    precision: Weights
    """Diagonal of Λ_{t-1}, the sum of the Fisher informations of all earlier tasks at their merged weights."""

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


def became(merge: Merge) -> float:
    """The coefficient in closed form:

        λ = Δᵀ F_t(θ̂) Δ / Δᵀ (F_t(θ̂) + Λ_{t-1}) Δ.

    If stage 2 did not move, λ = 0. If it moved where neither Fisher information sees anything, 1/t, with a warning.
    """
    delta = merge.delta
    if not any(tensor.any() for tensor in delta.values()):
        return 0.0
    plasticity = quadratic_form(delta, merge.fisher, delta)
    stability = quadratic_form(delta, merge.precision, delta)
    if plasticity + stability == 0:
        warnings.warn(
            f"task {merge.t}: the Fisher informations of this task and of the earlier ones both vanish along the "
            f"merging path, so Eq. 20 is undefined; merging with 1/t = {1 / merge.t:.3f} instead",
            stacklevel=2,
        )
        return 1 / merge.t
    return plasticity / (plasticity + stability)  # Eq. 20

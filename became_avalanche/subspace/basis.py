"""Growing orthonormal bases of protected input space, and projecting away from them.

A basis ``U`` is (groups, d, r) with orthonormal columns. Groups may differ in rank: the columns that a group lacks are
zero and stand last, which every product below ignores by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isinf

import torch
from torch import Tensor

from became_avalanche.subspace.inputs import InputMatrix

MAX_THRESHOLD = 1 - 1e-9
"""A basis that holds this much of the energy is not extended: what singular vectors are left is rounding noise."""


def grow_basis(basis: Tensor, inputs: InputMatrix, threshold: float, *, below: bool = False) -> Tensor:
    """Extend ``basis`` by the fewest left singular vectors of the residual inputs that reach the energy threshold.

    With ``U`` the old basis and ``Â = A − U Uᵀ A``, the smallest ``k`` is taken with

        ‖A‖² − ‖Â‖² + σ₁² + ... + σₖ²  >=  threshold ‖A‖².

    ``below=True`` is the rule of the published GPM code for a first task: the largest ``k`` that stays *below* the
    threshold, one vector fewer.
    """
    old = in_double(basis)
    total = inputs.energy().unsqueeze(-1)
    energies, vectors = inputs.residual_spectrum(old)
    old_energy = (total - energies.sum(-1, keepdim=True)).clamp(min=0)
    taken = reach(energies, threshold, total, held=old_energy, below=below)
    return compact(torch.cat([old, orthonormal(vectors, taken, old)], dim=-1))


def in_double(basis: Tensor) -> Tensor:
    """The basis in double precision, orthonormal once more if it was stored in half precision."""
    double = basis.double()
    if basis.dtype.itemsize >= 4 or basis.shape[-1] == 0:
        return double
    q, r = torch.linalg.qr(double)
    again: Tensor = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # a zero column stays zero
    return again


def reach(
    masses: Tensor, threshold: float, total: Tensor, *, held: float | Tensor = 0.0, below: bool = False
) -> Tensor:
    """Which of ``masses`` (groups, n) to take, in their order, until ``held`` and they reach ``threshold * total``.

    ``below=True`` takes those that stay below the threshold, one fewer.
    """
    with_it = held + masses.cumsum(-1)
    return (with_it if below else with_it - masses) < min(threshold, MAX_THRESHOLD) * total


def orthonormal(vectors: Tensor, taken: Tensor, old: Tensor) -> Tensor:
    """The first of ``vectors``, as many as each group has ``taken``, orthonormal among each other and to ``old``.

    The published updates can corrupt their basis: singular vectors of a rank-deficient residual are not orthogonal to
    the old basis, and the projection then reverses gradients. Thresholds end before directions without energy would be
    taken (``MAX_THRESHOLD``), and those taken are orthonormalised once more.
    """
    taken = taken[..., : int(taken.sum(-1).max())].unsqueeze(-2)  # what is taken stands first
    new = vectors[..., : taken.shape[-1]] * taken
    new = new - old @ (old.mT @ new)
    orthogonal: Tensor = torch.linalg.qr(new).Q
    return orthogonal * taken


def importance(strengths: Tensor, alpha: float) -> Tensor:
    """``φ(s) = (α + 1) s / (α s + max s)`` of ``strengths`` (groups, r): 1 for the strongest, 0 for no strength.

    With ``α = inf`` every strength above 0 counts 1.
    """
    if isinf(alpha):
        return (strengths > 0).to(strengths)
    strongest = strengths.max(-1, keepdim=True).values if strengths.shape[-1] else strengths
    return (alpha + 1) * strengths / (alpha * strengths + strongest).clamp(min=torch.finfo(strengths.dtype).tiny)


def directions(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Norms, and directions of length 1, of columns (groups, d, r), such as ``InputMatrix.compressed()``."""
    norms = columns.double().norm(dim=-2)
    return norms, columns / norms.clamp(min=torch.finfo(columns.dtype).tiny).to(columns.dtype).unsqueeze(-2)


def ranks(basis: Tensor) -> Tensor:
    """Number of basis vectors of each group."""
    return basis.any(dim=-2).sum(-1)


def compact(basis: Tensor) -> Tensor:
    """Move each group's zero columns to the end and cut what is zero in all groups."""
    order = basis.any(dim=-2).to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    basis = basis.take_along_dim(order.unsqueeze(-2), dim=-1)
    return basis[..., : int(ranks(basis).max())]


@dataclass(frozen=True)
class Projector:
    """``G -> G − G U diag(importance) Uᵀ`` as a thin factor ``R`` of what is removed, or of what is left if thinner."""

    factor: Tensor
    complement: bool
    whole: bool = True
    """Whether directions are removed as a whole or not at all, so that projecting twice is projecting once."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Project ``rows`` (groups, out, d)."""
        inside = (rows @ self.factor) @ self.factor.mT
        return inside if self.complement else rows - inside

    @staticmethod
    def away_from(basis: Tensor, importance: Tensor | None = None) -> Projector:
        """The projector that removes the span of ``basis``, or of each vector the fraction ``importance`` in [0, 1]."""
        if importance is None:
            importance = basis.new_ones(basis.shape[0], basis.shape[-1])
        importance = importance.to(basis).unsqueeze(-2)
        whole = not bool(((importance > 0) & (importance < 1)).any())
        removed = compact(basis * importance.sqrt())
        weak = compact(basis * (1 - importance).clamp(min=0).sqrt())
        basis = compact(basis)
        dimension = basis.shape[-2]
        rank = ranks(basis)
        fewest = int(rank.min())
        if dimension - fewest + weak.shape[-1] >= removed.shape[-1]:
            return Projector(removed, complement=False, whole=whole)
        # A zero column adds nothing to a Householder QR: the columns from a group's rank on span its complement.
        full = torch.linalg.qr(basis.double(), mode="complete").Q[..., fewest:]
        beyond = torch.arange(fewest, dimension, device=basis.device) >= rank.unsqueeze(-1)
        free = (full * beyond.unsqueeze(-2)).to(basis.dtype)
        return Projector(compact(torch.cat([free, weak], dim=-1)), complement=True, whole=whole)

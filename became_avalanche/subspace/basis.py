"""Grow orthonormal bases of the protected input space, and project gradients away from them.

A basis ``U`` is (groups, d, r) with orthonormal columns. Groups may differ in rank: a group of lower rank has zero
columns at the end, which contribute nothing to the products below.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isinf

import torch
from torch import Tensor

from became_avalanche.subspace.inputs import InputMatrix

MAX_THRESHOLD = 1 - 1e-9
"""A basis that holds this share of the energy is not extended: the remaining singular vectors are rounding noise."""


def grow_basis(basis: Tensor, inputs: InputMatrix, threshold: float, *, below: bool = False) -> Tensor:
    """Extend ``basis`` by the fewest left singular vectors of the residual inputs that reach the energy threshold.

    Let ``U`` be the old basis, and ``σ₁ >= σ₂ >= ...`` the singular values of the residual ``Â = A − U Uᵀ A``. The
    number of new vectors is the smallest ``k`` with

        ‖A‖² − ‖Â‖² + σ₁² + ... + σₖ²  >=  threshold ‖A‖².

    ``below=True`` is the rule of the published GPM code for the first task: the largest ``k`` that stays *below* the
    threshold, which is one vector fewer.
    """
    old = in_double(basis)
    total = inputs.energy().unsqueeze(-1)
    energies, vectors = inputs.residual_spectrum(old)
    old_energy = (total - energies.sum(-1, keepdim=True)).clamp(min=0)
    taken = take_until_threshold(energies, threshold, total, held=old_energy, below=below)
    return compact(torch.cat([old, orthonormal(vectors, taken, old)], dim=-1))


def in_double(basis: Tensor) -> Tensor:
    """Return the basis in double precision. Orthonormalise it again if it was stored in half precision."""
    double = basis.double()
    if basis.dtype.itemsize >= 4 or basis.shape[-1] == 0:
        return double
    q, r = torch.linalg.qr(double)
    orthonormalised: Tensor = q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)  # a zero column stays zero
    return orthonormalised


def take_until_threshold(
    values: Tensor, threshold: float, total: Tensor, *, held: float | Tensor = 0.0, below: bool = False
) -> Tensor:
    """Return a mask of the first ``values`` (groups, n), until they and ``held`` sum up to ``threshold * total``.

    ``below=True`` takes one value fewer, so that the sum stays below that.
    """
    cumulative = held + values.cumsum(-1)
    return (cumulative if below else cumulative - values) < min(threshold, MAX_THRESHOLD) * total


def orthonormal(vectors: Tensor, taken: Tensor, old: Tensor) -> Tensor:
    """Return the ``vectors`` marked by ``taken``, orthonormalised among each other and against ``old``.

    The published updates can corrupt the basis: singular vectors of a rank-deficient residual are not orthogonal to the
    old basis, and the projection then reverses gradients. Two things prevent that here: ``MAX_THRESHOLD`` excludes
    directions without energy, and the vectors are orthonormalised again.
    """
    taken = taken[..., : int(taken.sum(-1).max())].unsqueeze(-2)  # each group takes its first vectors
    new = vectors[..., : taken.shape[-1]] * taken
    new = new - old @ (old.mT @ new)
    orthogonal: Tensor = torch.linalg.qr(new).Q
    return orthogonal * taken


def importance(magnitudes: Tensor, alpha: float) -> Tensor:
    """Return ``φ(s) = (α + 1) s / (α s + max s)`` for ``magnitudes`` (groups, r), such as singular values.

    The largest magnitude gets 1, a magnitude of 0 gets 0. With ``α = inf``, every magnitude above 0 gets 1.
    """
    if isinf(alpha):
        return (magnitudes > 0).to(magnitudes)
    largest = magnitudes.max(-1, keepdim=True).values if magnitudes.shape[-1] else magnitudes
    return (alpha + 1) * magnitudes / (alpha * magnitudes + largest).clamp(min=torch.finfo(magnitudes.dtype).tiny)


def directions(columns: Tensor) -> tuple[Tensor, Tensor]:
    """Return the norms and the unit vectors of columns (groups, d, r), such as ``InputMatrix.compressed()``."""
    norms = columns.double().norm(dim=-2)
    return norms, columns / norms.clamp(min=torch.finfo(columns.dtype).tiny).to(columns.dtype).unsqueeze(-2)


def ranks(basis: Tensor) -> Tensor:
    """Return the number of basis vectors in each group."""
    return basis.any(dim=-2).sum(-1)


def compact(basis: Tensor) -> Tensor:
    """Move the zero columns of each group to the end, and drop columns that are zero in all groups."""
    order = basis.any(dim=-2).to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    basis = basis.take_along_dim(order.unsqueeze(-2), dim=-1)
    return basis[..., : int(ranks(basis).max())]


@dataclass(frozen=True)
class Projector:
    """The map ``G -> G − G U diag(importance) Uᵀ``, stored as a thin factor ``R``."""

    factor: Tensor
    """``R`` (groups, d, r). The map is ``G − G R Rᵀ``, or ``G R Rᵀ`` if ``complement``: whichever ``R`` is thinner."""
    complement: bool
    idempotent: bool = True
    """Whether each direction is removed entirely or not at all, so that projecting twice equals projecting once."""

    def __call__(self, rows: Tensor) -> Tensor:
        """Project ``rows`` (groups, out, d)."""
        inside = (rows @ self.factor) @ self.factor.mT
        return inside if self.complement else rows - inside

    @staticmethod
    def away_from(basis: Tensor, importance: Tensor | None = None) -> Projector:
        """Return the projector that removes the fraction ``importance`` in [0, 1] (default: 1) of each basis vector."""
        if importance is None:
            importance = basis.new_ones(basis.shape[0], basis.shape[-1])
        importance = importance.to(basis).unsqueeze(-2)
        idempotent = not bool(((importance > 0) & (importance < 1)).any())
        removed = compact(basis * importance.sqrt())
        remaining = compact(basis * (1 - importance).clamp(min=0).sqrt())
        basis = compact(basis)
        dimension = basis.shape[-2]
        rank = ranks(basis)
        lowest_rank = int(rank.min())
        if dimension - lowest_rank + remaining.shape[-1] >= removed.shape[-1]:
            return Projector(removed, complement=False, idempotent=idempotent)
        # Zero columns do not change a Householder QR, so the columns of Q after a group's rank span its complement.
        full = torch.linalg.qr(basis.double(), mode="complete").Q[..., lowest_rank:]
        beyond = torch.arange(lowest_rank, dimension, device=basis.device) >= rank.unsqueeze(-1)
        free = (full * beyond.unsqueeze(-2)).to(basis.dtype)
        return Projector(compact(torch.cat([free, remaining], dim=-1)), complement=True, idempotent=idempotent)

"""Growing orthonormal bases of protected input space, and projecting away from them.

A basis ``U`` is (groups, d, r) with orthonormal columns. Groups may differ in rank: the columns that a group lacks are
zero and stand last, which every product below ignores by itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from became_avalanche.subspace.layers import InputMatrix

MAX_THRESHOLD = 1 - 1e-9
"""A basis that holds this much of the energy is not extended: what singular vectors are left is rounding noise."""


def grow_basis(basis: Tensor, inputs: InputMatrix, threshold: float, *, below: bool = False) -> Tensor:
    """Extend ``basis`` by the fewest left singular vectors of the residual inputs that reach the energy threshold.

    With ``U`` the old basis and ``Â = A − U Uᵀ A``, the smallest ``k`` is taken with

        ‖A‖² − ‖Â‖² + σ₁² + ... + σₖ²  >=  threshold ‖A‖².

    ``below=True`` is the rule of the published GPM code for a first task: the largest ``k`` that stays *below* the
    threshold, one vector fewer.

    The published update can corrupt its basis: singular vectors of a rank-deficient residual are not orthogonal to
    ``U``, and the projection then reverses gradients. Here the threshold ends before directions without energy would
    be taken, and those taken are orthonormalised once more, against ``U`` and each other.
    """
    old = basis.double()
    total = inputs.energy().unsqueeze(-1)
    energies, vectors = inputs.residual_spectrum(old)
    old_energy = (total - energies.sum(-1, keepdim=True)).clamp(min=0)
    held = old_energy + energies.cumsum(-1)  # with each vector; without it, held - energies
    taken = (held if below else held - energies) < min(threshold, MAX_THRESHOLD) * total
    taken = taken[..., : int(taken.sum(-1).max())].unsqueeze(-2)  # what is taken stands first
    new = vectors[..., : taken.shape[-1]] * taken
    new = new - old @ (old.mT @ new)
    new = torch.linalg.qr(new).Q * taken
    return _compact(torch.cat([old, new], dim=-1))


def ranks(basis: Tensor) -> Tensor:
    """Number of basis vectors of each group."""
    return basis.any(dim=-2).sum(-1)


def _compact(basis: Tensor) -> Tensor:
    """Move each group's zero columns to the end and cut what is zero in all groups."""
    order = basis.any(dim=-2).to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    basis = basis.take_along_dim(order.unsqueeze(-2), dim=-1)
    return basis[..., : int(ranks(basis).max())]


@dataclass(frozen=True)
class Projector:
    """``G -> G − G U Uᵀ`` as a thin factor: ``U``, or a basis of its complement where that is the thinner one."""

    factor: Tensor
    complement: bool

    def __call__(self, rows: Tensor) -> Tensor:
        """Project ``rows`` (groups, out, d)."""
        inside = (rows @ self.factor) @ self.factor.mT
        return inside if self.complement else rows - inside

    @staticmethod
    def away_from(basis: Tensor) -> Projector:
        """The projector that removes the span of ``basis``."""
        dimension = basis.shape[-2]
        rank = ranks(basis)
        fewest = int(rank.min())
        if dimension - fewest >= basis.shape[-1]:
            return Projector(basis, complement=False)
        # A zero column adds nothing to a Householder QR: the columns from a group's rank on span its complement.
        full = torch.linalg.qr(basis.double(), mode="complete").Q[..., fewest:]
        beyond = torch.arange(fewest, dimension, device=basis.device) >= rank.unsqueeze(-1)
        return Projector((full * beyond.unsqueeze(-2)).to(basis.dtype), complement=True)

"""The inputs of a model's layers, streamed into matrices."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from became_avalanche.layers.layer import Layer

_BLOCK = 256
"""Gram matrices of more rows than this are made of blocks, of which the upper half is copied from the lower one."""


class InputMatrix:
    """A layer's input matrix ``A``, streamed in float64.

    ``A`` itself is kept while it has fewer columns than rows, the Gram matrix ``C = A Aᵀ`` from then on: whichever is
    smaller. Everything that the projection methods ask of ``A`` is a function of ``C``.
    """

    def __init__(self, *, single: bool = False) -> None:
        """Init.

        :param single: multiply columns of float32 with more than 256 rows as they come, add up in float64, and find
            eigenvectors in float32. That changes energies by less than 1e-5 of the total, and directions of less energy
            than that are not orthogonal to the others.
        """
        self.single = single
        self._columns: Tensor | None = None
        self._lower: Tensor | None = None
        self._mirrored = True

    def add(self, columns: Tensor) -> None:
        """Append ``columns`` (groups, d, n)."""
        groups, d, _ = columns.shape
        self.single &= columns.dtype == torch.float32
        if self._lower is None:
            if self._columns is not None:
                columns = torch.cat([self._columns, columns.double()], dim=-1)
            if columns.shape[-1] < d:
                self._columns = columns.double()
                return
            self._lower, self._columns = columns.new_zeros(groups, d, d, dtype=torch.float64), None
        self._mirrored = d <= _BLOCK
        _add_gram(self._lower, columns if self.single and d > _BLOCK else columns.double())

    @property
    def _gram(self) -> Tensor:
        """``C``, which there is once there are as many columns as rows."""
        assert self._lower is not None
        if not self._mirrored:
            self._lower = self._lower.tril() + self._lower.tril(-1).mT
            self._mirrored = True
        return self._lower

    def empty_basis(self) -> Tensor:
        """A basis of no vectors for these inputs."""
        kept = self._kept_columns() if self._lower is None else self._lower
        return kept.new_zeros(*kept.shape[:2], 0)

    def energy(self) -> Tensor:
        """``‖A‖²`` of each group."""
        if self._lower is not None:
            return self._lower.diagonal(dim1=-2, dim2=-1).sum(-1)
        return self._kept_columns().square().sum((-2, -1))

    def energy_along(self, basis: Tensor) -> Tensor:
        """``uᵀ C u`` for each vector ``u`` of ``basis``: the energy of the inputs along it."""
        basis = basis.double()
        if self._lower is not None:
            return (basis * (self._gram @ basis)).sum(-2).clamp(min=0)
        return (self._kept_columns().mT @ basis).square().sum(-2)

    def compressed(self) -> Tensor:
        """The fewest columns with the same Gram matrix: left singular vectors times singular values, descending.

        At most ``d`` columns, whatever went in. As a square root of ``C`` they keep in single precision what ``C``
        itself needs double precision for.
        """
        energies, vectors = self.residual_spectrum(self.empty_basis())
        noise = energies[..., :1] * energies.shape[-1] * torch.finfo(energies.dtype).eps
        kept = energies > noise
        columns = vectors * (energies.sqrt() * kept).unsqueeze(-2)
        return columns[..., : int(kept.sum(-1).max())]

    def residual_spectrum(self, basis: Tensor) -> tuple[Tensor, Tensor]:
        """Squared singular values, descending, and left singular vectors of ``Â = A − U Uᵀ A``."""
        if self._lower is None:
            columns = self._kept_columns()
            columns = columns - basis @ (basis.mT @ columns)
            if self.single and columns.shape[-2] > _BLOCK:
                energies, right = torch.linalg.eigh(columns.mT @ columns)
                vectors = F.normalize(columns @ right, dim=-2)  # orthogonal but for the weakest
                return energies.flip(-1).clamp(min=0), vectors.flip(-1)
            vectors, values, _ = torch.linalg.svd(columns, full_matrices=False)
            return values.square(), vectors
        large = self._lower.shape[-1] > _BLOCK
        if large and basis.shape[-1] == 0:
            residual = self._lower  # the lower half is all that is read of it
        else:
            gram = self._gram
            left = gram - basis @ (basis.mT @ gram)
            residual = left - (left @ basis) @ basis.mT
            residual = (residual + residual.mT) / 2
        energies, vectors = torch.linalg.eigh(residual.float() if self.single and large else residual)
        return energies.flip(-1).clamp(min=0).double(), vectors.flip(-1).double()

    def _kept_columns(self) -> Tensor:
        if self._columns is None:
            raise RuntimeError("this input matrix is empty: add columns first")
        return self._columns


def _add_gram(gram: Tensor, columns: Tensor) -> None:
    """Add ``A Aᵀ`` to ``gram``; beyond the size of a block, only to its lower half."""
    d = columns.shape[-2]
    if d <= _BLOCK:
        gram += columns @ columns.mT
        return
    top, bottom = columns[..., : d // 2, :], columns[..., d // 2 :, :]
    _add_gram(gram[..., : d // 2, : d // 2], top)
    gram[..., d // 2 :, : d // 2] += bottom @ top.mT
    _add_gram(gram[..., d // 2 :, d // 2 :], bottom)


@contextmanager
def recorded_inputs(
    layers: Mapping[str, list[Layer]],
    ones: Collection[str] = (),
    *,
    batch_mean: bool = False,
    single: bool = False,
) -> Iterator[dict[str, InputMatrix]]:
    """While open, every forward pass adds the inputs of ``layers`` to their matrices.

    Layers whose name is in ``ones`` get a constant 1 as last row: the input that their bias multiplies. With
    ``batch_mean``, what is added is the mean input of the batch. A layer that sees no input has no entry. ``single`` is
    that of ``InputMatrix``.
    """
    matrices: dict[str, InputMatrix] = {}

    @torch.no_grad()
    def record(name: str, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        columns_of = layer.mean_columns if batch_mean else layer.columns
        for columns in columns_of(*args, **kwargs):
            if name in ones:
                columns = F.pad(columns, (0, 0, 0, 1), value=1.0)
            matrices.setdefault(name, InputMatrix(single=single)).add(columns)

    with ExitStack() as hooks:
        for name, users in layers.items():
            for layer in users:
                hook = layer.module.register_forward_pre_hook(
                    lambda module, args, kwargs, name=name, layer=layer: record(name, layer, args, kwargs),
                    with_kwargs=True,
                    prepend=True,  # before hooks that change the input
                )
                hooks.callback(hook.remove)
        yield matrices

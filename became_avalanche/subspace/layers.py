"""Which layers are protected, and what a layer's inputs are.

A layer with weight matrix ``W`` (out x d) sees an input matrix ``A`` (d x n): one column per sample, token or patch,
padding, stride and dilation applied, so that its output is ``W A``. A convolution with groups is one such pair per
group, so every matrix here carries a leading group axis: ``W`` is (groups, out / groups, d), ``A`` is (groups, d, n).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Layer: TypeAlias = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d

NORMALISATION = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)

_CHUNK = 2**21
"""Elements of unfolded input held at a time: 16 MiB in float64, which stay in the caches and the allocator's hands."""

_BLOCK = 256
"""Gram matrices of more rows than this are made of blocks, of which the upper half is copied from the lower one."""


@dataclass
class LayerMap:
    """The trainable parts of a model, as a projection method sees them."""

    protected: dict[str, list[Layer]] = field(default_factory=dict)
    """Weight name -> the layers that use this weight (more than one if layers share it)."""
    biases: dict[str, list[str]] = field(default_factory=dict)
    """Weight name -> names of the biases beside it, where there are any (several if layers share the weight)."""
    normalisation: list[str] = field(default_factory=list)
    """Names of the parameters of normalisation layers."""
    unprotectable: list[str] = field(default_factory=list)
    """Modules that own parameters but are of no protectable kind."""


def map_layers(model: nn.Module, skip: Collection[str] = ()) -> LayerMap:
    """Find the layers of ``model`` by module type, leaving out everything at or below the names in ``skip``.

    Only exact types count: a subclass, or a layer under weight normalisation, may compute something else than ``W A``.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = LayerMap()
    for module_name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own or is_below(module_name, skip):
            continue
        if type(module) in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) and "weight" in own:
            weight = names[id(own["weight"])]
            layers.protected.setdefault(weight, []).append(module)
            if "bias" in own:
                biases = layers.biases.setdefault(weight, [])
                biases += {names[id(own["bias"])]} - set(biases)
        elif isinstance(module, NORMALISATION):
            layers.normalisation += [names[id(parameter)] for parameter in own.values()]
        else:
            layers.unprotectable.append(f"{module_name or 'model'} ({type(module).__name__})")
    return layers


def is_below(name: str, prefixes: Collection[str]) -> bool:
    """Whether ``name`` is one of the module names ``prefixes`` or lies below one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def as_rows(tensors: Sequence[Tensor], groups: int) -> Tensor:
    """Tensors with one entry per output unit (a weight, its bias) side by side, as rows (groups, out / groups, d).

    The rows of a single tensor are a view of it where possible.
    """
    rows = [tensor.reshape(groups, len(tensor) // groups, -1) for tensor in tensors]
    return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)


def from_rows(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Undo ``as_rows``: cut ``rows`` into tensors of the shapes of ``like``."""
    parts = rows.split_with_sizes([tensor[0].numel() for tensor in like], dim=-1)
    return [part.reshape(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def input_columns(layer: Layer, x: Tensor) -> Iterator[Tensor]:
    """The input ``x`` of ``layer`` as columns (groups, d, n), in chunks of bounded size."""
    if isinstance(layer, nn.Linear):
        yield x.reshape(1, -1, layer.in_features).mT
        return
    if x.dim() == len(layer.kernel_size) + 1:  # a single sample without a batch axis
        x = x.unsqueeze(0)
    size = len(x) * _unfold(layer, x[:1]).numel()
    for chunk in x.chunk(size // _CHUNK + 1):
        yield _unfold(layer, chunk)


def _unfold(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    """Patches of ``x`` as columns, for any number of spatial axes (``F.unfold`` knows only two)."""
    axes = len(layer.kernel_size)
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    x = F.pad(x, _padding(layer), mode=mode)
    for axis, (kernel, stride, dilation) in enumerate(
        zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
    ):
        x = x.unfold(2 + axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
    # batch, channel, positions..., kernel... -> channel, kernel..., batch, positions...
    x = x.permute(1, *range(2 + axes, 2 + 2 * axes), 0, *range(2, 2 + axes))
    return x.reshape(layer.groups, layer.in_channels // layer.groups * prod(layer.kernel_size), -1)


def _padding(layer: nn.Conv1d | nn.Conv2d | nn.Conv3d) -> list[int]:
    """``layer.padding`` in the order of ``F.pad``: last axis first, both sides of each."""
    totals: list[int]
    if layer.padding == "same":
        totals = [dilation * (kernel - 1) for kernel, dilation in zip(layer.kernel_size, layer.dilation, strict=True)]
    elif layer.padding == "valid":
        totals = [0] * len(layer.kernel_size)
    else:
        totals = [2 * int(side) for side in layer.padding]
    return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]


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

    def record(name: str, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = (args[0] if args else kwargs["input"]).detach()
        for columns in input_columns(layer, x.mean(0, keepdim=True) if batch_mean else x):
            if name in ones:
                columns = F.pad(columns, (0, 0, 0, 1), value=1.0)
            matrices.setdefault(name, InputMatrix(single=single)).add(columns)

    with ExitStack() as hooks:
        for name, users in layers.items():
            for layer in users:
                hook = layer.register_forward_pre_hook(
                    lambda module, args, kwargs, name=name: record(name, module, args, kwargs),
                    with_kwargs=True,
                    prepend=True,  # before hooks that change the input
                )
                hooks.callback(hook.remove)
        yield matrices

"""Input matrices of a model's layers, accumulated batch by batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from became_avalanche.layers.functional import WeightUses
from became_avalanche.layers.layer import Layer, Lines, with_ones
from became_avalanche.layers.linear import LinearLayer

_BLOCK = 256
"""Gram matrices with more rows than this are computed in blocks: the lower half is computed, the upper half copied."""


class InputMatrix:
    """The input matrix ``A`` of a layer, accumulated in float64.

    ``A`` itself is stored while it has fewer columns than rows, the Gram matrix ``C = A Aᵀ`` from then on: whichever is
    smaller. Everything that the projection methods need is a function of ``C``.
    """

    def __init__(self, *, single: bool = False) -> None:
        """Init.

        :param single: faster and less precise: if columns are float32 with more than 256 rows, multiply them in
            float32, add up the products in float64, and compute eigenvectors in float32. Energies change by less than
            1e-5 of the total. Directions with less energy than that are not orthogonal to the others.
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
        if d <= _BLOCK:
            self._lower += columns.double() @ columns.double().mT
            return
        for lower, own in zip(self._lower, columns if self.single else columns.double(), strict=True):
            _add_gram(lower, own)

    def add_windows(self, lines: Lines) -> None:
        """Append the columns of all windows of ``lines``.

        With ``X_l`` the values of line ``l``, the block of ``C`` for the lines ``k`` and ``k + s`` of a window is the
        sum of ``X_l X_{l+s}ᵀ`` over ``l = k, ..., k + windows - 1``. From one ``k`` to the next, the sum loses its
        first term and gains a new last term. So it takes about one product per line, not one per window and line.
        """
        values, size, windows = *lines, lines.windows
        channels, others, _, n = values.shape
        d = channels * size * others
        if self._lower is None and windows * n < d:
            columns = values.unfold(2, size, 1).permute(0, 4, 1, 2, 3)  # channels, lines of the window, others, ...
            self.add(columns.reshape(1, d, windows * n))
            return
        if self._lower is None:
            self.add(values.new_zeros(1, d, d))  # d columns of zeros: switches to the Gram matrix
        assert self._lower is not None
        self.single &= values.dtype == torch.float32
        x = (values if self.single and d > _BLOCK else values.double()).flatten(0, 1)
        blocks = self._lower.view(channels, size, others, channels, size, others)

        def products(line: int, shift: int, count: int = 1) -> Tensor:
            return x[:, line : line + count].flatten(1) @ x[:, line + shift : line + shift + count].flatten(1).T

        for shift in range(size):
            total = products(0, shift, windows)
            for k in range(size - shift):
                if k > 0:
                    total += products(k - 1 + windows, shift) - products(k - 1, shift)
                block = total.view(channels, others, channels, others)
                blocks[:, k, :, :, k + shift] += block
                if shift > 0:
                    blocks[:, k + shift, :, :, k] += block.permute(2, 3, 0, 1)

    @property
    def _gram(self) -> Tensor:
        """``C``, which exists once there are as many columns as rows."""
        assert self._lower is not None
        if not self._mirrored:
            self._lower = self._lower.tril() + self._lower.tril(-1).mT
            self._mirrored = True
        return self._lower

    def empty_basis(self) -> Tensor:
        """Return a basis without vectors for these inputs."""
        kept = self._kept_columns() if self._lower is None else self._lower
        return kept.new_zeros(*kept.shape[:2], 0)

    def energy(self) -> Tensor:
        """Return ``‖A‖²`` of each group."""
        if self._lower is not None:
            return self._lower.diagonal(dim1=-2, dim2=-1).sum(-1)
        return self._kept_columns().square().sum((-2, -1))

    def energy_along(self, basis: Tensor) -> Tensor:
        """Return ``uᵀ C u`` for each vector ``u`` of ``basis``: the energy of the inputs along ``u``."""
        basis = basis.double()
        if self._lower is not None:
            return (basis * (self._gram @ basis)).sum(-2).clamp(min=0)
        return (self._kept_columns().mT @ basis).square().sum(-2)

    def compressed(self) -> Tensor:
        """Return a minimal square root of ``C``: left singular vectors times singular values, in descending order.

        It has at most ``d`` columns, however many were added. It can be stored in single precision without the loss
        that ``C`` itself would suffer.
        """
        energies, vectors = self.residual_spectrum(self.empty_basis())
        noise = energies[..., :1] * energies.shape[-1] * torch.finfo(energies.dtype).eps
        kept = energies > noise
        columns = vectors * (energies.sqrt() * kept).unsqueeze(-2)
        return columns[..., : int(kept.sum(-1).max())]

    def residual_spectrum(self, basis: Tensor) -> tuple[Tensor, Tensor]:
        """Return the squared singular values, descending, and the left singular vectors of ``Â = A − U Uᵀ A``."""
        if self._lower is None:
            columns = self._kept_columns()
            columns = columns - basis @ (basis.mT @ columns)
            if self.single and columns.shape[-2] > _BLOCK:
                energies, right = torch.linalg.eigh(columns.mT @ columns)
                vectors = F.normalize(columns @ right, dim=-2)  # orthogonal, except the weakest
                return energies.flip(-1).clamp(min=0), vectors.flip(-1)
            vectors, values, _ = torch.linalg.svd(columns, full_matrices=False)
            return values.square(), vectors
        large = self._lower.shape[-1] > _BLOCK
        if large and basis.shape[-1] == 0:
            residual = self._lower  # eigh reads only the lower half
        else:
            gram = self._gram.float() if self.single and large else self._gram
            basis = basis.to(gram)
            left = gram - basis @ (basis.mT @ gram)
            residual = left - (left @ basis) @ basis.mT
            residual = (residual + residual.mT) / 2
        energies, vectors = torch.linalg.eigh(residual.float() if self.single and large else residual)
        return energies.flip(-1).clamp(min=0).double(), vectors.flip(-1).double()

    def _kept_columns(self) -> Tensor:
        if self._columns is None:
            raise RuntimeError("this input matrix is empty: add columns first")
        return self._columns


def _add_gram(lower: Tensor, columns: Tensor) -> None:
    """Add the lower half of ``A Aᵀ`` to ``lower``, block by block. Blocks on the diagonal are added entirely."""
    d = len(columns)
    if d <= _BLOCK:
        lower += columns @ columns.T
        return
    top, bottom = columns.tensor_split(2)
    half = len(top)
    _add_gram(lower[:half, :half], top)
    lower[half:, :half] += bottom @ top.T
    _add_gram(lower[half:, half:], bottom)


def add_inputs(matrix: InputMatrix, layer: Layer, *args: Any, **kwargs: Any) -> None:
    """Add the inputs of a call of ``layer`` to ``matrix``: as windows of lines if the layer has them, or as columns."""
    lines = layer.lines(*args, **kwargs)
    if lines is None:
        for columns in layer.columns(*args, **kwargs):
            matrix.add(columns)
    else:
        for chunk in lines:
            matrix.add_windows(chunk)


@contextmanager
def recorded_inputs(
    layers: Mapping[str, list[Layer]],
    ones: Collection[str] = (),
    *,
    batch_mean: bool = False,
    single: bool = False,
    other_uses: dict[str, str] | None = None,
) -> Iterator[dict[str, InputMatrix]]:
    """While open, every forward pass adds the inputs of ``layers`` to their matrices, which are yielded by weight name.

    Inputs of ``F.linear`` with the weight of a Linear layer count too. A layer without inputs has no matrix.

    :param layers: weight name -> the layers that use this weight.
    :param ones: names of weights whose inputs get a constant 1 as last row: the input that the bias multiplies.
    :param batch_mean: add the mean input of each batch instead of all inputs.
    :param single: see ``InputMatrix``.
    :param other_uses: on exit, gets the names of weights that are used outside their modules in any other way, with
        the name of the function. Their inputs in these uses are unknown.
    """
    matrices: dict[str, InputMatrix] = {}

    @torch.no_grad()
    def record(name: str, layer: Layer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch._C._functorch.maybe_current_level() is not None:
            raise ValueError(
                f"{name} is used inside torch.vmap or another transform of torch.func, so its inputs cannot be "
                "recorded; name its module in exclude, or call the layer on the whole batch"
            )
        matrix = matrices.setdefault(name, InputMatrix(single=single))
        if batch_mean:
            for columns in layer.mean_columns(*args, **kwargs):
                matrix.add(with_ones(columns) if name in ones else columns)
        elif name in ones:
            for columns in layer.augmented_columns(*args, **kwargs):
                matrix.add(columns)
        else:
            add_inputs(matrix, layer, *args, **kwargs)

    @torch.no_grad()
    def record_linear(name: str, x: Tensor, bias: Tensor | None) -> None:
        matrix, layer = matrices.setdefault(name, InputMatrix(single=single)), layers[name][0]
        own = bias is not None and bias is layer.bias
        # another bias may contain the layer's own, so inputs count with and without the constant 1
        constants = [1.0] if own else [0.0] if bias is None else [0.0, 1.0]
        for columns in layer.mean_columns(x) if batch_mean else layer.columns(x):
            for constant in constants if name in ones else ():
                matrix.add(F.pad(columns, (0, 0, 0, 1), value=constant))
            if name not in ones:
                matrix.add(columns)

    weights = {name: users[0].weight for name, users in layers.items() if users[0].rule is None}
    linear = [name for name, users in layers.items() if isinstance(users[0], LinearLayer)]
    uses = WeightUses(weights, linear, record_linear)
    with ExitStack() as hooks:
        hooks.callback(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled())
        torch.backends.mha.set_fastpath_enabled(False)  # it computes encoder layers without calling their modules
        for name, users in layers.items():
            for layer in (layer for layer in users if layer.in_calls):
                register = partial(layer.module.register_forward_pre_hook, with_kwargs=True)
                around = partial(_count, uses.inside, name)
                hooks.callback(register(lambda *call, enter=around: enter(1), prepend=True).remove)
                hook = register(lambda module, args, kwargs, name=name, layer=layer: record(name, layer, args, kwargs))
                hooks.callback(hook.remove)
                _move_scaling_to_end(layer.module)  # the recorded input is that of the weight itself
                hook = layer.module.register_forward_hook(lambda *call, leave=around: leave(-1), always_call=True)
                hooks.callback(hook.remove)
        hooks.enter_context(uses)
        yield matrices
    if other_uses is not None:
        other_uses.update(uses.others)


def _move_scaling_to_end(module: nn.Module) -> None:
    """Move pre-hooks that replace the input instead of scaling the weight (TRGP) behind all others."""
    hooks = module._forward_pre_hooks
    for key in [key for key, hook in hooks.items() if getattr(hook, "scales_weight", False)]:
        hooks[key] = hooks.pop(key)


def _count(inside: Counter[str], name: str, change: int) -> None:
    inside[name] += change

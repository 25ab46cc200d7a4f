"""Convolutions: every patch of the input is a column."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from math import prod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from became_avalanche.layers.layer import Layer, Lines, keeps_forward

CHUNK = 2**21
"""Elements of unfolded input to hold at a time: 16 MiB in float64, small enough to be cached and reused."""


class ConvolutionLayer(Layer):
    """``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``, and subclasses that keep their ``forward``."""

    module: nn.Conv1d | nn.Conv2d | nn.Conv3d
    axes: tuple[int, ...] = ()
    """Order of the weight's axes before it is flattened to rows; empty for the default order."""

    @classmethod
    def find(cls, module: nn.Module) -> list[Layer]:
        if not any(keeps_forward(module, kind, "_conv_forward") for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            return []
        assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
        return [cls(module, groups=module.groups)]

    def columns(self, input: Tensor) -> Iterator[Tensor]:
        for patches in self._chunks(input, self._unfold):
            yield patches.reshape(self.groups, self.module.in_channels // self.groups * prod(patches.shape[1:-1]), -1)

    def lines(self, input: Tensor) -> Iterator[Lines] | None:
        """Return the inputs as windows of lines if that saves half of the work.

        A patch and the one below it share all lines except one, if stride and dilation are 1 along the first axis.
        """
        layer = self.module
        if layer.groups > 1 or layer.stride[0] > 1 or layer.dilation[0] > 1:
            return None
        size, others = layer.kernel_size[0], prod(layer.kernel_size[1:])
        unfolded = self._chunks(input, partial(self._unfold, whole_lines=True))
        chunks = (Lines(x.reshape(len(x), others, *x.shape[-2:]), size) for x in unfolded)
        first = next(chunks)
        saves_half = 2 * first.values.shape[2] <= first.size * first.windows
        return chain([first], chunks) if saves_half else None

    def mean_columns(self, input: Tensor) -> Iterator[Tensor]:
        return self.columns(input.mean(0, keepdim=True))

    def output_columns(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(len(gradient), self.groups, -1, gradient[0, 0].numel())

    def weight_rows(self, weight: Tensor) -> Tensor:
        return super().weight_rows(weight.permute(self.axes) if self.axes else weight)

    def weight_like(self, rows: Tensor) -> Tensor:
        if not self.axes:
            return super().weight_like(rows)
        leading = rows.shape[:-3]
        shape = [self.weight.shape[axis] for axis in self.axes]
        back = [len(leading) + self.axes.index(axis) for axis in range(len(shape))]
        return rows.reshape(*leading, *shape).permute(*range(len(leading)), *back)

    def in_memory_order(self, factor: Tensor) -> tuple[Layer, Tensor]:
        weight = self.weight
        reordered = ConvolutionLayer(self.module, self.weight_name, self.bias_name, self.groups)
        reordered.axes = (0, *sorted(range(1, weight.dim()), key=weight.stride, reverse=True))
        inputs = torch.arange(weight[0].numel(), device=factor.device).reshape(1, *weight.shape[1:])
        return reordered, factor[:, inputs.permute(reordered.axes).flatten()]

    def _chunks(self, x: Tensor, unfold: Callable[[Tensor], Tensor]) -> Iterator[Tensor]:
        """Unfold a batch in chunks of bounded size."""
        if x.dim() == len(self.module.kernel_size) + 1:  # a single sample without a batch axis
            x = x.unsqueeze(0)
        size = len(x) * unfold(x[:1]).numel()
        for chunk in x.chunk(size // CHUNK + 1):
            yield unfold(chunk)

    def _unfold(self, x: Tensor, *, whole_lines: bool = False) -> Tensor:
        """Return the patches (channels, kernel..., n) of ``x``. ``F.unfold`` supports only two spatial axes.

        With ``whole_lines``, they span the whole first spatial axis: (channels, other axes of the kernel..., lines, n).
        """
        layer = self.module
        axes = len(layer.kernel_size)
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, self._padding(), mode=mode).contiguous()  # makes copying patches fast
        kernels = list(zip(layer.kernel_size, layer.stride, layer.dilation, strict=True))
        for axis in range(whole_lines, axes):
            kernel, stride, dilation = kernels[axis]
            x = x.unfold(2 + axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        # batch, channel, (lines,) positions..., kernel... -> channel, kernel..., (lines,) batch, positions...
        lines, positions = range(2, 2 + whole_lines), range(2 + whole_lines, 2 + axes)
        x = x.permute(1, *range(2 + axes, x.dim()), *lines, 0, *positions)
        return x.flatten(axes + 1)

    def _padding(self) -> list[int]:
        """Return the padding as ``F.pad`` expects it: last axis first, two sides per axis."""
        layer = self.module
        totals: list[int]
        if layer.padding == "same":
            totals = [
                dilation * (kernel - 1) for kernel, dilation in zip(layer.kernel_size, layer.dilation, strict=True)
            ]
        elif layer.padding == "valid":
            totals = [0] * len(layer.kernel_size)
        else:
            totals = [2 * int(side) for side in layer.padding]
        return [side for total in reversed(totals) for side in (total // 2, total - total // 2)]

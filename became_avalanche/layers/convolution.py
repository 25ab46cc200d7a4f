"""Convolutions: every patch of the input is a column."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor, nn

from became_avalanche.layers.layer import Layer

if TYPE_CHECKING:
    from typing_extensions import Self

CHUNK = 2**21
"""Elements of unfolded input held at a time: 16 MiB in float64, which stay in the caches and the allocator's hands."""


class ConvolutionLayer(Layer):
    """``nn.Conv1d``, ``nn.Conv2d`` and ``nn.Conv3d``."""

    module: nn.Conv1d | nn.Conv2d | nn.Conv3d

    @classmethod
    def find(cls, module: nn.Module) -> list[Self]:
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and type(module).__module__ == nn.Conv1d.__module__:
            return [cls(module, groups=module.groups)]
        return []

    def columns(self, input: Tensor) -> Iterator[Tensor]:
        if input.dim() == len(self.module.kernel_size) + 1:  # a single sample without a batch axis
            input = input.unsqueeze(0)
        size = len(input) * self._unfold(input[:1]).numel()
        for chunk in input.chunk(size // CHUNK + 1):
            yield self._unfold(chunk)

    def mean_columns(self, input: Tensor) -> Iterator[Tensor]:
        return self.columns(input.mean(0, keepdim=True))

    def output_columns(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(len(gradient), self.groups, -1, gradient[0, 0].numel())

    def _unfold(self, x: Tensor) -> Tensor:
        """Patches of ``x`` as columns, for any number of spatial axes (``F.unfold`` knows only two)."""
        layer = self.module
        axes = len(layer.kernel_size)
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        x = F.pad(x, self._padding(), mode=mode)
        for axis, (kernel, stride, dilation) in enumerate(
            zip(layer.kernel_size, layer.stride, layer.dilation, strict=True)
        ):
            x = x.unfold(2 + axis, dilation * (kernel - 1) + 1, stride)[..., ::dilation]
        # batch, channel, positions..., kernel... -> channel, kernel..., batch, positions...
        x = x.permute(1, *range(2 + axes, 2 + 2 * axes), 0, *range(2, 2 + axes))
        return x.reshape(layer.groups, layer.in_channels // layer.groups * prod(layer.kernel_size), -1)

    def _padding(self) -> list[int]:
        """The padding in the order of ``F.pad``: last axis first, both sides of each."""
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

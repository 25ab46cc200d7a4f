"""Transposed convolutions: every patch of the input, with zeros between its values, is a column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from became_avalanche.layers.convolution import ConvolutionLayer
from became_avalanche.layers.layer import Layer, keeps_forward

PLAIN = {nn.ConvTranspose1d: nn.Conv1d, nn.ConvTranspose2d: nn.Conv2d, nn.ConvTranspose3d: nn.Conv3d}


class TransposedConvolutionLayer(Layer):
    """``nn.ConvTranspose1d``, ``nn.ConvTranspose2d`` and ``nn.ConvTranspose3d``, and subclasses that keep ``forward``.

    A transposed convolution equals a convolution of stride 1 with the flipped kernel, whose input has ``stride − 1``
    zeros between neighbouring values. Here the columns are flipped instead of the kernel. The weight is
    (in, out / groups, kernel).
    """

    module: nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d

    @classmethod
    def find(cls, module: nn.Module) -> list[Layer]:
        if not any(keeps_forward(module, kind, "_output_padding") for kind in PLAIN):
            return []
        assert isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
        return [cls(module, groups=module.groups)]

    def columns(self, input: Tensor, output_size: list[int] | None = None) -> Iterator[Tensor]:
        layer: Any = self.module
        kind: Any = next(plain for transposed, plain in PLAIN.items() if isinstance(layer, transposed))
        plain = kind(
            layer.in_channels,
            layer.groups,
            layer.kernel_size,
            dilation=layer.dilation,
            groups=layer.groups,
            device="meta",
        )
        for columns in ConvolutionLayer(plain, groups=layer.groups).columns(self._insert_zeros(input, output_size)):
            by_channel = columns.reshape(layer.in_channels, -1, columns.shape[-1])
            yield by_channel.flip(1).reshape(columns.shape)

    def mean_columns(self, input: Tensor, output_size: list[int] | None = None) -> Iterator[Tensor]:
        return self.columns(input.mean(0, keepdim=True), output_size)

    def weight_rows(self, weight: Tensor) -> Tensor:
        grouped = weight.reshape(self.groups, len(weight) // self.groups, weight.shape[1], -1)
        return grouped.transpose(1, 2).flatten(2)

    def weight_like(self, rows: Tensor) -> Tensor:
        grouped = rows.reshape(*rows.shape[:-1], len(self.weight) // self.groups, -1)
        return grouped.transpose(-3, -2).reshape(*rows.shape[:-3], *self.weight.shape)

    def output_columns(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(len(gradient), self.groups, -1, gradient[0, 0].numel())

    def _insert_zeros(self, x: Tensor, output_size: list[int] | None) -> Tensor:
        """Insert zeros between the values of ``x`` and pad it to the size that the output needs."""
        layer: Any = self.module
        axes = len(layer.kernel_size)
        extra = layer._output_padding(
            x, output_size, layer.stride, layer.padding, layer.kernel_size, axes, layer.dilation
        )
        sizes = (step * (size - 1) + 1 for step, size in zip(layer.stride, x.shape[-axes:], strict=True))
        spread = x.new_zeros(*x.shape[:-axes], *sizes)
        places: tuple[Any, ...] = (..., *(slice(None, None, step) for step in layer.stride))
        spread[places] = x
        sides: list[int] = []
        for axis in range(axes):
            side = layer.dilation[axis] * (layer.kernel_size[axis] - 1) - int(layer.padding[axis])
            sides = [side, side + extra[axis], *sides]  # ``F.pad`` expects the last axis first
        return F.pad(spread, sides)

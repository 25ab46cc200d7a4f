"""Linear layers: every vector along the last axis of the input is a column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from became_avalanche.layers.layer import Layer

if TYPE_CHECKING:
    from typing_extensions import Self


class LinearLayer(Layer):
    """``nn.Linear``."""

    takes_rows = True

    @classmethod
    def find(cls, module: nn.Module) -> list[Self]:
        return [cls(module)] if type(module) is nn.Linear else []

    def columns(self, input: Tensor) -> Iterator[Tensor]:
        yield input.reshape(1, -1, input.shape[-1]).mT

    def mean_columns(self, input: Tensor) -> Iterator[Tensor]:
        return self.columns(input.mean(0, keepdim=True))

    def squares(self, own: str, x: Tensor, gradient: Tensor) -> Tensor | None:
        """With one column per sample: ``Σ_i (d_i a_iᵀ)² = Σ_i d_i² (a_i²)ᵀ``."""
        if x.dim() != 2:
            return None
        return gradient.square().sum(0) if own == self.bias_name else gradient.square().mT @ x.square()

    def output_columns(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(len(gradient), 1, -1, gradient.shape[-1]).mT

"""Linear layers: every vector along the last axis of the input is a column."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from became_avalanche.layers.layer import Layer, keeps_forward


class LinearLayer(Layer):
    """``nn.Linear``, and subclasses that keep its ``forward``."""

    takes_rows = True

    @classmethod
    def find(cls, module: nn.Module) -> list[Layer]:
        return [cls(module)] if keeps_forward(module, nn.Linear) else []

    def columns(self, input: Tensor) -> Iterator[Tensor]:
        yield input.reshape(1, -1, input.shape[-1]).mT

    def mean_columns(self, input: Tensor) -> Iterator[Tensor]:
        return self.columns(input.mean(0, keepdim=True))

    def squares(self, name: str, x: Tensor, gradient: Tensor) -> Tensor | None:
        """With one column per sample: ``Σ_i (d_i a_iᵀ)² = Σ_i d_i² (a_i²)ᵀ``."""
        if x.dim() != 2:
            return None
        return gradient.square().sum(0) if name == self.bias_name else gradient.square().mT @ x.square()

    def output_columns(self, gradient: Tensor) -> Tensor:
        return gradient.reshape(len(gradient), 1, -1, gradient.shape[-1]).mT

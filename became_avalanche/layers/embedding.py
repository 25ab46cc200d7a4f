"""Embeddings: every row of the weight has a separate input, which is 1 where its token occurs."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from became_avalanche.layers.layer import Layer, keeps_forward


class EmbeddingLayer(Layer):
    """``nn.Embedding``, and subclasses that keep its ``forward``.

    As a matrix product, an embedding multiplies its transposed weight with one-hot columns, one per token. One-hot
    columns are either equal or orthogonal. So each row of the weight is a group with one input, and a basis needs one
    number per row: whether the row has been looked up.
    """

    module: nn.Embedding

    @classmethod
    def find(cls, module: nn.Module) -> list[Layer]:
        if not keeps_forward(module, nn.Embedding):
            return []
        assert isinstance(module, nn.Embedding)
        return [cls(module, bias="", groups=module.num_embeddings)]

    def columns(self, input: Tensor) -> Iterator[Tensor]:
        """Yield one column per row of the weight. Its energy is the number of times that the token occurs."""
        numbers = torch.bincount(input.flatten(), minlength=self.groups)
        yield numbers.to(self.weight.dtype).sqrt().reshape(-1, 1, 1)

    def weight_rows(self, weight: Tensor) -> Tensor:
        return weight.unsqueeze(-1)

    def per_sample(self, name: str, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the sum of the output gradients of each token, for each sample."""
        samples, width = len(x), gradient.shape[-1]
        places = x.reshape(samples, -1) + self.groups * torch.arange(samples, device=x.device).unsqueeze(-1)
        sums = gradient.new_zeros(samples * self.groups, width)
        sums.index_add_(0, places.flatten(), gradient.reshape(-1, width))
        if self.module.padding_idx is not None:
            sums.view(samples, self.groups, width)[:, self.module.padding_idx] = 0
        return sums.view(samples, self.groups, width)

    def elements_per_sample(self, name: str, gradient: Tensor) -> int:
        return gradient[0].numel()

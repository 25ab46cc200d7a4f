"""Multi-head attention: the projections of queries, keys and values, and the output projection."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from became_avalanche.layers.layer import Layer, keeps_forward, with_ones

INPUTS = ("q", "k", "v")


class AttentionLayer(Layer):
    """A weight of ``nn.MultiheadAttention``, or of a subclass that keeps its ``forward``.

    ``bias_k`` and ``bias_v``, which are appended to keys and values, are constants: they multiply no input.
    """

    module: nn.MultiheadAttention
    has_per_sample_gradients = False

    @classmethod
    def find(cls, module: nn.Module) -> list[Layer]:
        if not keeps_forward(module, nn.MultiheadAttention):
            return []
        output = OutputProjection(module, "out_proj.weight", "out_proj.bias")
        if module._qkv_same_embed_dim:
            return [PackedProjection(module, "in_proj_weight", "in_proj_bias", groups=3), output]
        return [*(SeparateProjection(module, f"{name}_proj_weight", "") for name in INPUTS), output]


class PackedProjection(AttentionLayer):
    """The projections of queries, keys and values, stored in one weight (3 E x E). Each of them is a group."""

    constants = ("bias_k", "bias_v")

    def columns(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        yield _as_groups([_as_columns(x) for x in (query, key, value)])

    def augmented_columns(
        self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Iterator[Tensor]:
        yield _as_groups([with_ones(_as_columns(x)) for x in (query, key, value)])

    def mean_columns(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        yield torch.cat([_as_columns(x).mean(-1, keepdim=True) for x in (query, key, value)])


class SeparateProjection(AttentionLayer):
    """The projection of queries, keys or values, separate because their sizes differ. All three share one bias."""

    constants = ("in_proj_bias", "bias_k", "bias_v")

    def columns(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        yield _as_columns((query, key, value)[INPUTS.index(self.weight_name[0])])


class OutputProjection(AttentionLayer):
    """The output projection. With the identity as this weight, the module returns the inputs of the weight."""

    def columns(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        bare = copy(self.module)  # the copy gets no hooks: they would record this call too
        bare._forward_hooks, bare._forward_pre_hooks = OrderedDict(), OrderedDict()
        identity = torch.eye(len(self.weight), dtype=self.weight.dtype, device=self.weight.device)
        overrides: dict[str, Tensor] = {self.weight_name: identity}
        if self.bias is not None:
            overrides[self.bias_name] = torch.zeros_like(self.bias)
        attended, _ = functional_call(bare, overrides, args, kwargs)
        yield _as_columns(attended)


def _as_columns(x: Tensor) -> Tensor:
    return x.reshape(1, -1, x.shape[-1]).mT


def _as_groups(columns: list[Tensor]) -> Tensor:
    """Join the columns of all groups. Groups with fewer columns get zero columns, which have no energy."""
    longest = max(part.shape[-1] for part in columns)
    return torch.cat([F.pad(part, (0, longest - part.shape[-1])) for part in columns])

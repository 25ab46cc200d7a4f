"""Squared per-sample gradients, summed over a batch.

A layer multiplies its weight ``W`` (out x d) with the columns ``A_i`` (d x p) of sample ``i``: one column per token,
patch or call. The backward pass gives the gradients ``D_i`` (out x p) of the outputs. The gradient of the sample is
``G_i = D_i A_iᵀ``, and this module computes ``Σ_i G_i²``, element by element. Where a closed form exists, no ``G_i`` is
computed.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from became_avalanche.layers import normalisation
from became_avalanche.layers.layer import Layer
from became_avalanche.layers.model import layers_of

BUDGET = 2**21
"""Elements of per-sample gradients, and of the columns they are computed from, to hold at a time: 8 MiB in float32.
Larger values are slower on a CPU."""


@dataclass
class Call:
    """One call of a module that owns parameters."""

    module: nn.Module
    x: Tensor
    output: Tensor


@contextmanager
def recorded_calls(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[list[Call]]:
    """While open, append the calls of modules that own one of ``parameters`` to the list. Clear it between passes."""
    wanted = {id(parameter) for parameter in parameters.values()}
    calls: list[Call] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:
        x = args[0] if args else kwargs.get("input")
        if len(args) + len(kwargs) != 1 or not isinstance(x, Tensor) or not isinstance(output, Tensor):
            raise ValueError(
                f"{type(module).__name__} does not map one tensor to one tensor, so its per-sample gradients cannot be "
                "computed; use fisher='batched'"
            )
        calls.append(Call(module, x.detach(), output))
        return output.clone()  # so that later operations in place do not change ``output``

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if normalisation.couples_samples(module):
                raise ValueError(
                    f"{name} ({type(module).__name__}) normalises with the statistics of the batch, which couples its "
                    "samples, so there are no per-sample gradients; use fisher='batched'"
                )
            if wanted & {id(parameter) for parameter in module.parameters(recurse=False)}:
                hooks.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        yield calls


def squared_gradients(calls: Sequence[Call], loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return ``Σ_i G_i²`` of each parameter, from the calls of a pass and the *sum* of its per-sample losses.

    Parameters that ``loss`` does not depend on through a call are left out.
    """
    calls = list(calls)  # gradient checkpointing calls modules again in the backward pass
    outputs = [call.output for call in calls]
    if not all(output.requires_grad for output in outputs):
        raise ValueError(
            "a module was called without gradients, as torch.utils.checkpoint with use_reentrant=True does, so its "
            "per-sample gradients cannot be computed; use fisher='batched'"
        )
    gradients = torch.autograd.grad(loss, outputs, retain_graph=True, allow_unused=True)
    names = {id(parameter): name for name, parameter in parameters.items()}
    uses: dict[str, list[tuple[str, Call, Tensor]]] = {}
    for call, gradient in zip(calls, gradients, strict=True):
        for local_name, parameter in call.module.named_parameters(recurse=False):
            if gradient is not None and id(parameter) in names:
                uses.setdefault(names[id(parameter)], []).append((local_name, call, gradient))
    return {name: _sum_of_squares(parameters[name], used) for name, used in uses.items()}


def refuse_unrecorded(calls: Sequence[Call], loss: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if ``loss`` depends on a parameter that no call of its module uses."""
    used = {id(parameter) for call in calls for parameter in call.module.parameters(recurse=False)}
    others = {name: parameter for name, parameter in parameters.items() if id(parameter) not in used}
    if not others:
        return
    gradients = torch.autograd.grad(loss, list(others.values()), retain_graph=True, allow_unused=True)
    for name, gradient in zip(others, gradients, strict=True):
        if gradient is not None:
            raise ValueError(
                f"{name} is used outside the module that owns it, so its per-sample gradients cannot be computed; use "
                "fisher='batched'"
            )


def refuse_other_axes(calls: Sequence[Call], samples: int) -> None:
    """Raise a ValueError if a module was called with an input whose first axis is not the sample."""
    for call in calls:
        if call.x.dim() == 0 or len(call.x) != samples:
            raise ValueError(
                f"{type(call.module).__name__} was called with an input of shape {tuple(call.x.shape)} in a batch of "
                f"{samples} samples, so its per-sample gradients cannot be computed: the first axis must be the "
                "sample; use fisher='batched'"
            )


@torch.no_grad()
def _sum_of_squares(parameter: Tensor, uses: list[tuple[str, Call, Tensor]]) -> Tensor:
    """Return ``Σ_i G_i²`` of one parameter. Gradients of several uses by the same sample are added before squaring."""
    samples = len(uses[0][1].x)
    if len(uses) == 1:
        local_name, call, gradient = uses[0]
        layer = _layer(call.module, local_name)
        squares = layer.squares(local_name, call.x, gradient) if layer else None
        if squares is not None:
            return squares
    total = torch.zeros_like(parameter)
    size = max(1, BUDGET // sum(_elements_per_sample(*use) for use in uses))
    for start in range(0, samples, size):
        first, *more = (
            _per_sample(local_name, call, gradient, slice(start, start + size)) for local_name, call, gradient in uses
        )
        for other in more:
            first = first + other
        total += first.square().sum(0)
    return total


def _elements_per_sample(local_name: str, call: Call, gradient: Tensor) -> int:
    """Number of elements in the gradient of a sample, and in the tensor that it is computed from."""
    layer = _layer(call.module, local_name)
    source = layer.elements_per_sample(local_name, gradient) if layer else gradient[0].numel()
    return int(getattr(call.module, local_name).numel() + source)


def _per_sample(local_name: str, call: Call, gradient: Tensor, part: slice) -> Tensor:
    """Return ``G_i`` of the samples in ``part``, for one use of a parameter."""
    module, x, gradient = call.module, call.x[part], gradient[part]
    if layer := _layer(module, local_name):
        return layer.per_sample(local_name, x, gradient)
    if normalisation.has_closed_form(module):
        return normalisation.per_sample(module, local_name, x, gradient)
    return _by_vmap(module, local_name, x, gradient)


def _layer(module: nn.Module, local_name: str) -> Layer | None:
    """Return the layer of ``module`` with this parameter; None if it cannot compute per-sample gradients."""
    layers = (layer for layer in layers_of(module) if layer.has_per_sample_gradients)
    return next((layer for layer in layers if local_name in (layer.weight_name, layer.bias_name)), None)


def _by_vmap(module: nn.Module, local_name: str, x: Tensor, gradient: Tensor) -> Tensor:
    """Return ``G_i`` of any other module that treats its samples independently, through ``torch.func``."""
    bare = copy(module)  # the copy gets no hooks: they would record this call too
    bare._forward_hooks = OrderedDict()

    def gradient_of_one(sample: Tensor, gradient: Tensor) -> Tensor:
        back = vjp(
            lambda p: functional_call(bare, {local_name: p}, (sample[None],)), getattr(module, local_name).detach()
        )[1]
        result: Tensor = back(gradient[None])[0]
        return result

    result: Tensor = vmap(gradient_of_one)(x, gradient)
    return result

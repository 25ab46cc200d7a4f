"""Squared gradients of single samples, summed over a batch, without a gradient per sample where there is a closed form.

A layer's weight ``W`` (out x d) meets a sample as columns ``A_i`` (d x p), one per token, patch or call, and gets the
gradients ``D_i`` (out x p) of its outputs back. The sample's own gradient is ``G_i = D_i A_iᵀ``, and wanted is their
squares, ``Σ_i G_i²``.
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
"""Elements of per-sample gradients, and of the columns they are made of, held at a time: 8 MiB in float32. More is
slower on a CPU."""


@dataclass
class Call:
    """One call of a module that owns parameters."""

    module: nn.Module
    x: Tensor
    output: Tensor


@contextmanager
def recorded_calls(model: nn.Module, parameters: Mapping[str, Tensor]) -> Iterator[list[Call]]:
    """While open, the list has the calls of modules that own one of ``parameters``; clear it between passes."""
    wanted = {id(parameter) for parameter in parameters.values()}
    calls: list[Call] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor:
        x = args[0] if args else kwargs.get("input")
        if len(args) + len(kwargs) != 1 or not isinstance(x, Tensor) or not isinstance(output, Tensor):
            raise ValueError(
                f"{type(module).__name__} does not map one tensor to one tensor, so gradients of single samples cannot "
                "be told apart there; use the 'batched' Fisher information"
            )
        calls.append(Call(module, x.detach(), output))
        return output.clone()  # what follows may work in place

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if normalisation.couples_samples(module):
                raise ValueError(
                    f"{name} ({type(module).__name__}) normalises with the statistics of the batch, which couples its "
                    "samples: there is no gradient of a single sample; use the 'batched' Fisher information"
                )
            if wanted & {id(parameter) for parameter in module.parameters(recurse=False)}:
                hooks.callback(module.register_forward_hook(record, with_kwargs=True).remove)
        yield calls


def squared_gradients(calls: Sequence[Call], loss: Tensor, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``Σ_i G_i²`` of each parameter, from the calls of a pass and the *sum* of the losses of its samples.

    Parameters that ``loss`` does not depend on through a call are left out.
    """
    gradients = torch.autograd.grad(loss, [call.output for call in calls], retain_graph=True, allow_unused=True)
    names = {id(parameter): name for name, parameter in parameters.items()}
    uses: dict[str, list[tuple[str, Call, Tensor]]] = {}
    for call, gradient in zip(calls, gradients, strict=True):
        for own, parameter in call.module.named_parameters(recurse=False):
            if gradient is not None and id(parameter) in names:
                uses.setdefault(names[id(parameter)], []).append((own, call, gradient))
    return {name: _sum_of_squares(parameters[name], used) for name, used in uses.items()}


def refuse_unrecorded(calls: Sequence[Call], loss: Tensor, parameters: Mapping[str, Tensor]) -> None:
    """Raise a ValueError if ``loss`` depends on a parameter that is used by no call of the module that owns it."""
    used = {id(parameter) for call in calls for parameter in call.module.parameters(recurse=False)}
    others = {name: parameter for name, parameter in parameters.items() if id(parameter) not in used}
    if not others:
        return
    gradients = torch.autograd.grad(loss, list(others.values()), retain_graph=True, allow_unused=True)
    for name, gradient in zip(others, gradients, strict=True):
        if gradient is not None:
            raise ValueError(
                f"{name} is used outside the module that owns it, so gradients of single samples cannot be told apart "
                "there; use the 'batched' Fisher information"
            )


@torch.no_grad()
def _sum_of_squares(parameter: Tensor, uses: list[tuple[str, Call, Tensor]]) -> Tensor:
    """Of one parameter, all of whose uses by a sample add up before they are squared."""
    samples = len(uses[0][1].x)
    if len(uses) == 1:
        own, call, gradient = uses[0]
        layer = _layer(call.module, own)
        squares = layer.squares(own, call.x, gradient) if layer else None
        if squares is not None:
            return squares
    total = torch.zeros_like(parameter)
    size = max(1, BUDGET // sum(_elements_per_sample(*use) for use in uses))
    for start in range(0, samples, size):
        first, *more = (_per_sample(own, call, gradient, slice(start, start + size)) for own, call, gradient in uses)
        for other in more:
            first = first + other
        total += first.square().sum(0)
    return total


def _elements_per_sample(own: str, call: Call, gradient: Tensor) -> int:
    """Elements of a sample's gradient, and of what it is made of."""
    layer = _layer(call.module, own)
    made_of = layer.elements_per_sample(own, gradient) if layer else gradient[0].numel()
    return int(getattr(call.module, own).numel() + made_of)


def _per_sample(own: str, call: Call, gradient: Tensor, part: slice) -> Tensor:
    """``G_i`` of the samples in ``part``, for one use of a parameter."""
    module, x, gradient = call.module, call.x[part], gradient[part]
    if layer := _layer(module, own):
        return layer.per_sample(own, x, gradient)
    if normalisation.has_closed_form(module):
        return normalisation.per_sample(module, own, x, gradient)
    return _of_any(module, own, x, gradient)


def _layer(module: nn.Module, own: str) -> Layer | None:
    """The layer of ``module`` with the parameter ``own``, if it is of a known kind."""
    layers = (layer for layer in layers_of(module) if layer.has_per_sample_gradients)
    return next((layer for layer in layers if own in (layer.weight_name, layer.bias_name)), None)


def _of_any(module: nn.Module, own: str, x: Tensor, gradient: Tensor) -> Tensor:
    """Any other module that treats its samples one by one, through ``torch.func``."""
    bare = copy(module)  # without the hooks that record calls
    bare._forward_hooks = OrderedDict()

    def of_one(sample: Tensor, gradient: Tensor) -> Tensor:
        back = vjp(lambda p: functional_call(bare, {own: p}, (sample[None],)), getattr(module, own).detach())[1]
        result: Tensor = back(gradient[None])[0]
        return result

    result: Tensor = vmap(of_one)(x, gradient)
    return result

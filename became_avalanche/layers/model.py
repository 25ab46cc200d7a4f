"""The layers of a model, found by module type."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from torch import nn

from became_avalanche.layers.convolution import ConvolutionLayer
from became_avalanche.layers.layer import Layer
from became_avalanche.layers.linear import LinearLayer
from became_avalanche.layers.normalisation import NORMALISATION

KINDS: tuple[type[Layer], ...] = (LinearLayer, ConvolutionLayer)
"""Every kind of layer."""


def layers_of(module: nn.Module) -> list[Layer]:
    """The layers in ``module`` itself, not in its children."""
    for kind in KINDS:
        if found := kind.find(module):
            return [*found]
    return []


@dataclass
class LayerMap:
    """The trainable parts of a model, as a projection method sees them."""

    protected: dict[str, list[Layer]] = field(default_factory=dict)
    """Weight name -> the layers that use this weight (more than one if layers share it)."""
    biases: dict[str, list[str]] = field(default_factory=dict)
    """Weight name -> names of the biases beside it, where there are any (several if layers share the weight)."""
    normalisation: list[str] = field(default_factory=list)
    """Names of the parameters of normalisation layers."""
    unprotectable: list[str] = field(default_factory=list)
    """Modules that own parameters but are of no protectable kind."""


def map_layers(model: nn.Module, skip: Collection[str] = ()) -> LayerMap:
    """Find the layers of ``model`` by module type, leaving out everything at or below the names in ``skip``.

    Only exact types count: a subclass, or a layer under weight normalisation, may compute something else than ``W A``.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers = LayerMap()
    for module_name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own or is_below(module_name, skip):
            continue
        found = layers_of(module)
        for layer in found:
            weight = names[id(layer.weight)]
            layers.protected.setdefault(weight, []).append(layer)
            if layer.bias is not None:
                biases = layers.biases.setdefault(weight, [])
                biases += {names[id(layer.bias)]} - set(biases)
        if isinstance(module, NORMALISATION):
            layers.normalisation += [names[id(parameter)] for parameter in own.values()]
        elif not found:
            layers.unprotectable.append(f"{module_name or 'model'} ({type(module).__name__})")
    return layers


def is_below(name: str, prefixes: Collection[str]) -> bool:
    """Whether ``name`` is one of the module names ``prefixes`` or lies below one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)

"""The layers of a model, found by module type."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from became_avalanche.layers.attention import AttentionLayer
from became_avalanche.layers.computed import originals
from became_avalanche.layers.convolution import ConvolutionLayer
from became_avalanche.layers.embedding import EmbeddingLayer
from became_avalanche.layers.functional import MatrixLayer, WeightUses
from became_avalanche.layers.layer import Layer
from became_avalanche.layers.linear import LinearLayer
from became_avalanche.layers.normalisation import NORMALISATION
from became_avalanche.layers.recurrent import CellLayer, RecurrentLayer
from became_avalanche.layers.transposed import TransposedConvolutionLayer

KINDS: tuple[type[Layer], ...] = (
    LinearLayer,
    ConvolutionLayer,
    TransposedConvolutionLayer,
    EmbeddingLayer,
    AttentionLayer,
    RecurrentLayer,
    CellLayer,
)
"""All kinds of layers."""


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
    """Weight name -> the layers that use this weight (more than one if layers share it).

    A computed weight goes by the name of the parameter of the same shape from which it is computed."""
    biases: dict[str, list[str]] = field(default_factory=dict)
    """Weight name -> names of its biases, if any (several if layers share the weight)."""
    constants: dict[str, list[str]] = field(default_factory=dict)
    """Weight name -> names of the other constants of its layers, if any."""
    normalisation: list[str] = field(default_factory=list)
    """Names of the parameters of normalisation layers."""
    unprotectable: dict[str, str] = field(default_factory=dict)
    """Name of a trainable parameter that cannot be protected -> how messages call it."""
    matrices: dict[str, MatrixLayer] = field(default_factory=dict)
    """Matrices of other modules, frozen ones included, that may multiply inputs. Only a forward pass shows whether they
    do: see ``seen_matrices``."""


def map_layers(model: nn.Module, skip: Collection[str] = ()) -> LayerMap:
    """Find the layers of ``model`` by module type, except everything at or below the names in ``skip``.

    A subclass counts if it keeps the ``forward`` of its parent; otherwise it may not compute ``W A``.

    :param model: the model.
    :param skip: names of modules or parameters.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    layers, known, claimed = LayerMap(), set[str](), set[nn.Module]()
    for module_name, module in model.named_modules():
        if is_below(module_name, skip):
            continue
        found = [] if module in claimed else layers_of(module)
        hooked = False
        for layer in found:
            claimed.add(module.get_submodule(layer.weight_name.rpartition(".")[0]))
            sources = [layer.weight] if layer.rule is None else originals(layer)
            if layer.rule is None and id(layer.weight) not in names:  # torch.nn.utils.prune, weight_norm, ...
                hooked = True
                continue
            if _is_complex(layer.weight):
                continue
            if not sources or is_below(names[id(sources[0])], skip):  # cannot be set, or is to be skipped
                continue
            weight = names[id(sources[0])]
            layers.protected.setdefault(weight, []).append(layer)
            biases = [names[id(layer.bias)]] if id(layer.bias) in names else []
            constants = [names[id(own)] for own in map(partial(getattr, module), layer.constants) if own is not None]
            if layer.rule is not None:
                biases, constants = [], [*biases, *constants]
                known.update(names[id(source)] for source in sources)
            for kept, more in ((layers.biases, biases), (layers.constants, constants)):
                if more:
                    kept[weight] = [*dict.fromkeys([*kept.get(weight, []), *more])]
            known.update([weight, *biases, *constants])
        own = {names[id(own)]: own for own in module.parameters(recurse=False)}
        if isinstance(module, NORMALISATION):
            layers.normalisation += [name for name in own if not is_below(name, skip)]
            known.update(own)
        training = [name for name, parameter in own.items() if parameter.requires_grad]
        others = [name for name in training if name not in known and not is_below(name, skip)]
        for name in others:
            whole_module = module_name and others == training
            label = (
                f"{module_name} ({type(module).__name__})" if whole_module else f"{name} (of {type(module).__name__})"
            )
            if isinstance(module, ParametrizationList):
                rules = ", ".join(type(rule).__name__ for rule in module)
                label = f"{module_name.replace('.parametrizations', '')} (computed from other parameters by {rules})"
            elif hooked:
                label = f"{module_name} ({type(module).__name__} whose weight a hook computes)"
            layers.unprotectable[name] = label
        for name, parameter in own.items():
            if name not in known and not is_below(name, skip) and _is_real_matrix(parameter):
                layers.matrices[name] = MatrixLayer(module, name.rpartition(".")[2], bias="")
    _refuse_mixed_uses(layers)
    return layers


@contextmanager
def seen_matrices(layers: LayerMap) -> Iterator[None]:
    """While open, observe how bare matrices are used. On exit, protect those that only multiply inputs."""
    biases: dict[str, list[Tensor]] = {}
    weights = {name: layer.weight for name, layer in layers.matrices.items()}
    uses = WeightUses(
        weights, weights, lambda name, x, bias: biases.setdefault(name, []).extend([] if bias is None else [bias])
    )
    with uses:
        yield
    for name in biases.keys() - uses.others.keys():
        layer = layers.matrices[name]
        layers.protected[name] = [layer]
        layers.unprotectable.pop(name, None)  # a frozen matrix is not in it
        for own, parameter in layer.module.named_parameters(recurse=False):
            full = f"{name.removesuffix(layer.weight_name)}{own}"
            if any(parameter is bias for bias in biases[name]) and full in layers.unprotectable:
                layer.bias_name = own
                layers.biases[name] = [full]
                del layers.unprotectable[full]


def _is_complex(weight: Tensor) -> bool:
    return not is_lazy(weight) and weight.is_complex()


def _is_real_matrix(parameter: Tensor) -> bool:
    return not is_lazy(parameter) and parameter.dim() == 2 and not parameter.is_complex()


def _refuse_mixed_uses(layers: LayerMap) -> None:
    """Do not protect weights that layers of different kinds share: an input of one is an output of the other."""
    for name, users in list(layers.protected.items()):
        if len({(type(layer).weight_rows, layer.groups) for layer in users}) > 1:
            kinds = " and ".join(dict.fromkeys(type(layer.module).__name__ for layer in users))
            layers.unprotectable[name] = f"{name} (shared by {kinds})"
            del layers.protected[name]


def is_below(name: str, prefixes: Collection[str]) -> bool:
    """Whether ``name`` is one of ``prefixes`` (names of modules or parameters) or lies below one of them."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)

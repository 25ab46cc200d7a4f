"""Find the stream, the network and the plugins that a specification names.

A name is either registered here or an import path, ``package.module:name``. Both are plain text, so a specification can
be written to a file and sent to another process.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Annotated, Any

from pydantic import AfterValidator

from became_avalanche.files import UserError, suggestion


class SpecError(UserError, ValueError):
    """Raised for an invalid specification. The message names the field, its value, and what is allowed."""


STREAMS: dict[str, str] = {
    "split-digits": "became_avalanche.benchmarks.digits:split_digits",
    "permuted-digits": "became_avalanche.benchmarks.digits:permuted_digits",
    "class-digits": "became_avalanche.benchmarks.digits:class_digits",
    "domain-digits": "became_avalanche.benchmarks.digits:domain_digits",
    "split-cifar100": "became_avalanche.benchmarks.cifar:split_cifar100",
    "cifar100-superclass": "became_avalanche.benchmarks.cifar:cifar100_superclass",
    "cifar100-superclass-in-turn": "became_avalanche.benchmarks.orders:cifar100_superclass_in_turn",
    "split-tinyimagenet": "became_avalanche.benchmarks.imagenet:split_tinyimagenet",
    "split-miniimagenet": "became_avalanche.benchmarks.imagenet:split_miniimagenet",
    "five-datasets": "became_avalanche.benchmarks.five:five_datasets",
    "five-datasets-in-turn": "became_avalanche.benchmarks.orders:five_datasets_in_turn",
}
"""Functions of a seed that return an Avalanche benchmark with ``train``, ``test`` and usually ``valid`` streams.
Functions that read files also have the parameters ``dataset_root`` and ``device``."""

NETWORKS: dict[str, str] = {
    "mlp": "became_avalanche.models.mlp:MultiHeadMLP",
    "single-head-mlp": "became_avalanche.models.mlp:SingleHeadMLP",
    "alexnet": "became_avalanche.models.alexnet:AlexNet",
    "lenet": "became_avalanche.models.lenet:LeNet",
    "reduced-resnet18": "became_avalanche.models.resnet:ReducedResNet18",
    "preact-resnet18": "became_avalanche.models.preact_resnet:PreActResNet18",
}


def _plain(value: Any) -> Any:
    """Return the value with tuples as lists. Raises a SpecError if JSON cannot hold it."""
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    raise SpecError(f"an option must be a finite number, a string, true or false, a list or a table; got {value!r}")


Options = Annotated[dict[str, Any], AfterValidator(_plain)]
"""Options of a component, by name: plain values."""


def find(kind: str, name: str, registry: Mapping[str, str]) -> Callable[..., Any]:
    """Return the component called ``name``. Raises a SpecError that says what to write instead if there is none."""
    path = registry.get(name, name)
    if ":" not in path:
        known = suggestion(name, registry) if registry else "give an import path, module:name"
        raise SpecError(f"unknown {kind} {name!r}; {known}")
    module, _, attribute = path.partition(":")
    try:
        component: Any = import_module(module)
        for part in attribute.split("."):
            component = getattr(component, part)
    except (ImportError, AttributeError) as error:
        raise SpecError(f"cannot import the {kind} {name!r}: {error}") from error
    if not callable(component):
        raise SpecError(f"the {kind} {name!r} is not a function or class")
    found: Callable[..., Any] = component
    return found


def import_path(component: Any) -> Any:
    """Return the import path of a function or class, and anything else unchanged."""
    if not callable(component):
        return component
    name = getattr(component, "__qualname__", "<no name>")
    if "<" in name or component.__module__ == "__main__":
        raise SpecError(
            f"{component.__module__}.{name} cannot be imported by another process; define it at the top level of a "
            "module"
        )
    return f"{component.__module__}:{name}"


def options_of(component: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return the options of a function or class, by name; also those of parents if a class takes ``**options``."""
    options: dict[str, inspect.Parameter] = {}
    functions: list[Any] = [component]
    if inspect.isclass(component):
        functions = [vars(parent)["__init__"] for parent in inspect.getmro(component) if "__init__" in vars(parent)]
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        for parameter in parameters:
            if parameter.name != "self" and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                options.setdefault(parameter.name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            break
    return options


def check_options(what: str, component: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Raise a SpecError unless the component takes all of ``options``."""
    known = options_of(component)
    takes_any = not inspect.isclass(component) and any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(component).parameters.values()
    )
    for name, value in options.items():
        if name not in known and not takes_any:
            known_names = suggestion(name, known) if known else "it has no options"
            raise SpecError(f"{what} has no option {name!r} (given {value!r}); {known_names}")


def with_defaults(component: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` and the plain defaults of the component's other options."""
    return {**_defaults(component), **options}


def without_defaults(component: Callable[..., Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``options`` without those that have their default value."""
    defaults = _defaults(component)
    return {name: value for name, value in options.items() if name not in defaults or value != defaults[name]}


def _defaults(component: Callable[..., Any]) -> dict[str, Any]:
    return {
        name: list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        for name, parameter in options_of(component).items()
        if isinstance(parameter.default, bool | int | float | str | tuple | None)
    }

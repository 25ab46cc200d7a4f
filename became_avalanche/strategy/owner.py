"""Recognise the model that the memory of a plugin belongs to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isclose
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

_WRAPPERS = ("module", "_orig_mod")
"""Attributes in which ``DataParallel``, ``DistributedDataParallel`` and ``torch.compile`` keep the wrapped model."""


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside ``DataParallel``, ``DistributedDataParallel`` and ``torch.compile``."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return unwrapped(model.module)
    inside = getattr(model, "_orig_mod", None)
    return unwrapped(inside) if isinstance(inside, nn.Module) else model


def renamed(stored: Iterable[str], names: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """Look for the stored names that are not among ``names``: a wrapper may have changed their prefixes.

    :return: the new name of each stored name that differs only by such prefixes, and the stored names that are missing.
    """
    names = set(names)
    by_plain_name = {_plain(name): name for name in names}
    missing = {name: by_plain_name.get(_plain(name)) for name in stored if name not in names}
    found = {name: present for name, present in missing.items() if present is not None}
    return found, [name for name in missing if name not in found]


def with_names(state: Any, names: Mapping[str, str]) -> Any:
    """Return nested containers in which the keys of all dictionaries are replaced as in ``names``."""
    if isinstance(state, dict):
        return {names.get(key, key): with_names(value, names) for key, value in state.items()}
    return type(state)(with_names(value, names) for value in state) if isinstance(state, list | tuple) else state


@torch.no_grad()
def fingerprint(model: nn.Module) -> dict[str, list[float]]:
    """Return the length of the first dimension and the norm of each parameter, by name."""
    return {
        name: [len(parameter) if parameter.dim() else 0, _norm(parameter)]
        for name, parameter in model.named_parameters()
        if not is_lazy(parameter)
    }


@torch.no_grad()
def has_weights(model: nn.Module, fingerprints: Mapping[str, list[float]]) -> bool:
    """Whether the model has the parameters of a ``fingerprint``, with the same norms.

    It may have more parameters, and parameters may have grown along the first dimension, as those of heads do.
    """
    parameters = dict(model.named_parameters())
    for name, (length, norm) in fingerprints.items():
        if name not in parameters:
            return False
        parameter = parameters[name]
        part = parameter[: int(length)] if parameter.dim() else parameter
        if not isclose(_norm(part), norm, rel_tol=1e-3, abs_tol=1e-12):
            return False
    return True


def _norm(parameter: Tensor) -> float:
    return float((parameter.abs() if parameter.is_complex() else parameter).double().norm())


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)

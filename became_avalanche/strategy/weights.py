"""The weights that training changes: those of the model and of plugins that are ``OwnsParameters``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import chain

import torch
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor, nn

from became_avalanche.strategy.protocols import OwnsParameters


def snapshot(strategy: SupervisedTemplate) -> dict[str, Tensor]:
    """Return copies of all parameters and buffers, by name."""
    return {name: tensor.clone() for name, tensor in _live(strategy).items()}


@torch.no_grad()
def restore(strategy: SupervisedTemplate, weights: Mapping[str, Tensor]) -> None:
    """Copy ``weights`` into the strategy in place, so that the optimizer and the schedules keep their parameters.

    Weights of the strategy that ``weights`` lacks, such as heads that an evaluation has added, stay as they are.
    """
    for name, tensor in _live(strategy).items():
        if name in weights:
            tensor.copy_(weights[name])


@contextmanager
def back_to(strategy: SupervisedTemplate, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Restore these weights if an exception, such as KeyboardInterrupt, leaves the context."""
    try:
        yield
    except BaseException:
        restore(strategy, weights)
        raise


def interpolate(
    base: Mapping[str, Tensor], candidate: Mapping[str, Tensor], coefficient: float | Mapping[str, Tensor], rest: float
) -> dict[str, Tensor]:
    """Return ``base + coefficient * (candidate − base)``. Integer tensors (counters) are taken from ``candidate``.

    :param base: weights by name.
    :param candidate: weights by name.
    :param coefficient: one number for all tensors, or a tensor for each, by name.
    :param rest: the coefficient of tensors that ``coefficient`` does not name (running statistics).
    """
    by_name = coefficient if isinstance(coefficient, Mapping) else {}
    return {
        name: torch.lerp(start, candidate[name], by_name[name].to(start) if name in by_name else rest)
        if start.is_floating_point()
        else candidate[name]
        for name, start in base.items()
    }


def trainable(strategy: SupervisedTemplate) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, by name."""
    named = chain(strategy.model.named_parameters(), _own_parameters(strategy))
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def _live(strategy: SupervisedTemplate) -> dict[str, Tensor]:
    model = strategy.model
    named = dict(chain(model.named_parameters(), model.named_buffers(), _own_parameters(strategy)))
    lazy = [name for name, tensor in named.items() if nn.parameter.is_lazy(tensor)]
    if lazy:
        raise ValueError(
            f"{', '.join(lazy)} have no shape yet, because lazy modules get their shape from the first batch; call "
            "the model once on a batch before you create the optimizer"
        )
    return {name: tensor.detach() for name, tensor in named.items()}


def _own_parameters(strategy: SupervisedTemplate) -> Iterator[tuple[str, nn.Parameter]]:
    for plugin in strategy.plugins:
        if isinstance(plugin, OwnsParameters):
            yield from plugin.own_parameters().items()

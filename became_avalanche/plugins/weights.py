"""The weights that a training changes: those of the model, and what plugins train beside it.

A plugin that trains parameters of its own defines ``own_parameters()``, a dictionary by names that no other has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import torch
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor, nn


def snapshot(strategy: SupervisedTemplate) -> dict[str, Tensor]:
    """Copies of all parameters and buffers, by name."""
    return {name: tensor.clone() for name, tensor in _live(strategy).items()}


@torch.no_grad()
def restore(strategy: SupervisedTemplate, weights: Mapping[str, Tensor]) -> None:
    """In place, so that the optimizer and the schedules keep their parameters.

    What ``weights`` does not know, such as heads that an evaluation has added, stays.
    """
    for name, tensor in _live(strategy).items():
        if name in weights:
            tensor.copy_(weights[name])


def interpolate(
    base: Mapping[str, Tensor], candidate: Mapping[str, Tensor], coefficient: float | Mapping[str, Tensor], rest: float
) -> dict[str, Tensor]:
    """``base + coefficient * (candidate − base)``; integers, which count something, as in ``candidate``.

    :param coefficient: one for all, or by name.
    :param rest: of what ``coefficient`` does not name (running statistics).
    """
    by_name = coefficient if isinstance(coefficient, Mapping) else {}
    return {
        name: torch.lerp(start, candidate[name], by_name[name].to(start) if name in by_name else rest)
        if start.is_floating_point()
        else candidate[name]
        for name, start in base.items()
    }


def trainable(strategy: SupervisedTemplate) -> dict[str, nn.Parameter]:
    """The parameters that have a gradient, by name."""
    named = chain(strategy.model.named_parameters(), _own_parameters(strategy))
    return {name: parameter for name, parameter in named if parameter.requires_grad}


def _live(strategy: SupervisedTemplate) -> dict[str, Tensor]:
    model = strategy.model
    named = dict(chain(model.named_parameters(), model.named_buffers(), _own_parameters(strategy)))
    return {name: tensor.detach() for name, tensor in named.items()}


def _own_parameters(strategy: SupervisedTemplate) -> Iterator[tuple[str, nn.Parameter]]:
    for plugin in strategy.plugins:
        if hasattr(plugin, "own_parameters"):
            yield from plugin.own_parameters().items()

"""Saving a strategy between two experiences, and continuing in another process as if nothing had happened."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping
from os import PathLike
from typing import Any

import numpy as np
import torch
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.templates import SupervisedTemplate
from torch import nn

from became_avalanche.strategy.adapters import Adapter, adapter_of, unsaved_metrics
from became_avalanche.strategy.heads import load_model_state, model_state
from became_avalanche.strategy.statefile import StateFileError, read_state, write_state

KIND = "strategy"

_ATTRIBUTES = {
    *("_criterion", "_distributed_check", "_eval_streams", "_stop_training", "adapted_dataset", "clock"),
    *("current_eval_stream", "dataloader", "device", "eval_every", "eval_mb_size", "evaluator", "experience"),
    *("is_training", "loss", "mb_output", "mbatch", "model", "optimized_param_id", "optimizer", "plugins"),
    *("retain_graph", "train_epochs", "train_mb_size"),
}
"""What a SupervisedTemplate consists of. Between experiences, only the parts that are saved here have a state."""


class NotResumableError(ValueError):
    """A strategy with state that cannot be saved."""


def save_strategy(
    strategy: SupervisedTemplate, path: str | PathLike[str], *, stateless: Collection[object] = ()
) -> None:
    """Save everything that later experiences depend on.

    These are the weights with all heads, the optimizer, the state of the plugins and metrics, the clock and the random
    states of Python, NumPy and torch. Call it between two experiences. The file is written completely or not at all,
    and reading it executes no code.

        for t, experience in enumerate(benchmark.train_stream):
            strategy.train(experience)
            save_strategy(strategy, f"after-{t}.safetensors")

    A plugin is saved if it has ``state_dict`` and ``load_state_dict``, as all plugins of this package do, or if it is
    one of Avalanche's ``EWCPlugin``, ``SynapticIntelligencePlugin``, ``LwFPlugin``, ``LRSchedulerPlugin`` or
    ``EarlyStoppingPlugin``. A plugin without attributes has nothing to save. Any other plugin is refused, since what it
    remembers would be lost.

    :param strategy: the strategy.
    :param path: the file; an existing one is replaced.
    :param stateless: plugins and metrics that you know to keep nothing that matters; they are left out.
    """
    write_state(path, strategy_state(strategy, stateless=stateless), kind=KIND)


def load_strategy(
    strategy: SupervisedTemplate,
    path: str | PathLike[str],
    experiences: Iterable[Any] = (),
    *,
    stateless: Collection[object] = (),
) -> None:
    """Continue from a file that ``save_strategy`` has written, bitwise as if the training had never stopped.

    If it fails, the strategy may be half loaded: build it anew.

    :param strategy: a fresh strategy, built exactly as the saved one was.
    :param path: the file.
    :param experiences: the experiences that the strategy has met so far, in order. They are needed only if the model
        has dynamic modules other than Avalanche's ``MultiHeadClassifier`` and ``IncrementalClassifier``.
    :param stateless: as in ``save_strategy``.
    """
    state = read_state(path, kind=KIND)
    try:
        load_strategy_state(strategy, state, experiences, stateless=stateless)
    except (LookupError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise StateFileError(f"{path} does not hold the state of such a strategy: {error!r}") from error


def not_resumable(strategy: SupervisedTemplate, *, stateless: Collection[object] = ()) -> list[str]:
    """Names of the classes in a strategy whose state cannot be saved; empty if it can be saved."""
    ours = {id(known) for known in stateless}
    parts = [plugin for plugin in strategy.plugins if adapter_of(plugin) is None]
    for plugin in strategy.plugins:
        if isinstance(plugin, EvaluationPlugin):
            parts += unsaved_metrics(plugin)
    if not vars(strategy).keys() <= _ATTRIBUTES:
        parts.insert(0, strategy)
    return [type(part).__name__ for part in parts if id(part) not in ours]


def strategy_state(strategy: SupervisedTemplate, *, stateless: Collection[object] = ()) -> dict[str, Any]:
    """What ``save_strategy`` saves, as nested tensors and plain values. Tensors may be those of the live strategy."""
    if strategy.experience is not None:
        raise ValueError("a strategy can be saved only between experiences, not in the middle of one")
    refused = not_resumable(strategy, stateless=stateless)
    if refused:
        raise NotResumableError(
            f"the state of {', '.join(refused)} cannot be saved; give it state_dict() and load_state_dict(), or name "
            "the object in stateless=[...] if it keeps nothing that matters"
        )
    return {
        "plugins": [[type(plugin).__name__, adapter.save(plugin)] for plugin, adapter in _saved(strategy, stateless)],
        "model": model_state(strategy.model),
        "optimizer": _optimizer_state(strategy),
        "random": _random_state(),
    }


def load_strategy_state(
    strategy: SupervisedTemplate,
    state: Mapping[str, Any],
    experiences: Iterable[Any] = (),
    *,
    stateless: Collection[object] = (),
) -> None:
    """Continue from what ``strategy_state`` returned; see ``load_strategy``."""
    strategy.model.to(strategy.device)
    plugins = list(_saved(strategy, stateless))
    here, there = [type(plugin).__name__ for plugin, _ in plugins], [name for name, _ in state["plugins"]]
    if here != there:
        raise ValueError(
            f"the saved strategy has the plugins {', '.join(there)}, this one has {', '.join(here)}; build it with the "
            "same plugins in the same order"
        )
    for (plugin, adapter), (_, saved) in zip(plugins, state["plugins"], strict=True):
        adapter.load(plugin, saved, strategy)
    load_model_state(strategy.model, state["model"], experiences)
    _load_optimizer_state(strategy, state["optimizer"])
    _load_random_state(state["random"])


def _saved(strategy: SupervisedTemplate, stateless: Collection[object]) -> Iterable[tuple[Any, Adapter]]:
    ours = {id(known) for known in stateless}
    for plugin in strategy.plugins:
        adapter = adapter_of(plugin)
        if adapter is not None and id(plugin) not in ours:
            yield plugin, adapter


# ----------------------------------------------------------------------------------------------------------- optimizer


def _optimizer_state(strategy: SupervisedTemplate) -> dict[str, Any]:
    """The optimizer's own state, and the names of its parameters.

    An evaluation may have replaced parameters (a head that grew). The optimizer has the old ones until the next
    training, and Avalanche finds them by ``optimized_param_id``.
    """
    current = dict(strategy.model.named_parameters())
    known = strategy.optimized_param_id
    names = {id(parameter): name for name, parameter in {**current, **(known or {})}.items()}
    groups = [group["params"] for group in strategy.optimizer.param_groups]
    try:
        named = [[names[id(parameter)] for parameter in group] for group in groups]
    except KeyError:
        raise NotResumableError("the optimizer has parameters that do not belong to the model") from None
    parameters = {**(known or {}), **{names[id(p)]: p for group in groups for p in group}}
    return {
        "groups": named,
        "optimized": None if known is None else list(known),
        "replaced": {
            name: list(parameter.shape) for name, parameter in parameters.items() if parameter is not current.get(name)
        },
        "state": strategy.optimizer.state_dict(),
    }


def _load_optimizer_state(strategy: SupervisedTemplate, state: Mapping[str, Any]) -> None:
    optimizer = strategy.optimizer
    if len(optimizer.param_groups) != len(state["groups"]):
        raise ValueError(
            f"the saved optimizer has {len(state['groups'])} parameter groups, this one has "
            f"{len(optimizer.param_groups)}; build it in the same way"
        )
    parameters = dict(strategy.model.named_parameters())
    for name, shape in state["replaced"].items():
        now = parameters[name].shape
        if len(shape) != len(now) or any(old not in range(new + 1) for old, new in zip(shape, now, strict=True)):
            raise ValueError(f"{name} has the shape {tuple(now)} and cannot have been larger before: {tuple(shape)}")
        parameters[name] = nn.Parameter(torch.zeros(shape))
    for group, names in zip(optimizer.param_groups, state["groups"], strict=True):
        group["params"] = [parameters[name] for name in names]
    optimizer.load_state_dict(state["state"])
    known = state["optimized"]
    strategy.optimized_param_id = None if known is None else {name: parameters[name] for name in known}


# -------------------------------------------------------------------------------------------------------------- random


def _random_state() -> dict[str, Any]:
    generator = np.random.get_state(legacy=False)
    assert isinstance(generator, dict)
    key = generator["state"]["key"]
    return {
        "python": random.getstate(),
        "numpy": {**generator, "state": {**generator["state"], "key": key.tolist()}},
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
    }


def _load_random_state(state: Mapping[str, Any]) -> None:
    random.setstate(state["python"])
    key = np.array(state["numpy"]["state"]["key"], dtype=np.uint32)
    if state["numpy"]["state"]["pos"] not in range(len(key) + 1):  # NumPy would read beyond its memory
        raise ValueError("the random state of NumPy is damaged")
    np.random.set_state({**state["numpy"], "state": {**state["numpy"]["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)

"""Save a strategy between two experiences and resume it in another process, with bitwise the same results."""

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
"""The attributes of a SupervisedTemplate. Between experiences, only those that this module saves have a state."""


class NotResumableError(ValueError):
    """Raised if a strategy has state that cannot be saved."""


def save_strategy(
    strategy: SupervisedTemplate, path: str | PathLike[str], *, stateless: Collection[object] = ()
) -> None:
    """Save everything that later experiences depend on.

    This is the model with all its heads, the optimizer, the state of the plugins and metrics, the clock, and the random
    states of Python, NumPy and torch. Call it between two experiences. The file is written completely or not at all,
    and reading it executes no code.

    A plugin is saved if it has ``state_dict`` and ``load_state_dict``, as all plugins of this package do, or if it is
    one of Avalanche's ``EWCPlugin``, ``SynapticIntelligencePlugin``, ``LwFPlugin``, ``LRSchedulerPlugin`` or
    ``EarlyStoppingPlugin``. A plugin without attributes has nothing to save. For any other plugin a
    ``NotResumableError`` is raised, because its state would be lost.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from avalanche.training.plugins import EvaluationPlugin
    >>> from became_avalanche import GPMPlugin, MultiHeadMLP, save_strategy, split_digits
    >>> model = MultiHeadMLP()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> options = {"train_mb_size": 64, "evaluator": EvaluationPlugin()}
    >>> strategy = Naive(model=model, optimizer=optimizer, plugins=[GPMPlugin()], **options)
    >>> for t, experience in enumerate(split_digits().train_stream[:2]):
    ...     _ = strategy.train(experience)
    ...     save_strategy(strategy, f"after-{t}.safetensors")

    :param strategy: the strategy.
    :param path: the file; an existing one is replaced.
    :param stateless: plugins and metrics without state that matters; they are not saved.
    """
    write_state(path, strategy_state(strategy, stateless=stateless), kind=KIND)


def load_strategy(
    strategy: SupervisedTemplate,
    path: str | PathLike[str],
    experiences: Iterable[Any] = (),
    *,
    stateless: Collection[object] = (),
) -> None:
    """Load a file that ``save_strategy`` has written, so that training resumes bitwise as if it had never stopped.

    If this raises an error, the strategy may be partly loaded: build a new one.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from avalanche.training.plugins import EvaluationPlugin
    >>> from became_avalanche import GPMPlugin, MultiHeadMLP, load_strategy, save_strategy, split_digits
    >>> def build():
    ...     model = MultiHeadMLP()
    ...     optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ...     options = {"train_mb_size": 64, "evaluator": EvaluationPlugin()}
    ...     return Naive(model=model, optimizer=optimizer, plugins=[GPMPlugin()], **options)
    >>> strategy, benchmark = build(), split_digits()
    >>> _ = strategy.train(benchmark.train_stream[0])
    >>> save_strategy(strategy, "after-0.safetensors")
    >>> resumed = build()  # for example in another process
    >>> load_strategy(resumed, "after-0.safetensors")
    >>> _ = resumed.train(benchmark.train_stream[1])

    :param strategy: a fresh strategy, built exactly as the saved one was.
    :param path: the file.
    :param experiences: the experiences that the strategy has seen so far, in order. They are needed only if the model
        has dynamic modules other than Avalanche's ``MultiHeadClassifier`` and ``IncrementalClassifier``.
    :param stateless: as in ``save_strategy``.
    """
    state = read_state(path, kind=KIND)
    try:
        load_strategy_state(strategy, state, experiences, stateless=stateless)
    except (LookupError, TypeError, AttributeError, OverflowError, RuntimeError) as error:
        raise StateFileError(
            f"{path} does not fit this strategy: {error!r}; build the strategy exactly as the saved one was built"
        ) from error


def not_resumable(strategy: SupervisedTemplate, *, stateless: Collection[object] = ()) -> list[str]:
    """Return the class names of the parts of a strategy that cannot be saved; empty if all can be saved."""
    skipped = {id(part) for part in stateless}
    parts = [plugin for plugin in strategy.plugins if adapter_of(plugin) is None]
    for plugin in strategy.plugins:
        if isinstance(plugin, EvaluationPlugin):
            parts += unsaved_metrics(plugin)
    if not vars(strategy).keys() <= _ATTRIBUTES:
        parts.insert(0, strategy)
    return [type(part).__name__ for part in parts if id(part) not in skipped]


def strategy_state(strategy: SupervisedTemplate, *, stateless: Collection[object] = ()) -> dict[str, Any]:
    """Return what ``save_strategy`` saves, as nested containers of tensors and plain values.

    The tensors may be those of the live strategy, not copies.
    """
    if strategy.experience is not None:
        raise ValueError(
            "a strategy can be saved only between experiences, not in the middle of one; call save_strategy after "
            "train() has returned"
        )
    refused = not_resumable(strategy, stateless=stateless)
    if refused:
        raise NotResumableError(
            f"the state of {', '.join(refused)} cannot be saved; add state_dict() and load_state_dict() to the class, "
            "or list the object in stateless=[...] if it has no state that matters"
        )
    return {
        "plugins": [
            [type(plugin).__name__, adapter.save(plugin)] for plugin, adapter in _with_adapters(strategy, stateless)
        ],
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
    """Load a state that ``strategy_state`` returned; see ``load_strategy``."""
    strategy.model.to(strategy.device)
    plugins = list(_with_adapters(strategy, stateless))
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


def _with_adapters(strategy: SupervisedTemplate, stateless: Collection[object]) -> Iterable[tuple[Any, Adapter]]:
    """Yield the plugins that are saved, each with its adapter."""
    skipped = {id(part) for part in stateless}
    for plugin in strategy.plugins:
        adapter = adapter_of(plugin)
        if adapter is not None and id(plugin) not in skipped:
            yield plugin, adapter


# ----------------------------------------------------------------------------------------------------------- optimizer


def _optimizer_state(strategy: SupervisedTemplate) -> dict[str, Any]:
    """Return the optimizer's state and the names of its parameters.

    An evaluation may have replaced parameters, because a head grew. The optimizer keeps the old parameters until the
    next training. Avalanche finds them by ``optimized_param_id``.
    """
    current = dict(strategy.model.named_parameters())
    known = strategy.optimized_param_id
    names = {id(parameter): name for name, parameter in {**current, **(known or {})}.items()}
    groups = [group["params"] for group in strategy.optimizer.param_groups]
    try:
        named = [[names[id(parameter)] for parameter in group] for group in groups]
    except KeyError:
        raise NotResumableError(
            "the state of the optimizer cannot be saved: it has parameters that do not belong to the model"
        ) from None
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
            raise ValueError(
                f"the saved optimizer is corrupt: its parameter {name} has the shape {tuple(shape)}, which does not "
                f"fit into its shape {tuple(now)} in the model"
            )
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
    if state["numpy"]["state"]["pos"] not in range(len(key) + 1):  # NumPy would read out of bounds
        raise ValueError("the random state of NumPy is corrupt")
    np.random.set_state({**state["numpy"], "state": {**state["numpy"]["state"], "key": key}})
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available():
        for device, saved in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(saved, device)

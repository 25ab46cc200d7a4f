"""Save and load the state of Avalanche's own plugins, as tensors and plain values."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

from avalanche.evaluation.metric_definitions import GenericPluginMetric
from avalanche.training.plugins import (
    EarlyStoppingPlugin,
    EvaluationPlugin,
    EWCPlugin,
    LRSchedulerPlugin,
    LwFPlugin,
    SynapticIntelligencePlugin,
)
from avalanche.training.plugins.clock import Clock
from avalanche.training.templates import SupervisedTemplate
from avalanche.training.templates.base_sgd import PeriodicEval
from avalanche.training.utils import ParamData
from torch import Tensor

from became_avalanche.strategy.heads import load_model_state, model_state
from became_avalanche.strategy.state import StatefulPlugin


class Adapter(NamedTuple):
    """How to save and load the state of one kind of plugin between experiences."""

    save: Callable[[Any], dict[Any, Any]]
    """Returns the state of a plugin."""
    load: Callable[[Any, Any, SupervisedTemplate], None]
    """Loads a state into a plugin. The last argument is the plugin's strategy, whose model is not loaded yet."""


def adapter_of(plugin: object) -> Adapter | None:
    """Return the adapter that saves a plugin or metric, or None if its state cannot be saved.

    A plugin with ``state_dict`` and ``load_state_dict`` saves itself. A plugin without attributes has no state. A
    subclass of one of Avalanche's plugins is saved as that plugin if it adds no attribute.
    """
    if callable(getattr(plugin, "state_dict", None)) and callable(getattr(plugin, "load_state_dict", None)):
        return _OWN
    for kind in type(plugin).__mro__:
        if kind in _ADAPTERS:
            attributes, adapter = _ADAPTERS[kind]
            known = type(plugin) is kind or vars(plugin).keys() <= set(attributes.split())
            return adapter if known else None
    return _NOTHING if not vars(plugin) or _resets_itself(plugin) else None


def unsaved_metrics(evaluator: EvaluationPlugin) -> list[object]:
    """Return the metrics whose state cannot be saved."""
    return [metric for metric in evaluator.metrics if adapter_of(metric) is None]


def _resets_itself(metric: object) -> bool:
    """Whether this is an Avalanche metric that is reset in each training or evaluation, so that it has no state."""
    if not isinstance(metric, GenericPluginMetric) or metric._reset_at == "never":
        return False
    options = {"_reset_at", "_emit_at", "_mode"}
    return all(name in options or value is metric._metric for name, value in vars(metric).items())


# -------------------------------------------------------------------------------------------------- plugins in general


def _load_own(plugin: Any, state: Any, strategy: SupervisedTemplate) -> None:
    plugin.load_state_dict(_moved_to(strategy.device, state) if isinstance(plugin, StatefulPlugin) else state)


def _moved_to(device: Any, state: Any) -> Any:
    """Return the state with all tensors on ``device``."""
    if isinstance(state, dict):
        return {key: _moved_to(device, value) for key, value in state.items()}
    return state.to(device) if isinstance(state, Tensor) else state


_OWN = Adapter(lambda plugin: dict(plugin.state_dict()), _load_own)
_NOTHING = Adapter(lambda plugin: {}, lambda plugin, state, strategy: None)


def _load_clock(clock: Clock, state: Any, strategy: SupervisedTemplate) -> None:
    vars(clock).update(state)


# ----------------------------------------------------------------------------------------------------------- evaluator


def _save_evaluator(evaluator: EvaluationPlugin) -> dict[Any, Any]:
    """Return the state of the metrics, their last values, which early stopping reads, and their curves.

    Values other than numbers, strings and tensors are left out.
    """
    curves = evaluator.all_metric_results.items()
    return {
        "metrics": [_state_of(metric) for metric in evaluator.metrics],
        "last": {name: value for name, value in evaluator.last_metric_results.items() if _is_value(value)},
        "all": {name: (list(x), list(y)) for name, (x, y) in curves if all(map(_is_value, [*x, *y]))},
    }


def _load_evaluator(evaluator: EvaluationPlugin, state: Any, strategy: SupervisedTemplate) -> None:
    if len(state["metrics"]) != len(evaluator.metrics):
        raise ValueError(
            f"the saved evaluator has {len(state['metrics'])} metrics, this one has {len(evaluator.metrics)}; build it "
            "with the same metrics"
        )
    for metric, saved in zip(evaluator.metrics, state["metrics"], strict=True):
        adapter = adapter_of(metric)
        if saved and adapter is not None:
            adapter.load(metric, saved, strategy)
    evaluator.last_metric_results = dict(state["last"])
    evaluator.all_metric_results.update(state["all"])


def _state_of(metric: object) -> dict[Any, Any]:
    adapter = adapter_of(metric)
    return {} if adapter is None else adapter.save(metric)


def _is_value(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str | Tensor)


# ----------------------------------------------------------------------------------------------------------- schedules

_FLAGS = ("_was_training", "_just_validated", "_executed_train_iteration")


def _save_schedule(plugin: LRSchedulerPlugin) -> dict[Any, Any]:
    return {
        "scheduler": plugin.scheduler.state_dict(),
        "rolling_metric": dict(vars(plugin.rolling_metric)),
        "flags": {flag: getattr(plugin, flag) for flag in _FLAGS},
    }


def _load_schedule(plugin: LRSchedulerPlugin, state: Any, strategy: SupervisedTemplate) -> None:
    plugin.scheduler.load_state_dict(_with_counters(state["scheduler"], plugin.scheduler.state_dict()))
    vars(plugin.rolling_metric).update(state["rolling_metric"])
    vars(plugin).update(state["flags"])


def _with_counters(state: Any, like: Any) -> Any:
    """Return a schedule's state with a Counter wherever the fresh schedule has one (milestones of MultiStepLR)."""
    if isinstance(like, Counter):
        return Counter(state)
    if isinstance(like, dict):
        return {key: _with_counters(value, like.get(key)) for key, value in state.items()}
    if isinstance(like, list) and len(like) == len(state):
        return [_with_counters(*pair) for pair in zip(state, like, strict=True)]
    return state


# ------------------------------------------------------------------------------------------------------------- methods


def _save_values(values: Mapping[str, ParamData]) -> dict[str, Any]:
    return {
        name: {"name": value.name, "data": value.data, "device": value.device.type} for name, value in values.items()
    }


def _load_values(values: Mapping[str, Any], strategy: SupervisedTemplate) -> dict[str, ParamData]:
    loaded = {}
    for name, value in values.items():
        device = value["device"] if value["device"] == "cpu" else strategy.device
        loaded[name] = ParamData(value["name"], init_tensor=value["data"].to(device), device=device)
    return loaded


def _save_ewc(plugin: EWCPlugin) -> dict[Any, Any]:
    return {
        key: {t: _save_values(values) for t, values in getattr(plugin, key).items()}
        for key in ("saved_params", "importances")
    }


def _load_ewc(plugin: EWCPlugin, state: Any, strategy: SupervisedTemplate) -> None:
    for key, tasks in state.items():
        setattr(plugin, key, defaultdict(dict, {t: _load_values(values, strategy) for t, values in tasks.items()}))


def _save_si(plugin: SynapticIntelligencePlugin) -> dict[Any, Any]:
    return {
        "ewc_data": tuple(map(_save_values, plugin.ewc_data)),
        "syn_data": {key: _save_values(values) for key, values in plugin.syn_data.items()},
    }


def _load_si(plugin: SynapticIntelligencePlugin, state: Any, strategy: SupervisedTemplate) -> None:
    plugin.ewc_data = tuple(_load_values(values, strategy) for values in state["ewc_data"])
    plugin.syn_data = {key: _load_values(values, strategy) for key, values in state["syn_data"].items()}


def _save_lwf(plugin: LwFPlugin) -> dict[Any, Any]:
    lwf = plugin.lwf
    return {
        "expcount": lwf.expcount,
        "classes": {int(task): [int(label) for label in labels] for task, labels in lwf.prev_classes_by_task.items()},
        "model": None if lwf.prev_model is None else model_state(lwf.prev_model),
    }


def _load_lwf(plugin: LwFPlugin, state: Any, strategy: SupervisedTemplate) -> None:
    lwf = plugin.lwf
    lwf.expcount = state["expcount"]
    lwf.prev_classes_by_task = defaultdict(set, {task: set(labels) for task, labels in state["classes"].items()})
    if state["model"] is not None:
        lwf.prev_model = deepcopy(strategy.model)
        load_model_state(lwf.prev_model, state["model"])


_ADAPTERS: dict[type, tuple[str, Adapter]] = {
    Clock: ("", Adapter(lambda clock: dict(vars(clock)), _load_clock)),
    PeriodicEval: ("", _NOTHING),
    EvaluationPlugin: ("", Adapter(_save_evaluator, _load_evaluator)),
    EarlyStoppingPlugin: ("", _NOTHING),
    LRSchedulerPlugin: ("", Adapter(_save_schedule, _load_schedule)),
    EWCPlugin: (
        "ewc_lambda mode decay_factor keep_importance_data saved_params importances",
        Adapter(_save_ewc, _load_ewc),
    ),
    SynapticIntelligencePlugin: (
        "si_lambda eps excluded_parameters ewc_data syn_data _device",
        Adapter(_save_si, _load_si),
    ),
    LwFPlugin: ("lwf", Adapter(_save_lwf, _load_lwf)),
}
"""For each kind of plugin: the attributes that an instance of a subclass may have, and the adapter."""

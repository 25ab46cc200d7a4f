"""Methods by name: ``<projection>``, ``<projection>-2x``, ``<projection>+<rule>``, or one of Avalanche's own.

``finetune`` is no projection: ``finetune+<rule>`` trains once and merges with the weights before.

To add a method, add a line to ``PROJECTIONS`` or ``BASELINES``; its ``-2x`` and ``+<rule>`` come by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from avalanche.training.plugins import (
    AGEMPlugin,
    EWCPlugin,
    LwFPlugin,
    ReplayPlugin,
    SupervisedPlugin,
    SynapticIntelligencePlugin,
)
from avalanche.training.storage_policy import ReservoirSamplingBuffer
from avalanche.training.templates import SupervisedTemplate

from became_avalanche.merging.rules import RULES
from became_avalanche.plugins.connector import ConnectorPlugin
from became_avalanche.plugins.control import EqualTrainingPlugin
from became_avalanche.plugins.gpcns import GPCNSPlugin
from became_avalanche.plugins.gpm import GPMPlugin
from became_avalanche.plugins.merge import BecameMergePlugin
from became_avalanche.plugins.nscl import NSCLPlugin
from became_avalanche.plugins.owm import OWMPlugin
from became_avalanche.plugins.sgp import SGPPlugin
from became_avalanche.plugins.trgp import TRGPPlugin
from became_avalanche.runs.names import look_up

Plugins = list[SupervisedPlugin]

Strengths = Mapping[str, float | Mapping[str, Any]]
"""Method -> its setting on a benchmark, where that is not the default: one value, or options of its plugin by name."""

PROJECTIONS: dict[str, list[Callable[..., SupervisedPlugin]]] = {
    "finetune": [],
    "gpm": [GPMPlugin],
    "sgp": [SGPPlugin],
    "trgp": [TRGPPlugin],
    "gpcns": [GPCNSPlugin],
    "nscl": [NSCLPlugin],
    "owm": [OWMPlugin],
}
"""Name -> plugin, whose first parameter is the strength."""


def _merged(rule: str) -> Plugins:
    return [BecameMergePlugin(rule=rule)]


SECOND_STAGES: dict[str, Callable[[], Plugins]] = {
    "": lambda: [],
    "-2x": lambda: [EqualTrainingPlugin()],
    **{f"+{rule}": partial(_merged, rule) for rule in RULES},
}

BASELINES: dict[str, Callable[[float], Plugins]] = {
    "ewc": lambda strength: [EWCPlugin(ewc_lambda=strength)],
    "si": lambda strength: [_SynapticIntelligence(si_lambda=strength)],
    "lwf": lambda strength: [LwFPlugin(alpha=strength, temperature=2)],
    "agem": lambda patterns: [AGEMPlugin(patterns_per_experience=int(patterns), sample_size=64)],
    "er": lambda patterns: [_Reservoir(int(patterns))],
}

JOINT = "joint"
"""All tasks at once, as an upper bound."""


def _projected(name: str, second: Callable[[], Plugins], strengths: Strengths) -> Plugins:
    strength = strengths.get(name, {})
    values, options = ((), strength) if isinstance(strength, Mapping) else ((strength,), {})
    return [*(make(*values, **options) for make in PROJECTIONS[name]), *second()]


def _connector(second: Callable[[], Plugins], strengths: Strengths) -> Plugins:
    """Connector is two branches of NSCL, so the plugin that tells how to merge stands beside it."""
    return [*_projected("nscl", second, strengths), ConnectorPlugin()]


def _baseline(name: str, strengths: Strengths) -> Plugins:
    if not isinstance(strength := strengths.get(name), (int, float)):
        raise ValueError(
            f"{name} has no strength on this benchmark; choose one on validation data and set it in a preset"
        )
    return BASELINES[name](strength)


METHODS: dict[str, Callable[[Strengths], Plugins]] = {
    **{
        projection + stage: partial(_projected, projection, second)
        for projection in PROJECTIONS
        for stage, second in SECOND_STAGES.items()
    },
    **{f"connector{stage}": partial(_connector, second) for stage, second in SECOND_STAGES.items()},
    "connector-2x": partial(_projected, "nscl", SECOND_STAGES["-2x"]),  # two stages projected, no merge
    **{name: partial(_baseline, name) for name in BASELINES},
    JOINT: lambda strengths: [],
}
"""Name -> plugins, given the strengths on the benchmark."""

COMPARED = (
    "finetune",
    "ewc",
    "si",
    "lwf",
    "agem",
    "er",
    "finetune+became",
    "gpm",
    "gpm-2x",
    "gpm+became",
    JOINT,
)
"""What ``became compare`` compares if it is not told otherwise."""


def make_plugins(method: str, strengths: Strengths) -> Plugins:
    """The plugins of the method called ``method``; a ValueError with the nearest name if there is none."""
    return look_up("method", method, METHODS)(strengths)


def is_staged(method: str) -> bool:
    """Whether the method trains each task from the second on twice."""
    return method == "connector" or (_without_stage(method) != method and not method.startswith("finetune+"))


def rivals_of(method: str) -> tuple[str, ...]:
    """What a merging method is compared with: its baseline, and the control that trains as long."""
    base, plus, _ = method.partition("+")
    if not plus:
        return ()
    if not is_staged(method):
        return (base,)
    return (base, "nscl-2x" if base == "connector" else f"{base}-2x")


def base_of(method: str) -> str:
    """The method whose settings apply: the one without its second stage, and NSCL for Connector."""
    base = _without_stage(method)
    return "nscl" if base == "connector" else base


def used_strengths(methods: Sequence[str], strengths: Strengths) -> dict[str, float | Mapping[str, Any]]:
    """Those of ``strengths`` that one of ``methods`` depends on."""
    used = set(map(base_of, methods))
    return {name: strength for name, strength in strengths.items() if name in used}


def _without_stage(method: str) -> str:
    for stage in filter(None, SECOND_STAGES):
        method = method.removesuffix(stage)
    return method


class _Reservoir(ReplayPlugin):
    """Experience replay from a reservoir: ``ReplayPlugin`` without its call of a deprecated method."""

    def __init__(self, mem_size: int) -> None:
        super().__init__(mem_size=mem_size, storage_policy=ReservoirSamplingBuffer(max_size=mem_size))

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self.storage_policy.post_adapt(strategy, strategy.experience)


class _SynapticIntelligence(SynapticIntelligencePlugin):
    """Avalanche's SI keeps the weights before a step as a view of the live weights when they are on the CPU, so that
    nothing ever seems to have moved and it silently does nothing. Here it keeps copies."""

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().before_training_exp(strategy, **kwargs)
        _keep_copies(self.ewc_data[0])

    def before_training_iteration(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().before_training_iteration(strategy, **kwargs)
        _keep_copies(self.syn_data["old_theta"])


def _keep_copies(weights: Mapping[str, Any]) -> None:
    for weight in weights.values():
        weight.data = weight.data.clone()

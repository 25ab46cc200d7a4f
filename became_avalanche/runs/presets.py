"""Benchmarks by name: stream, network and training recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from became_avalanche.benchmarks.digits import permuted_digits, split_digits
from became_avalanche.models.mlp import MultiHeadMLP
from became_avalanche.runs.names import look_up


@dataclass(frozen=True)
class Recipe:
    """How each stage of each task is trained: plain SGD until the validation loss has settled (``PlateauPlugin``)."""

    learning_rate: float
    batch_size: int
    epochs: int
    """At most, per stage."""
    patience: int
    factor: float
    lr_min: float


@dataclass(frozen=True)
class BenchmarkPreset:
    """A benchmark with all that is needed to train on it."""

    name: str
    stream: Callable[[int], Any]
    """Seed -> Avalanche benchmark with train, valid and test streams."""
    n_tasks: int
    """How many tasks of the stream are learned."""
    model: Callable[[], nn.Module]
    recipe: Recipe
    strengths: Mapping[str, float] = field(default_factory=dict)
    """The one setting of each method, chosen on the validation stream by ``experiments/tune.py``."""


_PRESETS = [
    BenchmarkPreset(
        name="split-digits",
        stream=split_digits,
        n_tasks=5,
        model=MultiHeadMLP,
        recipe=Recipe(learning_rate=0.1, batch_size=64, epochs=50, patience=4, factor=3, lr_min=0.005),
        strengths={
            **{"ewc": 1000, "si": 10, "lwf": 3, "agem": 40, "er": 200},
            **{"sgp": 30, "trgp": 0.5, "gpcns": 0.3, "nscl": 10000, "owm": 10},
        },
    ),
    BenchmarkPreset(
        name="permuted-digits",
        stream=permuted_digits,
        n_tasks=10,
        model=MultiHeadMLP,
        recipe=Recipe(learning_rate=0.1, batch_size=64, epochs=50, patience=4, factor=3, lr_min=0.005),
        strengths={
            **{"ewc": 1000, "si": 1000, "lwf": 1, "agem": 20, "er": 200},
            **{"sgp": 10, "trgp": 0.5, "gpcns": 25, "nscl": 1, "owm": 100},
        },
    ),
]

BENCHMARKS = {preset.name: preset for preset in _PRESETS}


def find_benchmark(name: str) -> BenchmarkPreset:
    """The benchmark called ``name``; a ValueError with the nearest name if there is none."""
    return look_up("benchmark", name, BENCHMARKS)

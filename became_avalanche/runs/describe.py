"""Descriptions of benchmarks and data sets for ``became presets`` and ``became data``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from became_avalanche.benchmarks.cifar import CIFAR_100
from became_avalanche.benchmarks.files import Source
from became_avalanche.benchmarks.five import MEMBERS
from became_avalanche.benchmarks.imagenet import MINI_IMAGENET, TINY_IMAGENET
from became_avalanche.runs.catalogue import Benchmark
from became_avalanche.runs.components import options_of

_FIVE = tuple(member.source for member in MEMBERS.values())
SOURCES: dict[str, tuple[Source, ...]] = {
    "split-cifar100": (CIFAR_100,),
    "split-miniimagenet": (MINI_IMAGENET,),
    "five-datasets": _FIVE,
    "five-datasets-in-turn": _FIVE,
    "cifar100-superclass": (CIFAR_100,),
    "cifar100-superclass-in-turn": (CIFAR_100,),
    "split-tinyimagenet": (TINY_IMAGENET,),
}
"""The data sets that a stream reads from disk."""


def all_sources() -> list[Source]:
    """Return all data sets that the benchmarks read from disk."""
    return list(dict.fromkeys(source for sources in SOURCES.values() for source in sources))


def list_benchmarks(benchmarks: Iterable[Benchmark]) -> str:
    """Return a table of the benchmarks, one per line."""
    lines = [f"{'benchmark':30} {'tasks':>5}  {'network':16} data"]
    for benchmark in benchmarks:
        lines.append(f"{benchmark.name:30} {benchmark.stream.n_tasks:5}  {_network(benchmark):16} {_data(benchmark)}")
    return "\n".join(lines)


def show_benchmark(benchmark: Benchmark) -> str:
    """Return all settings of a benchmark as text."""
    stream = benchmark.stream
    options = {"n_tasks": stream.n_tasks} if "n_tasks" in options_of(stream.function()) else {}
    call = ", ".join(f"{name}={value!r}" for name, value in {**options, **stream.options}.items())
    lines = [
        benchmark.name,
        f"  {stream.n_tasks} tasks of {_data(benchmark)}, {_network(benchmark)}",
        f"  {stream.function().__name__}({call})",
        "",
        "training",
    ]
    recipes = {**benchmark.recipes, "other methods" if benchmark.recipes else "all methods": benchmark.recipe}
    for method, recipe in recipes.items():
        lines.append(f"  {method}: {_values({k: v for k, v in asdict(recipe).items() if k != 'kind'})}")
    lines += ["", "methods"]
    for method, values in benchmark.hyperparameters.items():
        lines.append(f"  {method}: {_values(values)}" + " (untuned default)" * (method in benchmark.untuned))
    return "\n".join(lines)


def describe_source(source: Source, root: Path) -> str:
    """Say whether a data set is complete, where it is, how large it is, and what to do if it is missing or corrupt."""
    place = source.place(root)
    if place is None:
        automatic = "downloaded automatically when a run needs it; or " if source.download else ""
        return f"{source.name}: missing\n  {automatic}{source.advice(root)}"
    try:
        images = source.check(place)
    except ValueError as error:
        return f"{source.name}: incomplete or corrupt\n  {error}"
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    return f"{source.name}: found\n  {place}, {size / 1e6:.0f} MB, {images} training images"


def _data(benchmark: Benchmark) -> str:
    return ", ".join(source.name for source in SOURCES.get(benchmark.stream.name, ())) or "embedded"


def _network(benchmark: Benchmark) -> str:
    return benchmark.network.function().__name__


def _values(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {f'{value:g}' if isinstance(value, float) else value}" for name, value in options.items())

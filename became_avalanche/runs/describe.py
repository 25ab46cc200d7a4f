"""Presets and data sets as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from became_avalanche.benchmarks.files import Source
from became_avalanche.runs.catalogue import untuned
from became_avalanche.runs.presets import BenchmarkPreset


def list_presets(presets: Iterable[BenchmarkPreset]) -> str:
    """A line per preset."""
    lines = [f"{'benchmark':24} {'tasks':>5}  {'network':16} data"]
    for preset in presets:
        data = ", ".join(source.name for source in preset.data) or "embedded"
        lines.append(f"{preset.name:24} {preset.n_tasks:5}  {_network(preset):16} {data}")
    return "\n".join(lines)


def show_preset(preset: BenchmarkPreset) -> str:
    """All settings of a preset."""
    data = ", ".join(source.name for source in preset.data) or "embedded"
    lines = [preset.name, f"  {preset.n_tasks} tasks of {data}, {_network(preset)}", f"  {_stream(preset)}", ""]
    recipes = {**preset.recipes, "others" if preset.recipes else "all": preset.recipe}
    lines += ["training", *(f"  {method}: {_values(asdict(recipe))}" for method, recipe in recipes.items())]
    lines += ["", "methods"]
    for method, strength in preset.strengths.items():
        values = _values(strength) if isinstance(strength, Mapping) else f"{strength:g}"
        lines.append(
            f"  {method}: {values}" + (" (not chosen for this benchmark)" if method in untuned(preset) else "")
        )
    return "\n".join(lines)


def describe_source(source: Source, root: Path) -> str:
    """Whether a data set is there and whole, where, how large, and what to do if it is not."""
    place = source.place(root)
    if place is None:
        can = "is downloaded when it is needed, or " if source.download else ""
        return f"{source.name}: missing\n  {can}{source.advice(root)}"
    try:
        images = source.check(place)
    except ValueError as error:
        return f"{source.name}: damaged\n  {error}"
    size = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    return f"{source.name}: found\n  {place}, {size / 1e6:.0f} MB, {images} training images"


def _stream(preset: BenchmarkPreset) -> str:
    """The call that makes it, but for seed and place."""
    call = preset.stream if isinstance(preset.stream, partial) else partial(preset.stream)
    arguments = [*map(repr, call.args), *(f"{name}={value!r}" for name, value in call.keywords.items())]
    return f"{call.func.__name__}({', '.join(arguments)})"


def _network(preset: BenchmarkPreset) -> str:
    model: Any = preset.model.func if isinstance(preset.model, partial) else preset.model
    return type(preset.model()).__name__ if not isinstance(model, type) else model.__name__


def _values(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in options.items())

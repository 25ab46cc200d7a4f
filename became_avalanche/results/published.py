"""The figures that the paper publishes, to stand beside those of runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from became_avalanche.results.record import Record
from became_avalanche.results.statistics import Spread


@cache
def _content() -> Any:
    return json.loads((files("became_avalanche.results") / "published.json").read_text(encoding="utf-8"))


def published(record: Record) -> Mapping[str, Spread]:
    """What the paper publishes for the method and benchmark of a run, by metric, as fractions; empty if nothing.

    A run with a label of its own may have other options than the paper's, so nothing is found for it.
    """
    benchmark = _benchmark(record)
    if record.label != record.method or benchmark is None:
        return {}
    figures = _content()["benchmarks"][benchmark].get(record.method, {})
    seeds = _content()["seeds"][benchmark]
    return {
        metric: Spread(mean / 100, None if std is None else std / 100, seeds) for metric, (mean, std) in figures.items()
    }


def differences(records: Sequence[Record], budget: str) -> list[str]:
    """In what the runs differ from those of the paper, which have all tasks, its recipe and several seeds.

    :param records: the runs of one table.
    :param budget: what ``budget`` says about them.
    """
    benchmark = _benchmark(records[0])
    if benchmark is None:
        return []
    ours, theirs = len({record.seed for record in records}), _content()["seeds"][benchmark]
    return [
        *([budget] if budget else []),
        *(["a shorter recipe"] if benchmark != records[0].benchmark else []),
        *([f"{ours} seed{'s' if ours > 1 else ''} instead of {theirs}"] if ours != theirs else []),
    ]


def _benchmark(record: Record) -> str | None:
    """The benchmark of the paper that a run is on, perhaps with another recipe."""
    name = _content()["other_recipe"].get(record.benchmark, record.benchmark)
    return name if name in _content()["benchmarks"] else None

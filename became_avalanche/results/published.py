"""The results published in the paper, shown next to those of runs."""

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
    """Return the paper's results for the method and benchmark of a run, by metric, as fractions; empty if it has none.

    A run whose label is not the name of its method may use other options than the paper, so the result is empty for it.
    """
    benchmark, _ = _benchmark(record)
    if record.label != record.method or benchmark is None:
        return {}
    results = _content()["benchmarks"][benchmark].get(record.method, {})
    seeds = _content()["seeds"][benchmark]
    return {
        metric: Spread(mean / 100, None if std is None else std / 100, seeds) for metric, (mean, std) in results.items()
    }


def differences(records: Sequence[Record], budget: str) -> list[str]:
    """Return how the runs differ from the paper's, which use all tasks, the paper's benchmark and several seeds.

    :param records: the runs of one table.
    :param budget: their budget in words, from ``tables.budget``.
    """
    benchmark, variant = _benchmark(records[0])
    if benchmark is None:
        return []
    ours, theirs = len({record.seed for record in records}), _content()["seeds"][benchmark]
    return [
        *([budget] if budget else []),
        *([variant] if variant else []),
        *([f"{ours} seed{'s' if ours > 1 else ''} instead of {theirs}"] if ours != theirs else []),
    ]


def _benchmark(record: Record) -> tuple[str | None, str]:
    """Return the paper's benchmark that a run was trained on, or None, and how the benchmark of the run differs."""
    name, variant = _content()["variants"].get(record.benchmark, (record.benchmark, ""))
    return (name, variant) if name in _content()["benchmarks"] else (None, "")

"""Metrics: what tables report about a run, computed from its record.

``A[t, i]`` is the accuracy on task ``i`` after training on task ``t``, and ``T`` is the number of tasks. A new metric
is one function with ``@_metric`` here. Its name is the function's, its definition the docstring, and every table and
CSV file can show it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev
from typing import Literal

from became_avalanche.results.record import Record

Unit = Literal["percent", "points", "count", "seconds", "bytes"]
"""``percent`` is an accuracy and ``points`` a difference of accuracies; the values of both are fractions."""
Direction = Literal["higher", "lower"]


@dataclass(frozen=True)
class Metric:
    """A number that describes a run."""

    name: str
    heading: str
    """Heading of its column in a table."""
    definition: str
    """What it is, in one line."""
    unit: Unit
    direction: Direction | None
    """Which values are better; None for a cost, which tables report but do not rank."""
    compute: Callable[[Record], float | None]

    def of(self, record: Record) -> float | None:
        """Its value for a run; None if the run is not done or did not measure what the metric needs."""
        return self.compute(record) if record.status == "done" else None


METRICS: dict[str, Metric] = {}
"""All metrics by name."""


def _metric(
    heading: str, unit: Unit, direction: Direction | None = None
) -> Callable[[Callable[[Record], float | None]], Callable[[Record], float | None]]:
    """Register the decorated function in ``METRICS``."""

    def register(compute: Callable[[Record], float | None]) -> Callable[[Record], float | None]:
        name, definition = compute.__name__, compute.__doc__ or ""
        METRICS[name] = Metric(name, heading, definition, unit, direction, compute)
        return compute

    return register


@_metric("ACC %", "percent", "higher")
def acc(record: Record) -> float | None:
    """Mean test accuracy over all tasks at the end: 1/T Σ_i A[T, i]."""
    return _mean(_final(record, "test"))


@_metric("BWT %", "points", "higher")
def bwt(record: Record) -> float | None:
    """Mean change of the earlier tasks' accuracy since each was learned: 1/(T−1) Σ_{i<T} (A[T, i] − A[i, i])."""
    return _mean([column[-1] - column[0] for column in _columns(record)[:-1]])


@_metric("forgetting %", "points", "lower")
def forgetting(record: Record) -> float | None:
    """Mean drop of the earlier tasks' accuracy from its best: 1/(T−1) Σ_{i<T} (max_{i≤t<T} A[t, i] − A[T, i])."""
    return _mean([max(column[:-1]) - column[-1] for column in _columns(record)[:-1]])


@_metric("AAA %", "percent", "higher")
def aaa(record: Record) -> float | None:
    """Mean over training of the accuracy on the tasks seen so far: 1/T Σ_t 1/t Σ_{i≤t} A[t, i]."""
    columns = _columns(record)
    return _mean([fmean(columns[i][t - i] for i in range(t + 1)) for t in range(len(columns))])


@_metric("AOA %", "percent", "higher")
def aoa(record: Record) -> float | None:
    """Mean accuracy on each later task after its first epoch of stage 1: 1/(T−1) Σ_{t≥2} A_t(epoch 1)."""
    return _mean(_measured([task.first_epoch_accuracy for task in record.tasks[1:]], len(record.tasks) - 1))


@_metric("STD %", "percent", "lower")
def std(record: Record) -> float | None:
    """Standard deviation of the final accuracy over the tasks of one run, of a population: std_i A[T, i]."""
    final = _final(record, "test")
    return pstdev(final) if final else None


@_metric("valid ACC %", "percent", "higher")
def valid_acc(record: Record) -> float | None:
    """Mean validation accuracy over all tasks at the end, by which settings are chosen."""
    return _mean(_final(record, "valid")) if "valid" in record.accuracy else record.converted.get("valid_acc")


@_metric("epochs", "count")
def epochs(record: Record) -> float | None:
    """Epochs of all stages of all tasks."""
    return sum(stage.epochs for task in record.tasks for stage in task.stages) if record.tasks else None


@_metric("seconds", "seconds")
def seconds(record: Record) -> float | None:
    """Wall-clock time of training, without evaluation."""
    measured = [task.seconds.training for task in record.tasks if task.seconds]
    return sum(measured) if measured and len(measured) == len(record.tasks) else record.converted.get("seconds")


@_metric("memory MiB", "bytes")
def memory(record: Record) -> float | None:
    """Bytes that the plugins hold after the last task."""
    return sum(record.tasks[-1].memory_bytes.values()) if record.tasks and record.tasks[-1].memory_bytes else None


def _final(record: Record, stream: str) -> list[float]:
    """Accuracy on each task at the end; empty if one was not measured."""
    matrix = record.accuracy.get(stream, [])
    return _measured(matrix[-1][: len(matrix)], len(matrix)) if matrix else []


def _columns(record: Record) -> list[list[float]]:
    """For each task, its test accuracy after it was learned and after each later task.

    Empty if a value was not measured, as in joint training, which has the last row only.
    """
    matrix = record.accuracy.get("test", [])
    columns = [_measured([row[i] for row in matrix[i:] if i < len(row)], len(matrix) - i) for i in range(len(matrix))]
    return columns if all(columns) else []


def _measured(values: Sequence[float | None], expected: int) -> list[float]:
    """The values if there are as many as expected and all were measured, otherwise an empty list."""
    measured = [value for value in values if value is not None]
    return measured if len(measured) == len(values) == expected else []


def _mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None

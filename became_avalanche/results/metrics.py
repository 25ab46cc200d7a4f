"""Metrics: what tables report about a run, computed from its record.

``A[t, i]`` is the accuracy on task ``i`` after training on task ``t``, and ``T`` is the number of tasks. A new metric
is one function with ``@_metric`` or ``@_matrix_metric`` here. Its name is the function's, its definition the docstring,
and every table, CSV file, report and logger can show it.

The paper prints IM and AAA without the factor 1/T. Both are means here, as the paper's own numbers are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import fmean
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from became_avalanche.results.record import Matrix, Record

Unit = Literal["percent", "points", "ratio", "count", "seconds", "bytes"]
"""``percent`` is an accuracy and ``points`` a difference of accuracies; the values of both are fractions."""
Direction = Literal["higher", "lower"]
Accuracies = NDArray[np.float64]
"""The accuracy matrix, square; nan where nothing was measured."""


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
    of_matrix: Callable[[Matrix], float | None] | None = None
    """The same as a function of an accuracy matrix, for a metric that needs nothing else."""

    @property
    def title(self) -> str:
        """Its heading without the sign of its unit, as in ``ACC``."""
        return self.heading.removesuffix(" %")

    def of(self, record: Record) -> float | None:
        """Its value for a run; None if the run is not done or did not measure what the metric needs."""
        return self.compute(record) if record.status == "done" else None


METRICS: dict[str, Metric] = {}
"""All metrics by name."""


def _metric(
    heading: str, unit: Unit, direction: Direction | None = None
) -> Callable[[Callable[[Record], float | None]], Callable[[Record], float | None]]:
    """Register the decorated function of a record in ``METRICS``."""

    def register(compute: Callable[[Record], float | None]) -> Callable[[Record], float | None]:
        name, definition = compute.__name__, compute.__doc__ or ""
        METRICS[name] = Metric(name, heading, definition, unit, direction, compute)
        return compute

    return register


def _matrix_metric(
    heading: str, unit: Unit, direction: Direction | None = None
) -> Callable[[Callable[[Accuracies], float]], Callable[[Accuracies], float]]:
    """Register the decorated function of the accuracy matrix in ``METRICS``.

    The function returns nan where the metric is not defined. A cell that it needs and that was not measured is nan, and
    so is the result.
    """

    def register(compute: Callable[[Accuracies], float]) -> Callable[[Accuracies], float]:
        def of_matrix(matrix: Matrix) -> float | None:
            return _number(compute(_square(matrix))) if matrix else None

        def of_record(record: Record) -> float | None:
            return of_matrix(record.accuracy.get("test", []))

        name, definition = compute.__name__, compute.__doc__ or ""
        METRICS[name] = Metric(name, heading, definition, unit, direction, of_record, of_matrix)
        return compute

    return register


# ------------------------------------------------------------------------------------------- of the accuracy matrix


@_matrix_metric("ACC %", "percent", "higher")
def acc(a: Accuracies) -> float:
    """Mean test accuracy over all tasks at the end: 1/T Σ_i A[T, i]."""
    return _mean(a[-1])


@_matrix_metric("BWT %", "points", "higher")
def bwt(a: Accuracies) -> float:
    """Mean change of the earlier tasks' accuracy since each was learned: 1/(T−1) Σ_{i<T} (A[T, i] − A[i, i])."""
    return _mean((a[-1] - a.diagonal())[:-1])


@_matrix_metric("forgetting %", "points", "lower")
def forgetting(a: Accuracies) -> float:
    """Mean drop of the earlier tasks' accuracy from its best: 1/(T−1) Σ_{i<T} (max_{i≤t<T} A[t, i] − A[T, i])."""
    return _mean([np.max(a[i:-1, i]) - a[-1, i] for i in range(len(a) - 1)])


@_matrix_metric("AAA %", "percent", "higher")
def aaa(a: Accuracies) -> float:
    """Mean over training of the accuracy on the tasks seen so far: 1/T Σ_t 1/t Σ_{i≤t} A[t, i]."""
    return _mean([_mean(a[t, : t + 1]) for t in range(len(a))])


@_matrix_metric("learning ACC %", "percent", "higher")
def learning_acc(a: Accuracies) -> float:
    """Mean accuracy on each task right after it was learned: 1/T Σ_i A[i, i]."""
    return _mean(a.diagonal())


@_matrix_metric("STD %", "percent", "lower")
def std(a: Accuracies) -> float:
    """Standard deviation of the final accuracy over the tasks of one run, of a population: std_i A[T, i]."""
    return float(np.std(a[-1]))


# ------------------------------------------------------------------------------------------------- of the whole record


@_metric("IM %", "points", "lower")
def im(record: Record) -> float | None:
    """Mean lack of accuracy after learning a task, against joint training on tasks 1..i: 1/T Σ_i (A*_i − A[i, i])."""
    return _number(_mean(intransigence(record)))


@_metric("AOA %", "percent", "higher")
def aoa(record: Record) -> float | None:
    """Mean accuracy on each later task after its first epoch of stage 1: 1/(T−1) Σ_{t≥2} A_t(epoch 1)."""
    return _number(_mean([_or_nan(task.first_epoch_accuracy) for task in record.tasks[1:]]))


@_metric("valid ACC %", "percent", "higher")
def valid_acc(record: Record) -> float | None:
    """Mean validation accuracy over all tasks at the end, by which settings are chosen."""
    matrix = record.accuracy.get("valid", [])
    return _number(acc(_square(matrix))) if matrix else record.converted.get("valid_acc")


@_metric("λ", "ratio")
def coefficient(record: Record) -> float | None:
    """Mean coefficient of the merges: 1/(T−1) Σ_{t≥2} λ_t."""
    return fmean(merge.coefficient for merge in record.merges) if record.merges else None


@_metric("rank", "count")
def rank(record: Record) -> float | None:
    """Directions that the projection protects after the last task, the sum over all layers."""
    return sum(record.tasks[-1].ranks.values()) if record.tasks and record.tasks[-1].ranks else None


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


@_metric("peak MiB", "bytes")
def peak_memory(record: Record) -> float | None:
    """Largest size of the whole process while the run was trained; on a GPU, of its tensors there."""
    return record.peak_memory_bytes


# ------------------------------------------------------------------------------------------------------------ per task


def accuracies(record: Record, stream: str = "test") -> Accuracies:
    """The accuracy matrix of a stream as a square array; nan where nothing was measured."""
    return _square(record.accuracy.get(stream, []))


def intransigence(record: Record) -> Accuracies:
    """IM_i = A*_i − A[i, i] of each task, with A*_i of joint training on tasks 1..i; nan where one was not measured."""
    a = accuracies(record)
    joint = [_or_nan(value) for value in record.joint_accuracy] + [nan] * (len(a) - len(record.joint_accuracy))
    return np.array(joint)[: len(a)] - a.diagonal()


def backward_transfer(record: Record) -> Accuracies:
    """BWT_i = A[T, i] − A[i, i] of each task; zero for the last one."""
    a = accuracies(record)
    return a[-1] - a.diagonal() if len(a) else np.array([])


def _square(matrix: Matrix) -> Accuracies:
    """A row and a column per task trained; other columns are of tasks that were not."""
    a = np.full((len(matrix), len(matrix)), nan)
    for t, row in enumerate(matrix):
        for i, value in enumerate(row[: len(matrix)]):
            a[t, i] = _or_nan(value)
    return a


def _or_nan(value: float | None) -> float:
    return nan if value is None else value


def _number(value: float) -> float | None:
    return None if isnan(value) else value


def _mean(values: Sequence[float] | Accuracies) -> float:
    """The mean; nan if there are no values or one of them was not measured."""
    return fmean(values) if len(values) else nan

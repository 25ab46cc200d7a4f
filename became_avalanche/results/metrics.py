"""Metrics such as ACC and BWT, computed from the record of a run.

``A[t, i]`` is the accuracy on task ``i`` after training on task ``t``, and ``T`` is the number of tasks.

>>> from became_avalanche import METRICS
>>> matrix = [[0.9, None], [0.8, 0.7]]
>>> {name: round(METRICS[name].of_matrix(matrix), 2) for name in ("acc", "bwt")}
{'acc': 0.75, 'bwt': -0.1}
>>> METRICS["acc"].definition
'Mean test accuracy over all tasks at the end: 1/T Σ_i A[T, i].'

To add a metric, write one function in this file and decorate it with ``@_metric`` or ``@_matrix_metric``. The name of
the function is the name of the metric, and the docstring is its definition. Every table, CSV file, report and logger
can then show it.

The paper's formulas of IM and AAA lack the factor 1/T, but its numbers are means. Both are means here.
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
"""``percent`` is an accuracy, ``points`` a difference of two accuracies. The values of both are fractions."""
Direction = Literal["higher", "lower"]
Accuracies = NDArray[np.float64]
"""Square accuracy matrix; nan where nothing was measured."""


@dataclass(frozen=True)
class Metric:
    """A number that describes a run."""

    name: str
    heading: str
    """Column heading in tables."""
    definition: str
    """Definition in one line."""
    unit: Unit
    direction: Direction | None
    """Whether higher or lower values are better. None for costs, which tables report but do not rank."""
    compute: Callable[[Record], float | None]
    of_matrix: Callable[[Matrix], float | None] | None = None
    """Computes the metric from an accuracy matrix; None if the metric needs more than that."""

    @property
    def title(self) -> str:
        """The heading without the percent sign, such as ``ACC``."""
        return self.heading.removesuffix(" %")

    def of(self, record: Record) -> float | None:
        """Return the value for a run; None if the run is not done or did not measure what the metric needs."""
        return self.compute(record) if record.status == "done" else None


METRICS: dict[str, Metric] = {}
"""All metrics by name."""


def _metric(
    heading: str, unit: Unit, direction: Direction | None = None
) -> Callable[[Callable[[Record], float | None]], Callable[[Record], float | None]]:
    """Register the decorated function, which takes a record, in ``METRICS``."""

    def register(compute: Callable[[Record], float | None]) -> Callable[[Record], float | None]:
        name, definition = compute.__name__, compute.__doc__ or ""
        METRICS[name] = Metric(name, heading, definition, unit, direction, compute)
        return compute

    return register


def _matrix_metric(
    heading: str, unit: Unit, direction: Direction | None = None
) -> Callable[[Callable[[Accuracies], float]], Callable[[Accuracies], float]]:
    """Register the decorated function, which takes the accuracy matrix, in ``METRICS``.

    The function returns nan if the metric is not defined. Cells that were not measured are nan, so the result is nan if
    the metric needs one of them.
    """

    def register(compute: Callable[[Accuracies], float]) -> Callable[[Accuracies], float]:
        def of_matrix(matrix: Matrix) -> float | None:
            return _none_if_nan(compute(_square(matrix))) if matrix else None

        def of_record(record: Record) -> float | None:
            return of_matrix(record.accuracy.get("test", []))

        name, definition = compute.__name__, compute.__doc__ or ""
        METRICS[name] = Metric(name, heading, definition, unit, direction, of_record, of_matrix)
        return compute

    return register


# ---------------------------------------------------------------------------------------- from the accuracy matrix


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
    """Mean drop of the earlier tasks' accuracy below its best: 1/(T−1) Σ_{i<T} (max_{i≤t<T} A[t, i] − A[T, i])."""
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
    """Population standard deviation of the final accuracy over the tasks of one run: std_i A[T, i]."""
    return float(np.std(a[-1]))


# ---------------------------------------------------------------------------------------------- from the whole record


@_metric("IM %", "points", "lower")
def im(record: Record) -> float | None:
    """Mean accuracy gap to joint training on tasks 1..i (A*_i) after learning task i: 1/T Σ_i (A*_i − A[i, i])."""
    return _none_if_nan(_mean(intransigence(record)))


@_metric("AOA %", "percent", "higher")
def aoa(record: Record) -> float | None:
    """Mean accuracy on each later task after its first epoch of stage 1: 1/(T−1) Σ_{t≥2} A_t(epoch 1)."""
    return _none_if_nan(_mean([_nan_if_none(task.first_epoch_accuracy) for task in record.tasks[1:]]))


@_metric("valid ACC %", "percent", "higher")
def valid_acc(record: Record) -> float | None:
    """Mean validation accuracy over all tasks at the end, used to choose hyperparameters."""
    matrix = record.accuracy.get("valid", [])
    return _none_if_nan(acc(_square(matrix))) if matrix else record.converted.get("valid_acc")


@_metric("λ", "ratio")
def coefficient(record: Record) -> float | None:
    """Mean merging coefficient: 1/(T−1) Σ_{t≥2} λ_t."""
    return fmean(merge.coefficient for merge in record.merges) if record.merges else None


@_metric("rank", "count")
def rank(record: Record) -> float | None:
    """Number of protected directions after the last task, summed over all layers."""
    return sum(record.tasks[-1].ranks.values()) if record.tasks and record.tasks[-1].ranks else None


@_metric("epochs", "count")
def epochs(record: Record) -> float | None:
    """Number of epochs, summed over all stages of all tasks."""
    return sum(stage.epochs for task in record.tasks for stage in task.stages) if record.tasks else None


@_metric("seconds", "seconds")
def seconds(record: Record) -> float | None:
    """Wall-clock time of training in seconds, without evaluation."""
    measured = [task.seconds.training for task in record.tasks if task.seconds]
    return sum(measured) if measured and len(measured) == len(record.tasks) else record.converted.get("seconds")


@_metric("memory MiB", "bytes")
def memory(record: Record) -> float | None:
    """Memory that the plugins hold after the last task."""
    return sum(record.tasks[-1].memory_bytes.values()) if record.tasks and record.tasks[-1].memory_bytes else None


@_metric("peak MiB", "bytes")
def peak_memory(record: Record) -> float | None:
    """Peak memory of the whole process during training; on a GPU, peak memory of the tensors on it."""
    return record.peak_memory_bytes


# ------------------------------------------------------------------------------------------------------------ per task


def accuracies(record: Record, stream: str = "test") -> Accuracies:
    """Return the accuracy matrix of a stream as a square array; nan where nothing was measured."""
    return _square(record.accuracy.get(stream, []))


def intransigence(record: Record) -> Accuracies:
    """Return IM_i = A*_i − A[i, i] of each task; nan where A*_i, from joint training, or A[i, i] was not measured."""
    a = accuracies(record)
    joint = [_nan_if_none(value) for value in record.joint_accuracy] + [nan] * (len(a) - len(record.joint_accuracy))
    return np.array(joint)[: len(a)] - a.diagonal()


def backward_transfer(record: Record) -> Accuracies:
    """Return BWT_i = A[T, i] − A[i, i] of each task; zero for the last task."""
    a = accuracies(record)
    return a[-1] - a.diagonal() if len(a) else np.array([])


def _square(matrix: Matrix) -> Accuracies:
    """Return a square array with one row and one column per trained task; columns of untrained tasks are dropped."""
    a = np.full((len(matrix), len(matrix)), nan)
    for t, row in enumerate(matrix):
        for i, value in enumerate(row[: len(matrix)]):
            a[t, i] = _nan_if_none(value)
    return a


def _nan_if_none(value: float | None) -> float:
    return nan if value is None else value


def _none_if_nan(value: float) -> float | None:
    return None if isnan(value) else value


def _mean(values: Sequence[float] | Accuracies) -> float:
    """Return the mean; nan if there are no values or one of them is nan."""
    return fmean(values) if len(values) else nan

"""Figures of records, readable in black and white."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle
from math import ceil, nan
from statistics import fmean
from typing import Protocol

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from became_avalanche.results.record import Record
from became_avalanche.results.tables import Row, by_label, table

MARKERS = "osD^v<>ph*X"


def run_figure(record: Record) -> Figure:
    """The test accuracy of each task of one run as training goes on."""
    figure = Figure(figsize=(4, 3), layout="constrained")
    axes = figure.subplots()
    _accuracies(axes, [record])
    axes.set_title(f"{record.label}, seed {record.seed}", fontsize=10)
    axes.set_xlabel("tasks learned")
    axes.set_ylabel("accuracy %")
    return figure


def comparison_figure(records: Iterable[Record], title: str = "") -> Figure:
    """Accuracy of each task as training goes on, ACC and BWT of all labels, and λ over the tasks.

    The labels are in the order of the records. Only runs that are done are drawn; a label of which some are not says
    how many are, as ``gpm (4 of 5)``.

    :param records: runs with one budget on one benchmark.
    :param title: what to write above the figure.
    """
    records = list(records)
    rows = table(records, ("acc", "bwt")).rows
    done = by_label(record for record in records if record.status == "done")
    curves = {label: runs for label, runs in done.items() if not runs[0].is_joint}
    merging = {label: runs for label, runs in done.items() if any(run.merges for run in runs)}

    lines = ceil(len(curves) / 6)
    columns = ceil(len(curves) / lines) if lines else 0
    heights = [2.1 * lines + 0.4, 0.3 * len(rows) + 1.2]
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=heights).flat

    what = "Each task (grey) and their mean (black) as training goes on" if curves else ""
    upper.suptitle("\n".join(filter(None, [title, what])), fontsize=11)
    if curves:
        panels = upper.subplots(lines, columns, sharey=True, squeeze=False)
        for axes in panels.flat[len(curves) :]:
            axes.set_axis_off()
        for axes, (label, runs) in zip(panels.flat, curves.items(), strict=False):
            _accuracies(axes, runs)
            axes.set_title(label, fontsize=10)
        for axes in panels[:, 0]:
            axes.set_ylabel("accuracy %")
        for axes in panels[-1]:
            axes.set_xlabel("tasks learned")

    panels = lower.subplots(1, 3 if merging else 2, squeeze=False)[0]
    for axes, metric, heading in zip(panels, ("acc", "bwt"), ("ACC %", "BWT %"), strict=False):
        _dots(axes, rows, metric, heading, black=merging.keys())
    panels[1].set_yticklabels([])
    if merging:
        _coefficients(panels[2], merging)
    return figure


def _accuracies(axes: Axes, runs: Sequence[Record]) -> None:
    """The mean over runs of the accuracy of each task; a gap where a run did not measure it."""
    matrices = [run.accuracy.get("test", []) for run in runs]
    tasks = len(matrices[0])

    def at(t: int, i: int) -> float:
        values = [matrix[t][i] for matrix in matrices]
        return 100 * fmean(nan if value is None else value for value in values)

    for i in range(tasks):
        axes.plot(range(i + 1, tasks + 1), [at(t, i) for t in range(i, tasks)], color="0.65", linewidth=0.8)
    means = [fmean(at(t, i) for i in range(t + 1)) for t in range(tasks)]
    axes.plot(range(1, tasks + 1), means, color="black", linewidth=1.8, marker="o", markersize=3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.spines[["top", "right"]].set_visible(False)


def _dots(axes: Axes, rows: Sequence[Row], metric: str, heading: str, black: Iterable[str]) -> None:
    """Mean and standard deviation of each label, in the order of the table."""
    for y, row in enumerate(rows):
        if spread := row.values[metric]:
            error = 100 * (spread.std or 0)
            color = "black" if row.label in black else "0.55"
            axes.errorbar(100 * spread.mean, y, xerr=error, fmt="o", color=color, markersize=5, capsize=2, linewidth=1)
    counts = [f" ({row.runs} of {row.runs + sum(row.absent.values())})" if row.absent else "" for row in rows]
    axes.set_yticks(range(len(rows)), [row.label + count for row, count in zip(rows, counts, strict=True)])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(heading)
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


def _coefficients(axes: Axes, merging: Mapping[str, Sequence[Record]]) -> None:
    """The mean over runs of the coefficient of each merge, and 1/t."""
    all_ts: set[int] = set()
    styles = zip(cycle(MARKERS), cycle(["-", "--", ":", "-."]), strict=False)
    for (marker, line), (label, runs) in zip(styles, merging.items(), strict=False):
        ts = [merge.t for merge in runs[0].merges]
        values = [fmean(run.merges[k].coefficient for run in runs) for k in range(len(ts))]
        axes.plot(ts, values, color="black", linestyle=line, marker=marker, markersize=4, label=label)
        all_ts.update(ts)
    ts = sorted(all_ts)
    axes.plot(ts, [1 / t for t in ts], color="0.65", linewidth=0.8, marker=".", label="1/t")
    axes.set_xlim(min(ts) - 0.5, max(ts) + 0.5)
    axes.set_xlabel("task")
    axes.set_ylabel("λ")
    axes.set_ylim(-0.03, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


class Scan(Protocol):
    """The losses along the path of a merge, as ``scan_path`` measures them."""

    @property
    def t(self) -> int:
        """Task, counted from 1."""

    @property
    def coefficients(self) -> Sequence[float]:
        """λ from 0 to 1."""

    @property
    def loss(self) -> Sequence[Sequence[float]]:
        """Mean loss over the samples: a row per task, a column per λ."""

    @property
    def cumulative_loss(self) -> Sequence[float]:
        """Sum of the losses of all tasks for each λ."""

    @property
    def best(self) -> float:
        """The λ with the least cumulative loss."""

    @property
    def chosen(self) -> float:
        """The λ of the merge."""


def path_figure(scans: Sequence[Scan], marks: Sequence[Mapping[str, float]] = ()) -> Figure:
    """The mean loss of the tasks along the path of each merge, its least value, and the coefficient of the merge.

    :param scans: what ``scan_path`` returned.
    :param marks: for each scan, other coefficients by name to be marked on it.
    """
    figure = Figure(figsize=(3.2 * len(scans), 3.4), layout="constrained")
    panels = figure.subplots(1, len(scans), squeeze=False)[0]
    for axes, scan, mark in zip(panels, scans, marks or [{}] * len(scans), strict=True):
        tasks = len(scan.loss)
        means = [loss / tasks for loss in scan.cumulative_loss]
        for i, loss in enumerate(scan.loss):
            current = i == tasks - 1
            axes.plot(scan.coefficients, loss, color="0.65", linewidth=0.8, linestyle="--" if current else "-")
        axes.plot(scan.coefficients, means, color="black", linewidth=1.8)
        axes.plot(scan.best, min(means), color="black", marker="o", markersize=5)
        axes.axvline(scan.chosen, color="black", linewidth=0.8, linestyle=":")
        for marker, (name, value) in zip(cycle(MARKERS[1:]), mark.items(), strict=False):
            height = np.interp(value, scan.coefficients, means)
            axes.plot(value, height, marker, color="black", markerfacecolor="white", markersize=6, label=name)
        axes.set_title(f"task {scan.t}", fontsize=10)
        axes.set_xlabel("λ")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("loss")
    if any(marks):
        panels[0].legend(frameon=False, fontsize=8)
    return figure

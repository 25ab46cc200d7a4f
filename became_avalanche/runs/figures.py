"""Pictures of results: readable in black and white, nothing in them that says nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from math import ceil
from statistics import mean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from became_avalanche.analysis.path import PathScan
from became_avalanche.runs.compare import Comparison
from became_avalanche.runs.methods import JOINT
from became_avalanche.runs.train import RunResult

MARKERS = "osD^v<>ph*X"


def run_figure(run: RunResult) -> Figure:
    """The accuracy of each task of one run as training goes on."""
    figure = Figure(figsize=(4, 3), layout="constrained")
    axes = figure.subplots()
    _accuracies(axes, [run])
    axes.set_title(f"{run.method}, seed {run.seed}", fontsize=10)
    axes.set_xlabel("tasks learned")
    axes.set_ylabel("accuracy %")
    return figure


def comparison_figure(comparison: Comparison) -> Figure:
    """Accuracy of each task as training goes on, ACC and BWT of all methods, and λ over the tasks."""
    curves = [method for method in comparison.methods if comparison.of(method) and method != JOINT]
    rows = ceil(len(curves) / 6)
    columns = ceil(len(curves) / rows) if rows else 0
    heights = [2.1 * rows + 0.4, 0.3 * len(comparison.rows()) + 1.2]
    figure = Figure(figsize=(12, sum(heights)), layout="constrained")
    upper, lower = figure.subfigures(2, 1, squeeze=False, height_ratios=heights).flat

    if curves:
        title = f"{comparison.preset.title}\n" if comparison.preset.budget else ""
        upper.suptitle(f"{title}Each task (grey) and their mean (black) as training goes on", fontsize=11)
        panels = upper.subplots(rows, columns, sharey=True, squeeze=False)
        for axes in panels.flat[len(curves) :]:
            axes.set_axis_off()
        for axes, method in zip(panels.flat, curves, strict=False):
            _accuracies(axes, comparison.of(method))
            axes.set_title(method, fontsize=10)
        for axes in panels[:, 0]:
            axes.set_ylabel("accuracy %")
        for axes in panels[-1]:
            axes.set_xlabel("tasks learned")

    merging = [method for method in comparison.methods if any(run.merges for run in comparison.of(method))]
    panels = lower.subplots(1, 3 if merging else 2, squeeze=False)[0]
    _dots(panels[0], comparison, "ACC %")
    _dots(panels[1], comparison, "BWT %")
    panels[1].set_yticklabels([])
    if merging:
        _coefficients(panels[2], comparison, merging)
    return figure


def _accuracies(axes: Axes, runs: Sequence[RunResult]) -> None:
    tasks = len(runs[0].accuracy)

    def at(t: int, i: int) -> float:
        return 100 * mean(value for run in runs if (value := run.accuracy[t][i]) is not None)

    for i in range(tasks):
        axes.plot(range(i + 1, tasks + 1), [at(t, i) for t in range(i, tasks)], color="0.65", linewidth=0.8)
    means = [mean(at(t, i) for i in range(t + 1)) for t in range(tasks)]
    axes.plot(range(1, tasks + 1), means, color="black", linewidth=1.8, marker="o", markersize=3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.spines[["top", "right"]].set_visible(False)


def _dots(axes: Axes, comparison: Comparison, what: str) -> None:
    """Mean and standard deviation of each method, in the order of the table; merging methods are black."""
    rows = comparison.rows()
    for y, row in enumerate(rows):
        spread = row.acc if what.startswith("ACC") else row.bwt
        if spread is not None:
            error = 100 * (spread.std or 0)
            color = "black" if "+" in row.method else "0.55"
            axes.errorbar(100 * spread.mean, y, xerr=error, fmt="o", color=color, markersize=5, capsize=2, linewidth=1)
    axes.set_yticks(range(len(rows)), [row.method for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(what)
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)


def _coefficients(axes: Axes, comparison: Comparison, methods: Sequence[str]) -> None:
    for marker, line, method in zip(cycle(MARKERS), cycle(["-", "--", ":", "-."]), methods, strict=False):
        runs = comparison.of(method)
        ts = [record.t for record in runs[0].merges]
        values = [mean(run.merges[k].coefficient for run in runs) for k in range(len(ts))]
        axes.plot(ts, values, color="black", linestyle=line, marker=marker, markersize=4, label=method)
    axes.plot(ts, [1 / t for t in ts], color="0.65", linewidth=0.8, marker=".", label="1/t")
    axes.set_xlim(min(ts) - 0.5, max(ts) + 0.5)
    axes.set_xlabel("task")
    axes.set_ylabel("λ")
    axes.set_ylim(-0.03, 1.03)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
    axes.legend(frameon=False, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)


def path_figure(scans: Sequence[PathScan], marks: Sequence[Mapping[str, float]] = ()) -> Figure:
    """The mean loss of the tasks along the path of each merge, its least value, and where the merge went.

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
            style = "--" if current else "-"
            axes.plot(scan.coefficients, loss, color="0.65", linewidth=0.8, linestyle=style)
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

"""Figures of records in one style. Colour-blind readers can tell the colours apart; markers and lines work in grey.

``FIGURES`` contains all figures of records by name. Each is a function of records that draws into ``ax`` if given, and
otherwise into a new figure. Labels with several seeds are drawn as the mean over seeds.

>>> from became_avalanche import FIGURES
>>> FIGURES["final"].title
'final accuracy of each task'

To add a figure, write one function in this file and decorate it with ``@_figure``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from itertools import cycle
from math import ceil, floor
from pathlib import Path
from typing import Any, NamedTuple, ParamSpec

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from became_avalanche.files import UserError
from became_avalanche.results.metrics import METRICS, accuracies
from became_avalanche.results.record import Record
from became_avalanche.results.scans import Landscape, PathScan
from became_avalanche.results.statistics import Spread
from became_avalanche.results.tables import Row, by_label, table

COLORS = ("#D55E00", "#0072B2", "#009E73", "#E69F00", "#CC79A7", "#56B4E9", "#000000")
"""Okabe and Ito's colour-blind-safe palette, without yellow."""
MARKERS = "osD^vPX<>ph"
LINES = ("-", "--", "-.", ":")
MAX_METHODS = 6
"""Largest number of methods in one chart; more could not be told apart."""
MAX_PANELS = 4
"""Largest number of panels side by side; more would be too small."""
LONG_LABEL = 20
"""Three labels with more characters fill a row of the legend."""

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.markersize": 4.5,
    "pdf.fonttype": 42,  # embed TrueType fonts, so that text can be selected
}

Values = NDArray[np.float64]
Drawing = Callable[..., Figure]
P = ParamSpec("P")


class NothingToDrawError(UserError, ValueError):
    """The records lack the data that a figure shows."""


class NamedFigure(NamedTuple):
    """A function that draws a figure from records, with its name and title."""

    name: str
    title: str
    """Description in one line."""
    draw: Drawing


FIGURES: dict[str, NamedFigure] = {}
"""All figures of records by name."""

SCANS = {
    "path": "loss of each task along the path of a merge, with the chosen λ",
    "landscape": "loss and accuracy in the plane through θ*_{t-1}, θ_GP and θ̂, with θ* on it",
}
"""Names and descriptions of the figures around a merge: ``path_figure`` and ``landscape_figure``."""


def _styled(draw: Callable[P, Figure]) -> Callable[P, Figure]:
    """Make a drawing function use the style of this module."""

    @wraps(draw)
    def styled(*args: P.args, **kwargs: P.kwargs) -> Figure:
        with mpl.rc_context(STYLE):
            return draw(*args, **kwargs)

    return styled


def _figure(title: str) -> Callable[[Callable[P, Figure]], Callable[P, Figure]]:
    """Register the decorated function in ``FIGURES``."""

    def register(draw: Callable[P, Figure]) -> Callable[P, Figure]:
        styled = _styled(draw)
        FIGURES[draw.__name__] = NamedFigure(draw.__name__, title, styled)
        return styled

    return register


def save_figure(figure: Figure, stem: Path, dpi: int = 150) -> list[Path]:
    """Write a figure as PDF (for papers) and as PNG (for web pages), and return both paths.

    >>> from pathlib import Path
    >>> from matplotlib.figure import Figure
    >>> from became_avalanche import save_figure
    >>> [path.name for path in save_figure(Figure(), Path("my-figure"))]
    ['my-figure.pdf', 'my-figure.png']

    :param figure: the figure.
    :param stem: path without suffix.
    :param dpi: resolution of the PNG file.
    """
    paths = [stem.with_name(f"{stem.name}.{form}") for form in ("pdf", "png")]
    for path in paths:
        with mpl.rc_context(STYLE):
            figure.savefig(path, dpi=dpi, metadata={"CreationDate": None} if path.suffix == ".pdf" else None)
    return paths


# --------------------------------------------------------------------------------------------------------- accuracies


@_figure("accuracy of each task over training")
def training(records: Sequence[Record], ax: Axes | None = None) -> Figure:
    """Draw the test accuracy of each task during training, and the mean over the tasks seen: one panel per method."""
    return _panels(records, ax, _training, "tasks learned", "accuracy %", lambda run: len(accuracies(run)) > 0)


@_figure("accuracy matrix")
def matrix(records: Sequence[Record], ax: Axes | None = None) -> Figure:
    """Draw the accuracy on each task (columns) after learning each task (rows) as a heatmap: one panel per method."""
    known = [run for run in records if run.status == "done" and not run.is_joint and len(accuracies(run))]
    shown = main_labels(known, MAX_PANELS)
    matrices = [100 * accuracies(run) for run in known if run.label in shown]
    low = min((10 * floor(float(np.nanmin(a)) / 10) for a in matrices), default=0)
    high = max([low + 10, *(10 * ceil(float(np.nanmax(a)) / 10) for a in matrices)])
    draw = partial(_matrix, low=low, high=high)
    return _panels(records, ax, draw, "accuracy on task", "after task", lambda run: len(accuracies(run)) > 0)


@_figure("average accuracy over training")
def average(records: Sequence[Record], ax: Axes | None = None) -> Figure:
    """Draw the mean accuracy over the tasks seen so far, with the standard deviation over seeds at the end."""
    figure, axes = _figure_and_axes(ax)
    for label, runs, style in _groups_to_draw(records, lambda run: not run.is_joint):
        seen = 100 * _stack([[a[t, : t + 1].mean() for t in range(len(a))] for a in map(accuracies, runs)])
        mean = seen.mean(0)
        axes.plot(range(1, len(mean) + 1), mean, label=label, **style)
        if len(seen) > 1:
            axes.errorbar(len(mean), mean[-1], seen[:, -1].std(ddof=1), color=style["color"], capsize=3, linewidth=1)
    _tasks_axis(axes, "tasks learned")
    axes.set_ylabel("accuracy on tasks seen %")
    _legend(axes, ax)
    return figure


@_figure("final accuracy of each task")
def final(records: Sequence[Record], ax: Axes | None = None) -> Figure:
    """Draw the final accuracy of each task, with the standard deviation over the tasks (STD) in the legend."""
    figure, axes = _figure_and_axes(ax)
    for label, runs, style in _groups_to_draw(records):
        values = 100 * _stack([accuracies(run)[-1] for run in runs if len(accuracies(run))]).mean(0)
        std = Spread.of([value for run in runs if (value := METRICS["std"].of(run)) is not None]).mean
        axes.plot(range(1, len(values) + 1), values, label=f"{label} (STD {100 * std:.1f})", **style)
    _tasks_axis(axes, "task")
    axes.set_ylabel("final accuracy %")
    _legend(axes, ax)
    return figure


@_figure("accuracy after one epoch (AOA) of each task")
def aoa(records: Sequence[Record], ax: Axes | None = None) -> Figure:
    """Draw the accuracy on each task after its first epoch of stage 1, from the second task on."""
    figure, axes = _figure_and_axes(ax)
    groups = _groups_to_draw(records, lambda run: METRICS["aoa"].of(run) is not None, "the accuracy after one epoch")
    for label, runs, style in groups:
        values = 100 * _stack([[task.first_epoch_accuracy for task in run.tasks[1:]] for run in runs]).mean(0)
        axes.plot(range(2, len(values) + 2), values, label=f"{label} ({values.mean():.1f})", **style)
    _tasks_axis(axes, "task")
    axes.set_ylabel("accuracy after one epoch %")
    _legend(axes, ax)
    return figure


@_figure("stability (BWT) against plasticity (IM)")
def bwt_im(records: Sequence[Record], ax: Axes | None = None) -> Figure:
    """Draw BWT against IM: methods further up forget less, methods further left learn new tasks better."""
    figure, axes = _figure_and_axes(ax)
    groups = _groups_to_draw(
        records,
        lambda run: METRICS["im"].of(run) is not None and METRICS["bwt"].of(run) is not None,
        "IM, which needs joint training on the first 1, 2, ... tasks (set intransigence = true in the study)",
    )
    for label, runs, style in groups:
        spreads = [Spread.of([METRICS[name].of(run) or 0.0 for run in runs]) for name in ("im", "bwt")]
        (x, y), (dx, dy) = zip(*((100 * s.mean, 100 * (s.std or 0)) for s in spreads), strict=True)
        axes.errorbar(x, y, dy, dx, label=label, **{**style, "linestyle": "", "markersize": 7}, capsize=2, linewidth=1)
    axes.set_xlabel("IM % (plasticity: left is better)")
    axes.set_ylabel("BWT % (stability: up is better)")
    axes.margins(0.15)
    _legend(axes, ax)
    return figure


# ------------------------------------------------------------------------------------------------ merges and memory


@_figure("λ of each merge")
def coefficients(records: Sequence[Record], ax: Axes | None = None) -> Figure:
    """Draw the coefficient of each merge, and 1/t for comparison."""
    figure, axes = _figure_and_axes(ax)
    groups = _groups_to_draw(records, lambda run: bool(run.merges), "merges")
    ts: set[int] = set()
    for label, runs, style in groups:
        own = [merge.t for merge in runs[0].merges]
        axes.plot(
            own, _stack([[merge.coefficient for merge in run.merges] for run in runs]).mean(0), label=label, **style
        )
        ts.update(own)
    axes.plot(sorted(ts), [1 / t for t in sorted(ts)], color="0.6", linewidth=1, marker=".", label="1/t")
    _tasks_axis(axes, "task")
    axes.set_xlim(min(ts) - 0.5, max(ts) + 0.5)
    axes.set_ylim(-0.03, 1.03)
    axes.set_ylabel("λ")
    _legend(axes, ax)
    return figure


@_figure("rank of each layer")
def ranks(records: Sequence[Record], ax: Axes | None = None) -> Figure:
    """Draw the number of protected directions in each layer after each task: one panel per method."""
    return _panels(
        records,
        ax,
        _ranks,
        "tasks learned",
        "rank",
        lambda run: bool(run.tasks and run.tasks[-1].ranks),
        "protected layers",
    )


@_figure("memory and time of each method")
def costs(records: Sequence[Record], ax: Axes | None = None) -> Figure:
    """Draw the memory of the plugins after the last task and the training time; with ``ax``, only the time."""
    rows, styles = table(records, ("seconds", "memory")).rows, _styles(records)
    metrics = [name for name in ("seconds", "memory") if any(row.values[name] for row in rows)]
    if not metrics:
        raise NothingToDrawError("none of these runs has measurements of time or memory")
    if ax is not None:
        return _dot_plot(ax, rows, "seconds", styles)
    figure = Figure(figsize=(1.5 + 3.2 * len(metrics), max(1.8, 0.28 * len(rows) + 1)), layout="constrained")
    panels = figure.subplots(1, len(metrics), squeeze=False)[0]
    for axes, name in zip(panels, metrics, strict=True):
        _dot_plot(axes, rows, name, styles)
        axes.set_xlim(left=0)
    for axes in panels[1:]:
        axes.set_yticklabels([])
    return figure


@_figure("loss of both stages of each task")
def losses(records: Sequence[Record], ax: Axes | None = None) -> Figure:
    """Draw the training and validation loss of one run, epoch by epoch. Stages after the first are shaded.

    The run is the first one with two stages, or the first one if there is none. There is one panel for each of its last
    four tasks; with ``ax``, only the last task is drawn.
    """
    traced = [run for run in records if run.tasks and all(stage.training_loss for stage in run.tasks[-1].stages)]
    if not traced:
        raise NothingToDrawError("none of these runs recorded its losses")
    run = next((run for run in traced if len(run.tasks[-1].stages) > 1), traced[0])
    shown = list(range(len(run.tasks)))[-MAX_PANELS:] if ax is None else [len(run.tasks) - 1]
    if ax is None:
        figure = Figure(figsize=(max(4.2, 2.8 * len(shown)), 3), layout="constrained")
        panels = list(figure.subplots(1, len(shown), sharey=True, squeeze=False)[0])
        figure.suptitle(f"{run.label}, seed {run.seed}", fontsize=10)
    else:
        figure, panels = _figure_and_axes(ax)[0], [ax]
    for axes, t in zip(panels, shown, strict=True):
        _losses(axes, run, t)
    panels[0].set_ylabel("loss")
    panels[0].legend()
    return figure


# ----------------------------------------------------------------------------------------------------- whole studies


@_styled
def run_figure(record: Record) -> Figure:
    """Draw the test accuracy of each task of one run during training."""
    figure, axes = _figure_and_axes(None)
    _training(axes, [record])
    axes.set_title(f"{record.label}, seed {record.seed}")
    axes.set_xlabel("tasks learned")
    axes.set_ylabel("accuracy %")
    return figure


@_figure("comparison of all methods")
def comparison(records: Sequence[Record], ax: Axes | None = None) -> Figure:
    """Draw the main methods over training, ACC and BWT of all methods, and λ; with ``ax``, only ACC."""
    return comparison_figure(records) if ax is None else _dot_plot(ax, table(records, ("acc",)).rows, "acc")


@_styled
def comparison_figure(records: Iterable[Record], title: str = "") -> Figure:
    """Draw the average accuracy of the main methods over training, ACC and BWT of all labels, and λ.

    The labels are in the order of the records. Only runs that are done are drawn. If some runs of a label are not done,
    the label says how many are, for example ``gpm (4 of 5)``.

    :param records: runs with the same budget on one benchmark.
    :param title: title of the figure.
    """
    records = list(records)
    rows = table(records, ("acc", "bwt")).rows
    done = [record for record in records if record.status == "done"]
    merging = any(record.merges for record in done)
    curves = any(not record.is_joint for record in done)
    kinds = ["average"] * curves + ["acc", "bwt"] + ["λ"] * merging
    ratios = [1.5 if kind == "average" else 1 for kind in kinds]
    figure = Figure(figsize=(3.1 * sum(ratios), max(3.4, 0.26 * len(rows) + 1)), layout="constrained")
    figure.suptitle(title, fontsize=11)
    panels = dict(zip(kinds, figure.subplots(1, len(kinds), squeeze=False, width_ratios=ratios)[0], strict=True))
    if curves:
        average(done, panels["average"])
    for kind in ("acc", "bwt"):
        _dot_plot(panels[kind], rows, kind, _styles(done))
    panels["bwt"].set_yticklabels([])
    if merging:
        coefficients(done, panels["λ"])
    _share_legend(figure, [panels[kind] for kind in ("average", "λ") if kind in panels])
    return figure


def _share_legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """Replace the legends of the panels by one below the figure, where it covers no lines."""
    lines: dict[str, Any] = {}
    for panel in panels:
        lines.update(dict(zip(*reversed(panel.get_legend_handles_labels()), strict=True)))
        panel.legend().remove()
    if lines:
        columns = 3 if max(map(len, lines)) > LONG_LABEL else 7
        figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=columns)


# ------------------------------------------------------------------------------------- around the weights of a merge


@_styled
def path_figure(scans: Sequence[PathScan], marks: Sequence[Mapping[str, float]] = ()) -> Figure:
    """Draw the loss of each task along the path of each merge, the lowest mean loss, and the coefficient of the merge.

    >>> from became_avalanche import PathScan, path_figure
    >>> loss, accuracy = [[1.0, 2.0, 5.0], [4.0, 1.0, 0.0]], [[1.0, 0.9, 0.5], [0.2, 0.8, 1.0]]
    >>> scan = PathScan(t=2, coefficients=[0, 0.5, 1], loss=loss, accuracy=accuracy, chosen=0.4, plasticity=1)
    >>> figure = path_figure([scan], marks=[{"1/t": 0.5}])
    >>> figure.axes[0].get_title()
    'task 2'

    :param scans: results of ``scan_path``; one panel each.
    :param marks: for each scan, names and values of further coefficients to mark.
    """
    figure = Figure(figsize=(max(4.2, 3.2 * len(scans)), 3.4), layout="constrained")
    panels = figure.subplots(1, len(scans), squeeze=False)[0]
    for axes, scan, mark in zip(panels, scans, marks or [{}] * len(scans), strict=True):
        draw_path(scan, axes, mark)
    panels[0].set_ylabel("loss")
    panels[0].legend()
    return figure


@_styled
def draw_path(scan: PathScan, ax: Axes, mark: Mapping[str, float] | None = None) -> Figure:
    """Draw one panel of ``path_figure``."""
    tasks = len(scan.loss)
    means = [loss / tasks for loss in scan.cumulative_loss]
    for i, loss in enumerate(scan.loss):
        now = i == tasks - 1
        label = "task learned last" if now else ("earlier tasks" if i == 0 else None)
        ax.plot(scan.coefficients, loss, color="0.5", linewidth=0.9, linestyle="--" if now else "-", label=label)
    ax.plot(scan.coefficients, means, color="black", linewidth=2, label="mean of all tasks")
    ax.plot(scan.best, min(means), color="black", marker="o", markersize=6, linestyle="", label="least mean loss")
    ax.axvline(scan.chosen, color=COLORS[0], linewidth=1.5, linestyle=":", label="λ of the merge")
    for marker, (name, value) in zip(cycle(MARKERS[1:]), (mark or {}).items(), strict=False):
        height = np.interp(value, scan.coefficients, means)
        ax.plot(value, height, marker, color="black", markerfacecolor="white", markersize=6, label=name)
    ax.set_title(f"task {scan.t}")
    ax.set_xlabel("λ")
    return _figure_of(ax)


@_styled
def landscape_figure(landscape: Landscape) -> Figure:
    """Draw training loss (top) and test accuracy (bottom) in the plane through θ*_{t-1}, θ_GP and θ̂.

    The merged weights θ*_t lie in this plane. The columns show the mean over the earlier tasks, the current task, and
    the mean over all tasks.
    """
    before = "task 1" if landscape.t == 2 else f"tasks 1 to {landscape.t - 1}"
    columns = [(before, slice(None, -1)), (f"task {landscape.t}", slice(-1, None)), ("all tasks", slice(None))]
    figure = Figure(figsize=(9.6, 5.8), layout="constrained")
    panels = figure.subplots(2, len(columns), sharex=True, sharey=True)
    for k, (title, chosen) in enumerate(columns):
        draw_landscape(landscape, panels[0, k], "loss", chosen)
        draw_landscape(landscape, panels[1, k], "accuracy", chosen)
        panels[0, k].set_title(title)
    panels[0, 0].set_ylabel("training loss")
    panels[1, 0].set_ylabel("test accuracy %")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return figure


@_styled
def draw_landscape(landscape: Landscape, ax: Axes, what: str = "loss", tasks: slice = slice(None)) -> Figure:
    """Draw one panel of ``landscape_figure``. Bright is good: low loss (on a logarithmic scale) or high accuracy.

    :param landscape: result of ``measure_landscape``.
    :param ax: axes to draw into.
    :param what: "loss" or "accuracy".
    :param tasks: the tasks to average over.
    """
    values = np.mean(landscape.loss[tasks] if what == "loss" else landscape.accuracy[tasks], axis=0)
    values = values if what == "loss" else 100 * values
    look: dict[str, Any]
    if what == "loss":  # logarithmic, because the loss is much higher around the valley
        values = np.maximum(values, max(1e-4 * values.max(), 1e-12))
        high = max(float(values.max()), 1.001 * float(values.min()))
        look = {"levels": np.geomspace(values.min(), high, 13), "norm": LogNorm(), "cmap": "cividis_r"}
    else:
        look = {
            "levels": MaxNLocator(12, steps=[1, 2, 5, 10]).tick_values(values.min(), values.max()),
            "cmap": "cividis",
        }
    shading = ax.contourf(landscape.x, landscape.y, values, **look)
    ax.contour(landscape.x, landscape.y, values, levels=look["levels"], colors="white", linewidths=0.4)
    ticks = look["levels"][::2]
    bar = _figure_of(ax).colorbar(shading, ax=ax, shrink=0.9, ticks=ticks)
    bar.ax.set_yticks(ticks, [f"{tick:.3g}" for tick in ticks])
    bar.ax.minorticks_off()
    path = list(zip(landscape.points["base"], landscape.points["candidate"], strict=True))
    ax.plot(*path, color="white", linewidth=2.4)
    ax.plot(*path, color="black", linewidth=1.2, linestyle="--")
    names = {
        "anchor": r"$\theta^*_{t-1}$",
        "base": r"$\theta_\mathrm{GP}$",
        "candidate": r"$\hat{\theta}$",
        "merged": r"$\theta^*_t$",
    }
    for marker, (name, label) in zip("sD^*", names.items(), strict=True):
        look = {"markersize": 12 if name == "merged" else 7, "markeredgecolor": "black", "zorder": 5}
        ax.plot(*landscape.points[name], marker, color="white", label=label, **look)
    ax.set_xticks([])
    ax.set_yticks([])
    return _figure_of(ax)


# ------------------------------------------------------------------------------------------------------------ helpers


def main_labels(records: Sequence[Record], limit: int = MAX_METHODS) -> list[str]:
    """Return at most ``limit`` labels: the best merging method, its baseline and its control, then the best others.

    The labels are in the order of the records.
    """
    chosen = _by_importance(records)[:limit]
    return [label for label in by_label(records) if label in chosen]


def _by_importance(records: Sequence[Record]) -> list[str]:
    """Return all labels: the best merging method, its baseline and its control first, then the others by ACC."""
    by_key, groups = {record.key: record.label for record in records}, by_label(records)
    accs = {label: [v for run in runs if (v := METRICS["acc"].of(run)) is not None] for label, runs in groups.items()}
    best = sorted(groups, key=lambda label: -sum(accs[label]) / len(accs[label]) if accs[label] else 1)
    first: list[str] = []
    for label in [label for label in best if any(run.merges for run in groups[label])][:1]:
        references = groups[label][0].references.model_dump().values()
        first = [label, *(by_key[key] for key in references if key in by_key)]
    return list(dict.fromkeys([*first, *best]))


def _groups_to_draw(
    records: Sequence[Record], usable: Callable[[Record], bool] = lambda run: True, what: str = "accuracies"
) -> list[tuple[str, list[Record], dict[str, Any]]]:
    """Return the labels to draw, each with its usable runs that are done and its style.

    :param usable: whether a run has the data that the figure shows.
    :param what: name of that data, for the error if no run has it.
    """
    chosen = [run for run in records if run.status == "done" and len(accuracies(run)) and usable(run)]
    if not chosen:
        raise NothingToDrawError(f"none of these runs is done and has {what}")
    groups, shown, styles = by_label(chosen), main_labels(chosen), {}
    taken: set[str] = set()
    for label, style in _styles(records).items():
        if label in shown:
            if style["color"] in taken:  # there are fewer colours than labels, so choose one that is not used yet
                style = {**style, "color": next(color for color in (*COLORS, "0.5") if color not in taken)}
            taken.add(style["color"])
            styles[label] = style
    return [(label, groups[label], styles[label]) for label in shown]


def _styles(records: Sequence[Record]) -> dict[str, dict[str, Any]]:
    """Return colour, marker and line style of each label. They are assigned in the order of ``_by_importance``."""
    combinations = zip(cycle(COLORS), cycle(MARKERS), cycle(LINES), strict=False)
    return {
        label: {"color": color, "marker": marker, "linestyle": line}
        for label, (color, marker, line) in zip(_by_importance(records), combinations, strict=False)
    }


def _legend(axes: Axes, ax: Axes | None) -> None:
    """Draw the legend to the right of the axes in a new figure, and inside the axes if the caller passed ``ax``."""
    place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)} if ax is None else {}
    axes.legend(**place)


def _panels(
    records: Sequence[Record],
    ax: Axes | None,
    draw: Callable[[Axes, Sequence[Record]], None],
    xlabel: str,
    ylabel: str,
    usable: Callable[[Record], bool],
    what: str = "accuracies",
) -> Figure:
    """Draw one panel for each of at most ``MAX_PANELS`` main methods; with ``ax``, only the most important method."""
    groups = by_label(
        record for record in records if record.status == "done" and not record.is_joint and usable(record)
    )
    if not groups:
        raise NothingToDrawError(f"none of these runs is done and has {what}")
    shown = main_labels([run for runs in groups.values() for run in runs], 1 if ax is not None else MAX_PANELS)
    if ax is not None:
        figure, panels = _figure_and_axes(ax)[0], np.array([[ax]])
    else:
        figure = Figure(figsize=(max(4.2, 2.9 * len(shown)), 3.1), layout="constrained")
        panels = figure.subplots(1, len(shown), sharex=True, sharey=True, squeeze=False)
    for axes, label in zip(panels.flat, shown, strict=True):
        draw(axes, groups[label])
        axes.set_title(label)
        axes.set_xlabel(xlabel)
    panels[0, 0].set_ylabel(ylabel)
    return figure


def _figure_and_axes(ax: Axes | None) -> tuple[Figure, Axes]:
    """Return ``ax`` and its figure, or a new figure and its axes if ``ax`` is None."""
    if ax is not None:
        return _figure_of(ax), ax
    figure = Figure(figsize=(5.4, 3.2), layout="constrained")
    return figure, figure.subplots()


def _figure_of(ax: Axes) -> Figure:
    figure = ax.get_figure()
    if isinstance(figure, SubFigure):
        figure = figure.figure
    assert isinstance(figure, Figure)
    return figure


def _stack(values: Iterable[Any]) -> Values:
    return np.array(list(values), dtype=float)


def _tasks_axis(axes: Axes, name: str) -> None:
    axes.set_xlabel(name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _shades(n: int) -> Any:
    """Return ``n`` colours from dark to light, which stay ordered in grey."""
    return mpl.colormaps["viridis"](np.linspace(0.05, 0.85, max(n, 1)))


def _training(axes: Axes, runs: Sequence[Record]) -> None:
    """Draw the accuracy of each task, averaged over runs, with gaps where a run did not measure it."""
    a = 100 * _stack([accuracies(run) for run in runs]).mean(0)
    colors = _shades(len(a))
    for i in range(len(a)):
        axes.plot(range(i + 1, len(a) + 1), a[i:, i], color=colors[i], linewidth=1, marker=".", markersize=3)
    measured = a[~np.isnan(a)]
    close, shift, below = 0.05 * np.ptp(measured) if len(measured) else 0, 0, -np.inf
    ends = a[-1:].ravel()
    for i in np.argsort(ends):
        shift = shift + 5 if ends[i] - below < close else 0  # move numbers that would overlap
        place: Any = {"xytext": (4 + shift, -3), "textcoords": "offset points", "fontsize": 6}
        axes.annotate(str(i + 1), (len(a), ends[i]), color=colors[i], **place)
        below = ends[i]
    means = [a[t, : t + 1].mean() for t in range(len(a))]
    axes.plot(range(1, len(a) + 1), means, color="black", linewidth=2.2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5, min_n_ticks=1))


def _matrix(axes: Axes, runs: Sequence[Record], low: float, high: float) -> None:
    a = 100 * _stack([accuracies(run) for run in runs]).mean(0)
    ticks = [str(t) for t in range(1, len(a) + 1)]
    axes.imshow(np.tril(a) + np.triu(np.full_like(a, np.nan), 1), cmap="cividis", vmin=low, vmax=high, aspect="auto")
    size = 8 if len(a) <= 6 else 5
    cells = [(t, i) for t in range(len(a)) for i in range(t + 1)] if len(a) <= 12 else []
    for t, i in cells:
        if not np.isnan(a[t, i]):
            color = "white" if a[t, i] < (low + high) / 2 else "black"
            axes.text(i, t, f"{a[t, i]:.0f}", ha="center", va="center", fontsize=size, color=color)
    step = ceil(len(a) / 10)
    axes.set_xticks(range(0, len(a), step), ticks[::step])
    axes.set_yticks(range(0, len(a), step), ticks[::step])


def _ranks(axes: Axes, runs: Sequence[Record]) -> None:
    layers = list(runs[0].tasks[-1].ranks)
    for layer, color, marker in zip(layers, _shades(len(layers)), cycle(MARKERS), strict=False):
        values = _stack([[task.ranks.get(layer, np.nan) for task in run.tasks] for run in runs]).mean(0)
        name = layer.removesuffix(".weight")
        axes.plot(range(1, len(values) + 1), values, color=color, marker=marker, label=name, linewidth=1.2)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5, min_n_ticks=1))
    if len(layers) <= 10:
        axes.legend(fontsize=6)


def _losses(axes: Axes, run: Record, t: int) -> None:
    start = 0
    for number, stage in enumerate(run.tasks[t].stages):
        xs = range(start + 1, start + stage.epochs + 1)
        if number:
            axes.axvspan(start + 0.5, start + stage.epochs + 0.5, color="0.92", linewidth=0)
        first = number == 0
        for values, color, line, name in (
            (stage.training_loss, COLORS[0], "-", "training"),
            (stage.validation_loss, COLORS[1], "--", "validation"),
        ):
            if values:
                numbers = [np.nan if value is None else value for value in values]
                marker = "." if stage.epochs < 15 else ""
                axes.plot(xs, numbers, color=color, linestyle=line, marker=marker, label=name if first else None)
        middle = start + (stage.epochs + 1) / 2
        place: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points", "ha": "center"}
        axes.annotate(f"stage {number + 1}", (middle, 1.0), (0, 2), fontsize=7, **place)
        start += stage.epochs
    axes.set_xlim(0.5, max(start, 1) + 0.5)
    axes.set_title(f"task {t + 1}", pad=14)  # leaves space for the names of the stages
    _tasks_axis(axes, "epoch")


def _dot_plot(
    axes: Axes, rows: Sequence[Row], metric: str, styles: Mapping[str, Mapping[str, Any]] | None = None
) -> Figure:
    """Draw mean and standard deviation of each row of a table. Only the first ``MAX_METHODS`` labels are in colour."""
    unit = METRICS[metric].unit
    scale = {"percent": 100, "points": 100, "bytes": 2**-20}.get(unit, 1)
    coloured = list(styles or {})[:MAX_METHODS]
    for y, row in enumerate(rows):
        if spread := row.values[metric]:
            look = (styles or {}).get(row.label, {}) if row.label in coloured else {}
            axes.errorbar(
                scale * spread.mean,
                y,
                xerr=scale * (spread.std or 0),
                fmt=look.get("marker", "o"),
                color=look.get("color", "0.5"),
                markersize=5.5,
                capsize=2,
                linewidth=1,
            )
    counts = [f" ({row.runs} of {row.runs + sum(row.absent.values())})" if row.absent else "" for row in rows]
    axes.set_yticks(range(len(rows)), [row.label + count for row, count in zip(rows, counts, strict=True)])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(METRICS[metric].heading)
    axes.grid(axis="y", color="0.92")
    axes.set_axisbelow(True)
    return _figure_of(axes)

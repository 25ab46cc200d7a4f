"""Tables of records: the mean of each method over seeds, and what one method gains over another."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from became_avalanche.files import look_up
from became_avalanche.results.metrics import METRICS, Metric, Unit
from became_avalanche.results.record import Record, References, same_budget
from became_avalanche.results.statistics import Paired, Spread, paired

STANDARD = ("acc", "bwt", "epochs", "seconds")
"""The metrics of a table that is not told otherwise."""

SHARED = ("benchmark", "stream", "n_tasks")
"""The fields of a specification that all runs of a table have in common. ``max_epochs`` has its own check."""


@dataclass(frozen=True)
class _Format:
    """How a table prints the values of a unit."""

    width: int
    decimals: int
    scale: float = 1
    sign: str = ""
    with_std: bool = False

    def number(self, value: float, sign: str = "") -> str:
        return f"{value * self.scale:{sign}.{self.decimals}f}"

    def spread(self, spread: Spread, sign: str = "") -> str:
        std = "" if spread.std is None else f" ± {self.number(spread.std)}"
        return f"{self.number(spread.mean, sign)}{std}"

    def cell(self, spread: Spread | None) -> str:
        if spread is None:
            return "–"
        return self.spread(spread, self.sign) if self.with_std else self.number(spread.mean, self.sign)


_FORMATS: Mapping[Unit, _Format] = {
    "percent": _Format(width=15, decimals=2, scale=100, with_std=True),
    "points": _Format(width=15, decimals=2, scale=100, sign="+", with_std=True),
    "ratio": _Format(width=13, decimals=3, with_std=True),
    "count": _Format(width=7, decimals=0),
    "seconds": _Format(width=7, decimals=1),
    "bytes": _Format(width=10, decimals=2, scale=2**-20),
}


@dataclass(frozen=True)
class Row:
    """The runs of one label."""

    label: str
    values: Mapping[str, Spread | None]
    """Mean and standard deviation over the runs that are done, by metric; None where a run did not measure it."""
    runs: int
    """Number of runs that are done: the seeds behind the mean."""
    absent: Mapping[str, int]
    """Why seeds of the table are absent from the mean (``diverged``, ``failed``, ``unfinished``, ``missing``), and
    how many."""
    competes: bool
    """Whether it is ranked with the others. Joint training is not: it is an upper bound."""

    @property
    def note(self) -> str:
        """Which runs are absent from the mean, as ``gpm: 1 of 5 runs diverged``; empty if none is."""
        if not self.absent:
            return ""
        (word, number), *others = self.absent.items()
        total = self.runs + sum(self.absent.values())
        first = f"{number} of {total} run{'s' if total > 1 else ''} {word}"
        return f"{self.label}: " + ", ".join([first, *(f"{number} {word}" for word, number in others)])


@dataclass(frozen=True)
class Table:
    """One row per label, one column per metric."""

    metrics: Sequence[Metric]
    rows: Sequence[Row]

    def text(self, bold: Callable[[str], str] = str) -> str:
        """The table as text, with the best value of each ranked metric through ``bold``.

        A line below the table names each label of which runs are absent, and how many.
        """
        best = {metric.name: self._best(metric) for metric in self.metrics}
        width = max([len(row.label) for row in self.rows] + [6])
        widths = {metric.name: max(_FORMATS[metric.unit].width, len(metric.heading)) for metric in self.metrics}
        headings = [f"{metric.heading:>{widths[metric.name]}}" for metric in self.metrics]
        lines = ["  ".join([f"{'method':{width}}", *headings])]
        for row in self.rows:
            cells = [f"{row.label:{width}}"]
            for metric in self.metrics:
                value = row.values[metric.name]
                cell = f"{_FORMATS[metric.unit].cell(value):>{widths[metric.name]}}"
                wins = row.competes and value is not None and value.mean == best[metric.name]
                cells.append(bold(cell) if wins else cell)
            lines.append("  ".join(cells))
        return "\n".join([*lines, *(row.note for row in self.rows if row.note)])

    def csv(self) -> str:
        """The table as CSV: fractions, counts, seconds and bytes with six digits, empty where nothing was measured."""
        names = ["method"]
        for metric in self.metrics:
            with_std = _FORMATS[metric.unit].with_std
            names += [f"{metric.name}_mean", f"{metric.name}_std"] if with_std else [metric.name]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*names, "runs", "absent"])
        for row in self.rows:
            numbers: list[float | None] = []
            for metric in self.metrics:
                value = row.values[metric.name]
                mean, std = (value.mean, value.std) if value else (None, None)
                numbers += [mean, std] if _FORMATS[metric.unit].with_std else [mean]
            cells = ["" if number is None else f"{number:.6g}" for number in numbers]
            writer.writerow([row.label, *cells, row.runs, sum(row.absent.values())])
        return text.getvalue()

    def _best(self, metric: Metric) -> float | None:
        means = [value.mean for row in self.rows if row.competes and (value := row.values[metric.name])]
        if not means or metric.direction is None:
            return None
        return max(means) if metric.direction == "higher" else min(means)


def table(records: Iterable[Record], metrics: Sequence[str] = STANDARD, order: Sequence[str] | None = None) -> Table:
    """The mean of each label over seeds.

    Only runs that are done are averaged. The table says which seeds are absent: runs that diverged, failed or are
    unfinished, and seeds that other labels have.

    :param records: runs with one budget on one benchmark; a ValueError says which two are not comparable.
    :param metrics: names of metrics, in the order of the columns.
    :param order: labels in the order of the rows; other labels follow. By default the order of the records.
    """
    records = in_order(records, order or ())
    check_comparable(records)
    columns = [look_up("metric", name, METRICS) for name in metrics]
    seeds = {record.seed for record in records}
    return Table(columns, [_row(label, runs, columns, seeds) for label, runs in by_label(records).items()])


def _row(label: str, runs: Sequence[Record], metrics: Sequence[Metric], seeds: set[int]) -> Row:
    done = [run for run in runs if run.status == "done"]
    words = ["unfinished" if run.status == "running" else run.status for run in runs if run.status != "done"]
    words += ["missing"] * (len(seeds) - len(runs))
    values = {metric.name: _spread([metric.of(run) for run in done]) for metric in metrics}
    return Row(label, values, len(done), Counter(words), competes=not any(run.is_joint for run in runs))


def _spread(values: Sequence[float | None]) -> Spread | None:
    """None unless each run has a value: a mean over fewer seeds than the row counts would mislead."""
    measured = [value for value in values if value is not None]
    return Spread.of(measured) if measured and len(measured) == len(values) else None


@dataclass(frozen=True)
class Gain:
    """What one label gains over another in one metric, seed by seed."""

    label: str
    over: str
    metric: Metric
    paired: Paired

    def text(self, interval: bool = True) -> str:
        """As ``gpm+became over gpm: +0.72 ± 0.45 points of ACC (95 % interval +0.16 to +1.28, p = 0.06, 5 seeds)``.

        One seed has neither interval nor p. Two seeds have no p in the text: a sign flip gives 0.5 or 1, whatever the
        gains are. Five seeds give 0.06 at best, six are the fewest that can reach 0.05.

        :param interval: whether to add what is in parentheses.
        """
        style, gain = _FORMATS[self.metric.unit], self.paired.gain
        name = self.metric.title
        unit = f"points of {name}" if self.metric.unit in ("percent", "points") else name
        line = f"{self.label} over {self.over}: {style.spread(gain, '+')} {unit}"
        if not interval or self.paired.interval is None or self.paired.p is None:
            return line
        low, high = (style.number(bound, "+") for bound in self.paired.interval)
        p, digits = self.paired.p, ".2f" if self.paired.p >= 0.01 else ".1g"
        details = [f"95 % interval {low} to {high}", *([f"p = {p:{digits}}"] if gain.n > 2 else []), f"{gain.n} seeds"]
        return f"{line} ({', '.join(details)})"


def gains(records: Iterable[Record], metric: str = "acc") -> list[Gain]:
    """The gain of each label over its baseline and over its control, paired by the keys that its records name.

    A pair counts if both runs are in ``records`` and done. A label without any pair has no gain.
    """
    records = list(records)
    check_comparable(records)
    by_key = {record.key: record for record in records}
    found: dict[tuple[str, str], Gain] = {}
    for label, runs in by_label(records).items():
        for kind in References.model_fields:
            others = [(run, by_key.get(getattr(run.references, kind))) for run in runs]
            for over in dict.fromkeys(other.label for _, other in others if other):
                pairs = [(run, other) for run, other in others if other and other.label == over]
                if (label, over) not in found and (gain := _gain(label, over, pairs, metric)):
                    found[label, over] = gain
    return list(found.values())


def gains_over(records: Iterable[Record], label: str, metric: str = "acc") -> list[Gain]:
    """The gain of every other label over one label, paired by seed."""
    records = list(records)
    check_comparable(records)
    labels = by_label(records)
    theirs = {run.seed: run for run in look_up("label", label, labels)}
    return [
        gain
        for ours, runs in labels.items()
        if ours != label
        and (gain := _gain(ours, label, [(run, theirs[run.seed]) for run in runs if run.seed in theirs], metric))
    ]


def _gain(label: str, over: str, pairs: Iterable[tuple[Record, Record]], metric: str) -> Gain | None:
    chosen = look_up("metric", metric, METRICS)
    values = [(chosen.of(our), chosen.of(their)) for our, their in pairs]
    measured = [(our, their) for our, their in values if our is not None and their is not None]
    if not measured:
        return None
    ours, theirs = zip(*measured, strict=True)
    return Gain(label, over, chosen, paired(ours, theirs))


def text_gains(gains: Iterable[Gain], interval: bool = True) -> str:
    """The gains as text, one per line.

    :param interval: whether to add the 95 % interval, p and the number of seeds.
    """
    return "\n".join(gain.text(interval) for gain in gains)


def in_order(records: Iterable[Record], labels: Sequence[str]) -> list[Record]:
    """The records of ``labels`` in that order, then all others, each label by seed."""
    place = {label: index for index, label in enumerate(labels)}
    groups = by_label(records)
    return [run for label in sorted(groups, key=lambda label: place.get(label, len(place))) for run in groups[label]]


def by_label(records: Iterable[Record]) -> dict[str, list[Record]]:
    """The records of each label by seed; the labels in the order of the records."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.label, []).append(record)
    return {label: sorted(runs, key=lambda run: run.seed) for label, runs in groups.items()}


def check_comparable(records: Sequence[Record]) -> None:
    """Raise a ValueError that names two runs and the fields in which they differ if a table would mix settings.

    Runs of one label may differ in the seed only. Runs of different labels share benchmark, stream and budget; network,
    recipe and method are their own.
    """
    for label, runs in by_label(records).items():
        for run, following in pairwise(runs):
            _check_same(run, following, (run.spec.keys() | following.spec.keys()) - {"seed"}, f"averaged as {label!r}")
            if run.seed == following.seed:
                raise ValueError(
                    f"the runs {run.key} and {following.key} are the same run of {label!r}, seed {run.seed}: "
                    "leave one of them out"
                )
    for record in records[1:]:
        _check_same(records[0], record, SHARED, "compared in one table")
    for limited in [record for record in records if record.spec["max_epochs"] is not None][:1]:
        for record in records:
            if not same_budget(limited.spec, record.spec):
                _check_same(limited, record, ("max_epochs",), "compared in one table")


def _check_same(first: Record, second: Record, fields: Iterable[str], purpose: str) -> None:
    differences = [
        difference
        for field in sorted(fields)
        for difference in _differences(field, first.spec.get(field), second.spec.get(field))
    ]
    if differences:
        raise ValueError(
            f"the runs {first.key} and {second.key} cannot be {purpose}: they differ in {', '.join(differences)}. "
            "Leave one of them out, or give it another label if only its method or recipe differs"
        )


def _differences(field: str, first: Any, second: Any) -> list[str]:
    """The fields below ``field`` with different values, as ``recipe.batch_size (32 and 64)``."""
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        names = [*first, *(name for name in second if name not in first)]
        return [d for name in names for d in _differences(f"{field}.{name}", first.get(name), second.get(name))]
    return [] if first == second else [f"{field} ({first!r} and {second!r})"]


def budget(spec: Mapping[str, Any]) -> str:
    """To what a specification is scaled down, as ``3 of 10 tasks, at most 20 epochs per stage``; empty if it is not."""
    parts = []
    if spec["n_tasks"] < spec["stream"]["n_tasks"]:
        parts.append(f"{spec['n_tasks']} of {spec['stream']['n_tasks']} tasks")
    if spec["max_epochs"] is not None:
        parts.append(f"at most {spec['max_epochs']} epoch{'s' if spec['max_epochs'] > 1 else ''} per stage")
    return ", ".join(parts)

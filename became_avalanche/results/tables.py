"""Tables of records: the mean of each method over seeds, and what one method gains over another."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import nan
from typing import Any

from became_avalanche.files import look_up
from became_avalanche.results.metrics import METRICS, Metric, Unit
from became_avalanche.results.published import differences, published
from became_avalanche.results.record import Record, References, same_budget
from became_avalanche.results.statistics import Paired, Spread, paired

STANDARD = ("acc", "bwt", "epochs", "seconds")
"""The metrics of a table that is not told otherwise."""

SHARED = ("benchmark", "stream", "n_tasks")
"""The fields of a specification that all runs of a table have in common. ``max_epochs`` has its own check."""


@dataclass(frozen=True)
class Format:
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


FORMATS: Mapping[Unit, Format] = {
    "percent": Format(width=15, decimals=2, scale=100, with_std=True),
    "points": Format(width=15, decimals=2, scale=100, sign="+", with_std=True),
    "ratio": Format(width=13, decimals=3, with_std=True),
    "count": Format(width=7, decimals=0),
    "seconds": Format(width=7, decimals=1),
    "bytes": Format(width=10, decimals=2, scale=2**-20),
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
    by_seed: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """By metric and seed, the value of each run that is done and measured it."""
    gains: Mapping[str, Gain] = field(default_factory=dict)
    """The gain over its ``baseline`` and over its ``control``, where there is one."""
    published: Mapping[str, Spread] = field(default_factory=dict)
    """What the paper publishes for it, by metric."""

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
class _Column:
    """A column of a printed table."""

    heading: str
    cells: Sequence[str]
    ranks: Sequence[int | None]
    """1 for the best and for what ties with it, 2 for the second, None for the others."""
    width: int = 0
    """The least width in a text."""


@dataclass(frozen=True)
class Table:
    """One row per label, one column per metric, and the paper's figures beside those that it publishes."""

    metrics: Sequence[Metric]
    rows: Sequence[Row]
    difference: str = ""
    """In what the runs differ from those of the published figures; empty if in nothing or without such figures."""

    def text(self, bold: Callable[[str], str] = str, underline: Callable[[str], str] = str) -> str:
        """The table as text, with the best value of each ranked metric through ``bold``, the second ``underline``.

        A line below the table names each label of which runs are absent, and how many.
        """
        styles: dict[int | None, Callable[[str], str]] = {1: bold, 2: underline, None: str}
        labels = [row.label for row in self.rows]
        width = max([len(label) for label in labels] + [6])
        lines = [[f"{text:{width}}" for text in ("method", *labels)]]
        for column in self._columns():
            wide = max(map(len, [column.heading, " " * column.width, *column.cells]))
            cells = [styles[rank](f"{cell:>{wide}}") for cell, rank in zip(column.cells, column.ranks, strict=True)]
            lines.append([f"{column.heading:>{wide}}", *cells])
        return "\n".join(["  ".join(line) for line in zip(*lines, strict=True)] + self.notes())

    def markdown(self) -> str:
        """The table for a Markdown page, with the gains as columns; best values bold, second ones underlined."""
        columns = [*self._columns(), *self._gain_columns()]
        lines = ["| method | " + " | ".join(column.heading for column in columns) + " |"]
        lines.append("| --- |" + " ---: |" * len(columns))
        styles = {1: "**{}**", 2: "<u>{}</u>", None: "{}"}
        for k, row in enumerate(self.rows):
            cells = [styles[column.ranks[k]].format(column.cells[k]) for column in columns]
            lines.append("| " + " | ".join([row.label.replace("|", "\\|"), *cells]) + " |")
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes(explain=True))])

    def latex(self, caption: str = "") -> str:
        """The table for a paper, with the gains as columns. It needs ``\\usepackage{booktabs}``.

        :param caption: what to write above it, as plain text.
        """
        columns = [*self._columns(), *self._gain_columns()]
        styles = {1: r"\textbf{%s}", 2: r"\underline{%s}", None: "%s"}
        lines = [" & ".join(["method", *(_tex(column.heading) for column in columns)]) + r" \\", r"\midrule"]
        for k, row in enumerate(self.rows):
            cells = [styles[column.ranks[k]] % _tex(column.cells[k]) for column in columns]
            lines.append(" & ".join([_tex(row.label), *cells]) + r" \\")
        return "\n".join(
            [
                r"% needs \usepackage{booktabs}",
                r"\begin{table}",
                r"\centering\small\setlength{\tabcolsep}{4pt}",
                *([rf"\caption{{{_tex(caption)}}}"] if caption else []),
                rf"\begin{{tabular}}{{l{'r' * len(columns)}}}",
                r"\toprule",
                *lines,
                r"\bottomrule",
                r"\end{tabular}",
                *(rf"\par\smallskip{{\footnotesize {_tex(note)}}}" for note in self.notes(explain=True)),
                r"\end{table}",
            ]
        )

    def csv(self) -> str:
        """The table as CSV: fractions, counts, seconds and bytes with six digits, empty where nothing was measured."""
        names = ["method"]
        for metric in self.metrics:
            with_std = FORMATS[metric.unit].with_std
            names += [f"{metric.name}_mean", f"{metric.name}_std"] if with_std else [metric.name]
        shown = self._published()
        names += [f"published_{metric.name}_{part}" for metric in shown for part in ("mean", "std")]
        kinds = self._kinds()
        names += [f"gain_over_{kind}{part}" for kind in kinds for part in ("", "_low", "_high")]
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow([*names, "runs", "absent"])
        for row in self.rows:
            numbers: list[float | None] = []
            for metric in self.metrics:
                value = row.values[metric.name]
                mean, std = (value.mean, value.std) if value else (None, None)
                numbers += [mean, std] if FORMATS[metric.unit].with_std else [mean]
            for metric in shown:
                value = row.published.get(metric.name)
                numbers += [value.mean, value.std] if value else [None, None]
            for kind in kinds:
                gain = row.gains.get(kind)
                numbers += [gain.paired.gain.mean, *(gain.paired.interval or (None, None))] if gain else [None] * 3
            cells = ["" if number is None else f"{number:.6g}" for number in numbers]
            writer.writerow([row.label, *cells, row.runs, sum(row.absent.values())])
        return text.getvalue()

    def notes(self, explain: bool = False) -> list[str]:
        """What is said below the table: which runs are absent, and how the paper's figures differ.

        :param explain: whether to say what the marks mean.
        """
        notes = [row.note for row in self.rows if row.note]
        if self._published() and self.difference:
            notes.append(f"* The paper's figures have another budget. Ours: {self.difference}.")
        if explain and any(rank for column in self._columns() for rank in column.ranks):
            notes.append(
                "Best in bold, second underlined. Two methods tie if the 95 % interval of their paired difference "
                "contains zero."
            )
        return notes

    def ranks(self, metric: Metric) -> list[int | None]:
        """For each row 1 if it is the best or ties with it, 2 if it is the second or ties with that, otherwise None.

        Two rows tie if the 95 % interval of their paired difference contains zero. A single seed has no interval, so
        only equal values tie. A metric without direction has no ranks.
        """
        ranks: dict[str, int] = {}
        left = [row for row in self.rows if row.competes and row.values[metric.name]]
        if metric.direction is not None:
            sign = 1 if metric.direction == "higher" else -1
            left.sort(key=lambda row: -sign * _mean_of(row, metric))
            for rank in (1, 2):
                tied = [row for row in left if _tie(left[0], row, metric)]
                ranks.update({row.label: rank for row in tied})
                left = [row for row in left if row not in tied]
        return [ranks.get(row.label) for row in self.rows]

    def _columns(self) -> list[_Column]:
        columns, shown = [], self._published()
        for metric in self.metrics:
            style = FORMATS[metric.unit]
            cells = [style.cell(row.values[metric.name]) for row in self.rows]
            columns.append(_Column(metric.heading, cells, self.ranks(metric), style.width))
            if metric in shown:
                star = "*" if self.difference else ""
                cells = [
                    style.cell(spread := row.published.get(metric.name)) + (star if spread else "") for row in self.rows
                ]
                columns.append(_Column(f"paper {metric.heading}", cells, [None] * len(cells)))
        return columns

    def _gain_columns(self) -> list[_Column]:
        words = {"baseline": "over baseline", "control": "over 2x"}
        columns = []
        for kind in self._kinds():
            gains = [row.gains.get(kind) for row in self.rows]
            title = next(gain.metric.title for gain in gains if gain)
            cells = ["–" if gain is None else gain.short() for gain in gains]
            columns.append(_Column(f"{title} {words[kind]}", cells, [None] * len(cells)))
        return columns

    def _kinds(self) -> list[str]:
        return [kind for kind in References.model_fields if any(kind in row.gains for row in self.rows)]

    def _published(self) -> list[Metric]:
        return [metric for metric in self.metrics if any(metric.name in row.published for row in self.rows)]


def _mean_of(row: Row, metric: Metric) -> float:
    value = row.values[metric.name]
    return nan if value is None else value.mean


def _tie(first: Row, second: Row, metric: Metric) -> bool:
    ours, theirs = first.by_seed[metric.name], second.by_seed[metric.name]
    seeds = ours.keys() & theirs.keys()
    interval = paired([ours[s] for s in seeds], [theirs[s] for s in seeds]).interval if seeds else None
    equal = _mean_of(first, metric) == _mean_of(second, metric)
    return equal if interval is None else interval[0] <= 0 <= interval[1]


_TEX = {
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
    **{"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"},
    **{"±": r"$\pm$", "–": "--", "λ": r"$\lambda$"},
}
_SIGNED = re.compile(r"(?<![\w.])[-+](?=\d)")


def _tex(text: str) -> str:
    """Plain text as LaTeX; the signs of numbers in mathematical mode, where a minus has the right width."""
    escaped = "".join(_TEX.get(sign, sign) for sign in text)
    return _SIGNED.sub(lambda match: f"${match.group()}$", escaped)


def table(
    records: Iterable[Record],
    metrics: Sequence[str] = STANDARD,
    order: Sequence[str] | None = None,
    *,
    with_published: bool = False,
) -> Table:
    """The mean of each label over seeds, and its gains in the first of the metrics.

    Only runs that are done are averaged. The table says which seeds are absent: runs that diverged, failed or are
    unfinished, and seeds that other labels have.

    :param records: runs with one budget on one benchmark; a ValueError says which two are not comparable.
    :param metrics: names of metrics, in the order of the columns.
    :param order: labels in the order of the rows; other labels follow. By default the order of the records.
    :param with_published: whether to show the paper's figures where it has some.
    """
    records = in_order(records, order or ())
    check_comparable(records)
    columns = [look_up("metric", name, METRICS) for name in metrics]
    seeds = {record.seed for record in records}
    all_gains = gains(records, metrics[0]) if metrics else []
    rows = []
    for label, runs in by_label(records).items():
        row = _row(label, runs, columns, seeds)
        own = {gain.kind: gain for gain in reversed(all_gains) if gain.label == label}
        rows.append(replace(row, gains=own, published=published(runs[0]) if with_published else {}))
    return Table(columns, rows, ", ".join(differences(records, longest_budget(records))) if records else "")


def _row(label: str, runs: Sequence[Record], metrics: Sequence[Metric], seeds: set[int]) -> Row:
    done = [run for run in runs if run.status == "done"]
    words = ["unfinished" if run.status == "running" else run.status for run in runs if run.status != "done"]
    words += ["missing"] * (len(seeds) - len(runs))
    by_seed = {
        metric.name: {run.seed: value for run in done if (value := metric.of(run)) is not None} for metric in metrics
    }
    values = {name: _spread(own, len(done)) for name, own in by_seed.items()}
    return Row(label, values, len(done), Counter(words), not any(run.is_joint for run in runs), by_seed)


def _spread(by_seed: Mapping[int, float], runs: int) -> Spread | None:
    """None unless each run has a value: a mean over fewer seeds than the row counts would mislead."""
    return Spread.of(list(by_seed.values())) if by_seed and len(by_seed) == runs else None


@dataclass(frozen=True)
class Gain:
    """What one label gains over another in one metric, seed by seed."""

    label: str
    over: str
    metric: Metric
    paired: Paired
    kind: str = ""
    """``baseline`` or ``control`` if it is a gain over the reference of its records."""

    def short(self) -> str:
        """As ``+0.72 [+0.16, +1.28]``, with the 95 % interval if there is more than one seed."""
        style = FORMATS[self.metric.unit]
        interval = self.paired.interval and ", ".join(style.number(bound, "+") for bound in self.paired.interval)
        return style.number(self.paired.gain.mean, "+") + (f" [{interval}]" if interval else "")

    def text(self, interval: bool = True) -> str:
        """As ``gpm+became over gpm: +0.72 ± 0.45 points of ACC (95 % interval +0.16 to +1.28, p = 0.06, 5 seeds)``.

        One seed has neither interval nor p. Two seeds have no p in the text: a sign flip gives 0.5 or 1, whatever the
        gains are. Five seeds give 0.06 at best, six are the fewest that can reach 0.05.

        :param interval: whether to add what is in parentheses.
        """
        style, gain = FORMATS[self.metric.unit], self.paired.gain
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
                if (label, over) not in found and (gain := _gain(label, over, pairs, metric, kind)):
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


def _gain(label: str, over: str, pairs: Iterable[tuple[Record, Record]], metric: str, kind: str = "") -> Gain | None:
    chosen = look_up("metric", metric, METRICS)
    values = [(chosen.of(our), chosen.of(their)) for our, their in pairs]
    measured = [(our, their) for our, their in values if our is not None and their is not None]
    if not measured:
        return None
    ours, theirs = zip(*measured, strict=True)
    return Gain(label, over, chosen, paired(ours, theirs), kind)


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


def in_families(records: Iterable[Record]) -> list[Record]:
    """The records with each method, its control and its merges together, and joint training last."""

    def place(record: Record) -> tuple[bool, str, bool, bool, str]:
        base, merge, _ = record.method.partition("+")
        return record.is_joint, base.removesuffix("-2x"), bool(merge), base.endswith("-2x"), record.label

    return sorted(records, key=place)


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
    """The fields below ``field`` with different values, as ``recipe.batch_size (32 and 64)``.

    A label decides no number. Records have all options of plugins, so an option that only one of the runs has is newer
    than the other run.
    """
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        common = field in ("method.options", "method.merge.options")
        names = [name for name in first if name in second or not common]
        names += [name for name in second if name not in first and not common]
        if field == "method":
            names = [name for name in names if name != "label"]
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


def longest_budget(records: Iterable[Record]) -> str:
    """What ``budget`` says about runs with one budget; those whose recipe is short enough have no limit of epochs."""
    return max((budget(record.spec) for record in records), key=len, default="")


def comparisons(records: Iterable[Record]) -> list[list[Record]]:
    """The records in groups that a table can compare: one benchmark and one budget each, in the order of the records.

    Runs of joint training on fewer tasks than the others, which IM needs, are in no group.
    """
    groups: list[list[Record]] = []
    for record in records:
        for group in groups:
            if all(record.spec[name] == group[0].spec[name] for name in SHARED) and all(
                same_budget(record.spec, other.spec) for other in group
            ):
                group.append(record)
                break
        else:
            groups.append([record])
    longest = {record.benchmark: 0 for group in groups for record in group}
    for group in groups:
        if not all(record.is_joint for record in group):
            longest[group[0].benchmark] = max(longest[group[0].benchmark], group[0].spec["n_tasks"])
    return [
        group
        for group in groups
        if not (all(record.is_joint for record in group) and group[0].spec["n_tasks"] < longest[group[0].benchmark])
    ]

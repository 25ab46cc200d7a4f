"""Tables of records: the mean of each method over seeds, and the gains of one method over another."""

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
"""Default metrics of a table."""

SHARED = ("benchmark", "stream", "n_tasks")
"""Fields of a specification that must be equal for all runs of a table. ``max_epochs`` is checked separately."""


@dataclass(frozen=True)
class Format:
    """Format of the values of a unit in tables."""

    width: int
    decimals: int
    scale: float = 1
    sign: str = ""
    with_std: bool = False

    def number(self, value: float, sign: str = "") -> str:
        """Return a number as text, with its plus sign if ``sign`` is "+"."""
        return f"{value * self.scale:{sign}.{self.decimals}f}"

    def spread(self, spread: Spread, sign: str = "") -> str:
        """Return mean ± standard deviation as text; only the mean for a single seed."""
        std = "" if spread.std is None else f" ± {self.number(spread.std)}"
        return f"{self.number(spread.mean, sign)}{std}"

    def cell(self, spread: Spread | None) -> str:
        """Return the text of a table cell; a dash if there is no value."""
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
    """The runs of one label, as one row of a table."""

    label: str
    values: Mapping[str, Spread | None]
    """Mean and standard deviation over the runs that are done, by metric; None if one of them lacks the metric."""
    runs: int
    """Number of runs that are done, which is the number of seeds in the mean."""
    absent: Mapping[str, int]
    """Number of seeds that are not part of the mean, by reason: ``diverged``, ``failed``, ``unfinished`` or
    ``missing``."""
    competes: bool
    """Whether the row is ranked. Joint training is not, because it is an upper bound."""
    by_seed: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    """Value of each run that is done and measured the metric, by metric and seed."""
    gains: Mapping[str, Gain] = field(default_factory=dict)
    """Gains over the ``baseline`` and over the ``control`` of the method, if they exist."""
    published: Mapping[str, Spread] = field(default_factory=dict)
    """Results published in the paper, by metric."""

    @property
    def note(self) -> str:
        """Runs that are not part of the mean, such as ``gpm: 1 of 5 runs diverged``; empty if all are."""
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
    """For each cell: 1 for the best value and its ties, 2 for the second best and its ties, None otherwise."""
    width: int = 0
    """Minimum width in a text table."""


@dataclass(frozen=True)
class Table:
    """A table with one row per label and one column per metric. The paper's results, if any, are next to ours."""

    metrics: Sequence[Metric]
    rows: Sequence[Row]
    difference: str = ""
    """How the runs differ from the paper's, in words; empty if they do not differ or the paper has no results."""

    def text(self, bold: Callable[[str], str] = str, underline: Callable[[str], str] = str) -> str:
        """Return the table as text. Lines below it say which labels have runs that are not part of the mean.

        :param bold: how to mark the best value of each ranked metric.
        :param underline: how to mark the second best value.
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
        """Return the table as Markdown, with the gains as columns. Best values are bold, second best are underlined."""
        columns = [*self._columns(), *self._gain_columns()]
        lines = ["| method | " + " | ".join(column.heading for column in columns) + " |"]
        lines.append("| --- |" + " ---: |" * len(columns))
        styles = {1: "**{}**", 2: "<u>{}</u>", None: "{}"}
        for k, row in enumerate(self.rows):
            cells = [styles[column.ranks[k]].format(column.cells[k]) for column in columns]
            lines.append("| " + " | ".join([row.label.replace("|", "\\|"), *cells]) + " |")
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes(explain=True))])

    def latex(self, caption: str = "") -> str:
        """Return the table as LaTeX, with the gains as columns. It needs ``\\usepackage{booktabs}``.

        :param caption: caption above the table, as plain text.
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
        """Return the table as CSV with six digits. Accuracies are fractions; cells without a value are empty."""
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
        """Return the notes below the table: which runs are not part of the mean, and how the paper's runs differ.

        :param explain: whether to explain bold and underlined values.
        """
        notes = [row.note for row in self.rows if row.note]
        if self._published() and self.difference:
            notes.append(f"* The paper's runs differ. Ours: {self.difference}.")
        if explain and any(rank for column in self._columns() for rank in column.ranks):
            notes.append(
                "Best in bold, second underlined. Two methods tie if the 95 % interval of their paired difference "
                "contains zero."
            )
        return notes

    def ranks(self, metric: Metric) -> list[int | None]:
        """Return the rank of each row: 1 for the best and its ties, 2 for the second best and its ties, None otherwise.

        Two rows tie if the 95 % interval of their paired difference contains zero. With a single seed there is no
        interval, and only equal values tie. A metric without a direction has no ranks.
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
    """Return plain text as LaTeX. Signs of numbers are set in math mode, where a minus has the right width."""
    escaped = "".join(_TEX.get(sign, sign) for sign in text)
    return _SIGNED.sub(lambda match: f"${match.group()}$", escaped)


def table(
    records: Iterable[Record],
    metrics: Sequence[str] = STANDARD,
    order: Sequence[str] | None = None,
    *,
    with_published: bool = False,
) -> Table:
    """Return the mean of each label over seeds, and its gains in the first metric.

    Only runs that are done are averaged. The table notes which runs are not part of the mean: those that diverged,
    failed or are unfinished, and those that are missing for a seed that other labels have.

    :param records: runs with the same budget on one benchmark. Raises a ValueError that names two runs if they cannot
        be compared.
    :param metrics: names of metrics, in the order of the columns.
    :param order: labels in the order of the rows; all other labels follow (default: the order of the records).
    :param with_published: whether to show the paper's results where it has some.
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
    """Return mean and standard deviation; None unless every run has a value, since the row counts all runs."""
    return Spread.of(list(by_seed.values())) if by_seed and len(by_seed) == runs else None


@dataclass(frozen=True)
class Gain:
    """Gain of one label over another in one metric, paired by seed."""

    label: str
    over: str
    metric: Metric
    paired: Paired
    kind: str = ""
    """``baseline`` or ``control`` if ``over`` is that reference of the label; empty otherwise."""

    def short(self) -> str:
        """Return the gain as ``+0.72 [+0.16, +1.28]``, with the 95 % interval if there is more than one seed."""
        style = FORMATS[self.metric.unit]
        interval = self.paired.interval and ", ".join(style.number(bound, "+") for bound in self.paired.interval)
        return style.number(self.paired.gain.mean, "+") + (f" [{interval}]" if interval else "")

    def text(self, interval: bool = True) -> str:
        """Return the gain as a line of text.

        Example: ``gpm+became over gpm: +0.72 ± 0.45 points of ACC (95 % interval +0.16 to +1.28, p = 0.06, 5 seeds)``.
        With one seed there is neither an interval nor p. With two seeds p is omitted: the sign-flip test can only give
        0.5 or 1. The smallest possible p is 0.06 with five seeds; at least six are needed for p < 0.05.

        :param interval: whether to add the part in parentheses.
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
    """Return the gain of each label over its baseline and over its control.

    Each record names the keys of the runs that it is paired with. A pair counts if both runs are in ``records`` and
    done. A label without any pair has no gain.
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
    """Return the gain of every other label over ``label``, paired by seed."""
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
    """Return the gains as text, one per line.

    :param interval: whether to add the 95 % interval, p and the number of seeds.
    """
    return "\n".join(gain.text(interval) for gain in gains)


def in_order(records: Iterable[Record], labels: Sequence[str]) -> list[Record]:
    """Sort records: first those of ``labels`` in that order, then all others; the runs of each label by seed."""
    place = {label: index for index, label in enumerate(labels)}
    groups = by_label(records)
    return [run for label in sorted(groups, key=lambda label: place.get(label, len(place))) for run in groups[label]]


def in_families(records: Iterable[Record]) -> list[Record]:
    """Sort records so that each method, its control and its merges are together, and joint training is last."""

    def place(record: Record) -> tuple[bool, str, bool, bool, str]:
        base, merge, _ = record.method.partition("+")
        return record.is_joint, base.removesuffix("-2x"), bool(merge), base.endswith("-2x"), record.label

    return sorted(records, key=place)


def by_label(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Group records by label, in the order of the records; the runs of each label are sorted by seed."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.label, []).append(record)
    return {label: sorted(runs, key=lambda run: run.seed) for label, runs in groups.items()}


def check_comparable(records: Sequence[Record]) -> None:
    """Raise a ValueError if the runs cannot be shown in one table. It names two runs and the fields that differ.

    Runs of one label may differ only in the seed. Runs of different labels must have the same benchmark, stream and
    budget, but may differ in network, recipe and method.
    """
    for label, runs in by_label(records).items():
        for run, following in pairwise(runs):
            _check_same(run, following, (run.spec.keys() | following.spec.keys()) - {"seed"}, f"averaged as {label!r}")
            if run.seed == following.seed:
                raise ValueError(
                    f"the runs {run.key} and {following.key} are both {label!r} with seed {run.seed}: "
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
    """Return the fields below ``field`` that have different values, such as ``recipe.batch_size (32 and 64)``.

    Labels are ignored, since they have no influence on results. Options of plugins that only one of the runs has are
    ignored too: records contain all options, so such an option was added to the package after the other run.
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
    """Return a reduced budget in words, such as ``3 of 10 tasks, at most 20 epochs per stage``; empty if it is full."""
    parts = []
    if spec["n_tasks"] < spec["stream"]["n_tasks"]:
        parts.append(f"{spec['n_tasks']} of {spec['stream']['n_tasks']} tasks")
    if spec["max_epochs"] is not None:
        parts.append(f"at most {spec['max_epochs']} epoch{'s' if spec['max_epochs'] > 1 else ''} per stage")
    return ", ".join(parts)


def longest_budget(records: Iterable[Record]) -> str:
    """Return ``budget`` of runs with the same budget, from a run that states the limit of epochs if there is one."""
    return max((budget(record.spec) for record in records), key=len, default="")


def comparisons(records: Iterable[Record]) -> list[list[Record]]:
    """Group records that one table can compare: one benchmark and one budget per group, in the order of the records.

    Runs of joint training on the first few tasks, which only IM needs, are left out.
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

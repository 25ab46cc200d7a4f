"""A report of a study as one HTML page, which needs neither network nor server. Writing it does not need torch.

The page is ``page/page.html``, a Jinja template with ``page.css`` and ``page.js`` embedded. Records are untrusted, so
every value goes through Jinja's escaping. Data for the charts are embedded as JSON in which no character can end a tag.
The script builds elements and never parses HTML. The content security policy of the page allows this one script and
this one style sheet, and forbids all requests.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from became_avalanche.results.metrics import METRICS, Metric
from became_avalanche.results.record import SPEC_SCHEMA, Record, RecordError, References, last_line
from became_avalanche.results.statistics import Spread
from became_avalanche.results.tables import (
    FORMATS,
    STANDARD,
    Gain,
    Row,
    by_label,
    comparisons,
    gains,
    longest_budget,
    table,
)

PAGE = Path(__file__).parent / "page"
SHOWN = 8
"""Largest number of methods drawn when the page opens; the reader can choose others."""
ERROR_CHARACTERS = 4000
"""Number of characters shown of a traceback, counted from its end."""


def report(records: Iterable[Record], title: str) -> str:
    """Return a report of runs as the text of one HTML page.

    Runs that cannot be compared in one table (another benchmark, stream or budget) get separate sections.

    >>> from became_avalanche import Record, report
    >>> spec = {"benchmark": "demo", "seed": 0, "n_tasks": 2, "max_epochs": None, "recipe": {"epochs": 5},
    ...         "stream": {"n_tasks": 2}, "network": {"name": "mlp"}}
    >>> accuracy = {"test": [[0.9, None], [0.8, 0.7]]}
    >>> run = Record(key="demo", spec=spec, method="gpm", label="gpm", status="done", accuracy=accuracy)
    >>> page = report([run], "My study")
    >>> "gpm has the highest ACC, 75.00 %" in page
    True

    :param records: the runs, in the order of the methods. Raises a RecordError if there are none, or if two runs of one
        label have different settings.
    :param title: title of the page.
    """
    sections = [Section(runs) for runs in comparisons(records)]
    if not sections:
        raise RecordError(f"{title} has no runs to report")
    script, style = ((PAGE / name).read_text(encoding="utf-8") for name in ("page.js", "page.css"))
    environment = Environment(
        loader=FileSystemLoader(PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("page.html").render(
        title=title,
        sections=sections,
        data=_script_data([section.charts() for section in sections]),
        standard=STANDARD,
        values=_values,
        specification=_specification,
        last_line=last_line,
        error_characters=ERROR_CHARACTERS,
        script=Markup(script),
        style=Markup(style),
        script_hash=_csp_hash(script),
        style_hash=_csp_hash(style),
    )


class Section:
    """The runs of one benchmark, stream and budget, as the page shows them."""

    def __init__(self, records: Sequence[Record]) -> None:
        self.records, self.labels = records, by_label(records)
        try:
            everything = table(
                records, [*STANDARD, *(name for name in METRICS if name not in STANDARD)], with_published=True
            )
        except ValueError as error:
            raise RecordError(f"{error}. To choose runs of a folder, pass a study file instead") from None
        measured = [m for m in everything.metrics if any(row.values[m.name] is not None for row in everything.rows)]
        self.table = replace(everything, metrics=measured)
        self.ranks = {metric.name: self.table.ranks(metric) for metric in measured}
        self.published = [m for m in measured if any(m.name in row.published for row in everything.rows)]
        self.title, self.budget = records[0].benchmark, longest_budget(records)
        self.n_tasks = int(records[0].spec["n_tasks"])
        self.gains = gains(records)

    # ------------------------------------------------------------------------------------------------ as sentences

    @property
    def compared(self) -> str:
        """One sentence that says what was compared."""
        fewest, most = (bound(len(runs) for runs in self.labels.values()) for bound in (min, max))
        seeds = f"{_count(most, 'seed')} each" if fewest == most else f"{fewest} to {most} seeds"
        networks = sorted({str(record.spec["network"]["name"]) for record in self.records})
        budget = f" ({self.budget})" if self.budget else ""
        tasks = f"the {_count(self.n_tasks, 'task')} of {self.title}{budget}"
        methods = [label for label, runs in self.labels.items() if not runs[0].is_joint]
        who = [f"{_count(len(methods), 'method')} learned {tasks} one after the other"] if methods else []
        if len(methods) < len(self.labels):
            who.append(f"joint training {'' if methods else f'learned {tasks} '}all at once")
        sentence = (
            f"{', and '.join(who)}, with {_join(networks)} and {seeds}: "
            f"{_count(len(self.records), 'run')}{self._unfinished}."
        )
        return sentence[0].upper() + sentence[1:]

    @property
    def _unfinished(self) -> str:
        words = Counter(_state(record) for record in self.records if record.status != "done")
        return f", of which {_join([f'{number} {word}' for word, number in words.items()])}" if words else ""

    @property
    def found(self) -> str:
        """One sentence that says which method is best and what the merge gains."""
        if self._best is None:
            return "No method has a final accuracy yet."
        best, value = self._best
        sentence = f"{best.label} has the highest ACC, {FORMATS['percent'].spread(value)} %"
        means = {row.label: value.mean for row, value in self._ranked}
        gaining = sorted(self.gains, key=lambda gain: means.get(gain.label, 0.0))[-1:]
        over = [gain for gain in self.gains if gaining and gain.label == gaining[0].label]
        if not over:
            return f"{sentence}."
        gain = over[-1]  # the control comes last; if there is one, it is the fair comparison
        points = _points(gain.paired.gain.mean)
        change = f"loses {points[1:]} points against" if points.startswith("-") else f"gains {points[1:]} points over"
        if gain.paired.interval is None:
            certainty = "a single seed, so this may be chance"
        else:
            certainty = f"95 % interval {self.interval(gain)}"
            certainty += "" if self.excludes_zero(gain) else ", which includes zero, so this may be chance"
        who = "it" if gain.label == best.label else gain.label
        return f"{sentence}; {who} {change} {gain.over} ({certainty})."

    @property
    def _ranked(self) -> list[tuple[Row, Spread]]:
        """All methods with their ACC, except joint training, which is an upper bound."""
        return [(row, value) for row in self.table.rows if row.competes and (value := row.values["acc"])]

    @property
    def _best(self) -> tuple[Row, Spread] | None:
        return max(self._ranked, key=lambda pair: pair[1].mean, default=None)

    # ---------------------------------------------------------------------------------------------------- the table

    @property
    def references(self) -> list[str]:
        """The kinds of references with gains: ``baseline`` and ``control``."""
        return [kind for kind in References.model_fields if any(kind in row.gains for row in self.table.rows)]

    def cell(self, metric: Metric, spread: Spread | None) -> str:
        """Return the text of a table cell."""
        return FORMATS[metric.unit].cell(spread)

    def points(self, gain: Gain) -> str:
        """Return the mean of a gain in points."""
        return _points(gain.paired.gain.mean)

    def interval(self, gain: Gain) -> str:
        """Return the 95 % interval of a gain; empty for a single seed."""
        return " to ".join(map(_points, gain.paired.interval or ()))

    def excludes_zero(self, gain: Gain) -> bool:
        """Return whether the 95 % interval of a gain excludes zero."""
        low, high = gain.paired.interval or (0, 0)
        return low * high > 0

    # --------------------------------------------------------------------------------------------------------- runs

    @property
    def problems(self) -> list[Record]:
        """The runs that ended with an error."""
        return [record for record in self.records if record.error is not None]

    @property
    def environments(self) -> list[Mapping[str, str]]:
        """The distinct environments (versions of packages, processor) of the runs."""
        return list({json.dumps(record.environment): record.environment for record in self.records}.values())

    # ------------------------------------------------------------------------------------------------------- charts

    def charts(self) -> dict[str, Any]:
        """Return the data of the charts as plain values. Accuracies are in percent."""
        shown = self._shown()
        return {
            "tasks": self.n_tasks,
            "methods": [
                {"label": label, "shown": label in shown, **_curves(runs, self.n_tasks)}
                for label, runs in self.labels.items()
            ],
            "gains": [
                {
                    "label": gain.label,
                    "over": gain.over,
                    "gain": _rounded(100 * gain.paired.gain.mean),
                    "interval": [_rounded(100 * bound) for bound in gain.paired.interval or ()],
                    "seeds": gain.paired.gain.n,
                }
                for gain in self.gains
            ],
        }

    def _shown(self) -> set[str]:
        """Return the labels drawn when the page opens: the best, those with gains and their references, then others."""
        best = [] if self._best is None else [self._best[0].label]
        paired = [name for gain in self.gains for name in (gain.label, gain.over)]
        return set(list(dict.fromkeys([*best, *paired, *self.labels]))[:SHOWN])


def _specification(record: Record) -> str:
    """Return the text of ``spec.json``."""
    return json.dumps({"schema_version": SPEC_SCHEMA, **record.spec}, indent=1, ensure_ascii=False)


def _values(record: Record) -> list[tuple[str, str]]:
    """Return headings and values of the default metrics of a run, for the list of runs."""
    pairs = [(METRICS[name], METRICS[name].of(record)) for name in STANDARD]
    return [(m.heading, FORMATS[m.unit].cell(Spread(v, None, 1))) for m, v in pairs if v is not None]


def _curves(runs: Sequence[Record], n_tasks: int) -> dict[str, Any]:
    """Return means and standard deviations over the runs that are done; None where a run has no value."""
    done = [run for run in runs if run.status == "done"]
    matrices = [run.accuracy.get("test", []) for run in done]

    def at(t: int, i: int) -> list[float | None]:
        return _mean_and_std([m[t][i] if t < len(m) and i < len(m[t]) else None for m in matrices], 100)

    def average(t: int) -> list[float | None]:
        rows = [m[t][: t + 1] if t < len(m) else [] for m in matrices]
        complete = [[value for value in row if value is not None] for row in rows]
        return _mean_and_std([sum(row) / len(row) if len(row) == t + 1 else None for row in complete], 100)

    merges = {t: [merge for run in done for merge in run.merges if merge.t == t] for t in range(1, n_tasks + 1)}
    tasks = [[run.tasks[t] for run in done if t < len(run.tasks)] for t in range(n_tasks)]
    layers = list(dict.fromkeys(name for group in tasks for task in group for name in task.ranks))
    return {
        "accuracy": [[at(t, i) for i in range(t + 1)] for t in range(n_tasks)],
        "average": [average(t) for t in range(n_tasks)],
        "coefficients": [_mean_and_std([merge.coefficient for merge in merges[t]], 1) for t in merges]
        if any(merges.values())
        else [],
        "ranks": {
            name: [_mean_and_std([task.ranks.get(name) for task in group], 1) for group in tasks] for name in layers
        },
    }


def _mean_and_std(values: Sequence[float | None], scale: float) -> list[float | None]:
    """Return mean and standard deviation; None for both unless every run has a value."""
    measured = [scale * value for value in values if value is not None]
    if not measured or len(measured) < len(values):
        return [None, None]
    spread = Spread.of(measured)
    return [_rounded(spread.mean), None if spread.std is None else _rounded(spread.std)]


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


def _points(gain: float) -> str:
    return FORMATS["points"].number(gain, "+")


def _state(record: Record) -> str:
    return "unfinished" if record.status == "running" else record.status


def _count(number: int, noun: str) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
    return f"{words[number] if number < len(words) else number} {noun}{'s' * (number != 1)}"


def _join(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _script_data(content: Any) -> Markup:
    """Return JSON that is safe inside a script element: no character can end the element or open a comment."""
    text = json.dumps(content, separators=(",", ":"), allow_nan=False)
    return Markup(text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026"))


def _csp_hash(text: str) -> str:
    return f"sha256-{b64encode(sha256(text.encode()).digest()).decode()}"

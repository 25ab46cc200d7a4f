"""What a person sees while runs train."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Literal

from tqdm import tqdm

from became_avalanche.results.metrics import METRICS, Metric
from became_avalanche.results.record import Record, last_line
from became_avalanche.runs.spec import RunSpec


@dataclass(frozen=True)
class Event:
    """Something that happened in a run."""

    key: str
    kind: Literal["epoch", "stage", "resumed", "note"]
    task: int = 0
    """Counted from 1; for ``resumed``, the number of finished tasks."""
    stage: int = 1
    epoch: int = 0
    """Epochs of the stage so far."""
    accuracy: float | None = None
    """Mean test accuracy over the tasks seen, at the end of the last stage of a task."""
    seconds: float = 0.0
    text: str = ""
    """What a ``note`` says."""


Report = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Report nothing."""


class Progress:
    """Shows the progress of many runs.

    On a terminal there is one live line. Elsewhere there is one plain line per task and stage, and within a long stage
    one per minute. Events of all workers come to this one object, so lines never mix.
    """

    def __init__(self, specs: dict[str, RunSpec], done: int = 0) -> None:
        """Init.

        :param specs: the runs to come, by key.
        :param done: how many runs are finished already.
        """
        self.specs = specs
        self._start = self._spoke = perf_counter()
        self._total, self._done = len(specs) + done, done
        self._stages = dict.fromkeys(specs, 0)
        self._of = {key: _stages(spec) for key, spec in specs.items()}
        self._skipped = 0
        self._bar = tqdm(
            total=sum(self._of.values()),
            disable=not sys.stderr.isatty(),
            bar_format="{percentage:3.0f} %, {remaining} left: {desc}",  # a narrow terminal cuts the end of the line
            dynamic_ncols=True,
            leave=False,
        )

    def __enter__(self) -> Progress:
        if self.specs:
            self._print(f"{len(self.specs)} of {self._total} runs to train")
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def __call__(self, event: Event) -> None:
        """Take in an event."""
        spec = self.specs[event.key]
        who = _who(spec)
        if event.kind == "note":
            self._print(f"{who}: {event.text}", always=True)
            return
        if event.kind == "resumed":
            finished = 1 + (event.task - 1) * spec.method.n_stages if event.task else 0
            finished -= self._stages[event.key]  # not zero if the run was lost with its node and starts again
            self._advance(event.key, finished)
            self._skipped += finished
            self._print(f"{who}: resumed after task {event.task} of {spec.n_tasks}")
            return
        where = f"{who}, task {event.task} of {spec.n_trainings}, stage {event.stage}"
        if event.kind == "epoch":
            self._bar.set_description_str(f"{where}, epoch {event.epoch}")
            if perf_counter() - self._spoke > 60:
                self._print(f"{where}, epoch {event.epoch} ({self._left()})")
            return
        self._advance(event.key, 1)
        accuracy = "" if event.accuracy is None else f", accuracy {100 * event.accuracy:.2f} %"
        epochs = f"{event.epoch} epoch{'s' * (event.epoch != 1)}"
        self._print(f"{where}: {epochs}{accuracy}, {event.seconds:.1f} s ({self._left()})")

    def finished(self, key: str, record: Record | None, problem: str | None) -> None:
        """A run has ended: with a record, or with a problem."""
        spec = self.specs[key]
        self._done += 1
        self._advance(key, self._of[key] - self._stages[key])
        who = _who(spec)
        count = f"({self._done} of {self._total} runs)"
        if record is None or record.status != "done":
            reason = last_line((record and record.error) or problem or "no reason given")
            self._print(f"{who}: {record.status if record else 'not run'}: {reason} {count}", always=True)
            return
        values = [f"{metric.heading.split()[0]} {100 * value:.2f} %" for metric, value in _values(record)]
        self._print(f"{who}: done, {', '.join(values)} {count}")

    def _advance(self, key: str, stages: int) -> None:
        self._stages[key] += stages
        self._bar.update(stages)

    def _left(self) -> str:
        total = sum(self._of.values())
        finished = sum(min(done, self._of[key]) for key, done in self._stages.items())  # a merge may add stages
        seconds = (perf_counter() - self._start) * (total - finished) / max(1, finished - self._skipped)
        return f"about {duration(seconds)} left"

    def _print(self, line: str, always: bool = False) -> None:
        self._spoke = perf_counter()
        if self._bar.disable:
            print(line, file=sys.stderr, flush=True)
        elif always:
            self._bar.write(line, file=sys.stderr)


def _who(spec: RunSpec) -> str:
    return f"{spec.method.shown}, seed {spec.seed}"


def _values(record: Record) -> list[tuple[Metric, float]]:
    pairs = [(METRICS[name], METRICS[name].of(record)) for name in ("acc", "bwt")]
    return [(metric, value) for metric, value in pairs if value is not None]


def _stages(spec: RunSpec) -> int:
    return 1 + (spec.n_trainings - 1) * spec.method.n_stages


def duration(seconds: float) -> str:
    """A time for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

"""The progress output of runs in training."""

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
    """Number of the task, from 1. For ``resumed``: number of finished tasks."""
    stage: int = 1
    epoch: int = 0
    """Number of epochs of the stage so far."""
    accuracy: float | None = None
    """Mean test accuracy over the tasks seen; only at the end of the last stage of a task."""
    seconds: float = 0.0
    text: str = ""
    """Text of a ``note``."""


Report = Callable[[Event], None]


def ignore(event: Event) -> None:
    """Report nothing."""


class Progress:
    """Prints the progress of many runs.

    A terminal shows one live line. A file or pipe gets one line per stage, and one per minute within a long stage. All
    workers report to this one object, so their lines never mix.
    """

    def __init__(self, specs: dict[str, RunSpec], done: int = 0) -> None:
        """Start to show progress.

        :param specs: the runs to train, by key.
        :param done: number of runs that are already finished.
        """
        self.specs = specs
        self._start = self._last_printed = self._last_stage = perf_counter()
        self._total, self._done = len(specs) + done, done
        self._finished_stages = dict.fromkeys(specs, 0)
        self._n_stages = {key: _count_stages(spec) for key, spec in specs.items()}
        self._trained_stages, self._trained_seconds = 0, 0.0
        self._bar = tqdm(
            total=sum(self._n_stages.values()),
            disable=not sys.stderr.isatty(),
            bar_format="{percentage:3.0f} %, {remaining} left: {desc}",  # narrow terminals cut the end of the line
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
        """Show an event."""
        spec = self.specs[event.key]
        run = _run_name(spec)
        if event.kind == "note":
            self._print(f"{run}: {event.text}", always=True)
            return
        if event.kind == "resumed":
            finished = 1 + (event.task - 1) * spec.method.n_stages if event.task else 0
            finished -= self._finished_stages[event.key]  # not zero if the run has lost its node and starts again
            self._advance(event.key, finished)
            self._print(f"{run}: resumed after task {event.task} of {spec.n_tasks}")
            return
        where = f"{run}, task {event.task} of {spec.n_trainings}, stage {event.stage}"
        if event.kind == "epoch":
            self._bar.set_description_str(f"{where}, epoch {event.epoch}")
            if perf_counter() - self._last_printed > 60:
                self._print(f"{where}, epoch {event.epoch}{self._time_left(perf_counter() - self._last_stage)}")
            return
        self._advance(event.key, 1)
        self._trained_stages += 1
        self._trained_seconds += event.seconds
        self._last_stage = perf_counter()
        accuracy = "" if event.accuracy is None else f", accuracy {100 * event.accuracy:.2f} %"
        epochs = f"{event.epoch} epoch{'s' * (event.epoch != 1)}"
        self._print(f"{where}: {epochs}{accuracy}, {event.seconds:.1f} s{self._time_left()}")

    def finished(self, key: str, record: Record | None, problem: str | None) -> None:
        """Show that a run has ended, with a record or with a problem."""
        spec = self.specs[key]
        self._done += 1
        self._advance(key, self._n_stages[key] - self._finished_stages[key])
        run = _run_name(spec)
        count = f"({self._done} of {self._total} runs)"
        if record is None or record.status != "done":
            reason = last_line((record and record.error) or problem or "no reason given")
            self._print(f"{run}: {record.status if record else 'not finished'}: {reason} {count}", always=True)
            return
        values = [f"{metric.heading.split()[0]} {100 * value:.2f} %" for metric, value in _values(record)]
        self._print(f"{run}: done, {', '.join(values)} {count}")

    def _advance(self, key: str, stages: int) -> None:
        self._finished_stages[key] += stages
        self._bar.update(stages)

    def _time_left(self, since_stage: float = 0.0) -> str:
        """Return the time left if stages take as long as the trained ones did. It is empty if none has been trained.

        It is at least the time of the run with most stages left, because a run has one worker.

        :param since_stage: seconds since the last stage was finished.
        """
        if not self._trained_stages:
            return ""
        # a plugin may add stages that were not counted
        left = [max(0, n - self._finished_stages[key]) for key, n in self._n_stages.items()]
        all_runs = sum(left) * (self._last_stage - self._start) / self._trained_stages
        longest = max(left) * self._trained_seconds / self._trained_stages
        seconds = max(all_runs, longest) - since_stage
        return f" (about {duration(seconds)} left)" if seconds >= 0 else ""

    def _print(self, line: str, always: bool = False) -> None:
        self._last_printed = perf_counter()
        if self._bar.disable:
            print(line, file=sys.stderr, flush=True)
        elif always:
            self._bar.write(line, file=sys.stderr)


def _run_name(spec: RunSpec) -> str:
    return f"{spec.method.shown}, seed {spec.seed}"


def _values(record: Record) -> list[tuple[Metric, float]]:
    pairs = [(METRICS[name], METRICS[name].of(record)) for name in ("acc", "bwt")]
    return [(metric, value) for metric, value in pairs if value is not None]


def _count_stages(spec: RunSpec) -> int:
    return 1 + (spec.n_trainings - 1) * spec.method.n_stages


def duration(seconds: float) -> str:
    """Format a duration, such as 42 s, 3 min or 1.5 h."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"

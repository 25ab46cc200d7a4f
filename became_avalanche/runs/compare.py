"""Many runs side by side: the table, the gains, and the files."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from became_avalanche.plugins.merge import MergeRecord
from became_avalanche.runs.methods import base_of, rivals_of, used_strengths
from became_avalanche.runs.presets import BenchmarkPreset
from became_avalanche.runs.train import RunResult


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds."""

    mean: float
    std: float | None
    """None for a single seed."""

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of one value per seed; the standard deviation is that of a sample."""
        return Spread(mean(values), stdev(values) if len(values) > 1 else None)

    def percent(self, sign: str = "") -> str:
        """In percent, as ``12.34 ± 0.56``."""
        spread = "" if self.std is None else f" ± {100 * self.std:.2f}"
        return f"{100 * self.mean:{sign}.2f}{spread}"


@dataclass(frozen=True)
class Row:
    """One method in the table."""

    method: str
    acc: Spread
    bwt: Spread | None
    epochs: float
    """Mean over seeds of all epochs of a run."""
    seconds: float


@dataclass(frozen=True)
class Gain:
    """What a merge gains in ACC over another method, seed by seed."""

    method: str
    over: str
    acc: Spread


class Comparison:
    """The results of several methods with several seeds, and the folder that keeps them.

    The folder holds ``results.json`` with all runs, written anew, atomically, after each of them. A comparison that was
    interrupted goes on where it was if it is asked for again in the same folder.
    """

    def __init__(self, preset: BenchmarkPreset, methods: Sequence[str], seeds: int, folder: Path) -> None:
        self.preset, self.methods, self.seeds, self.folder = preset, list(methods), seeds, folder
        self.runs: list[RunResult] = []
        self.settings: dict[str, Any] = {
            "benchmark": preset.name,
            "recipe": asdict(preset.recipe),
            "strengths": used_strengths(methods, preset.strengths),
        }
        own = {method: recipe for method, recipe in preset.recipes.items() if method in map(base_of, methods)}
        if own:
            self.settings["recipes"] = {method: asdict(recipe) for method, recipe in own.items()}
        if preset.budget:
            self.settings["budget"] = preset.budget

    def resume(self) -> None:
        """Take over the runs of an interrupted comparison with the same settings."""
        path = self.folder / "results.json"
        if not path.exists():
            return
        try:
            old = json.loads(path.read_text())
            if old["complete"] or old["settings"] != self.settings:
                return
            runs = [RunResult(**{**run, "merges": [MergeRecord(**m) for m in run["merges"]]}) for run in old["runs"]]
        except (ValueError, KeyError, TypeError):
            return  # not a file of ours: it is replaced when the first run is finished
        self.runs = [run for run in runs if run.method in self.methods and run.seed < self.seeds]

    def run(self, train: Callable[[str, int], RunResult]) -> None:
        """Call ``train(method, seed)`` for whatever is not yet there, keeping each result as soon as it is there."""
        done = {(run.method, run.seed) for run in self.runs}
        for seed in range(self.seeds):
            for method in self.methods:
                if (method, seed) not in done:
                    self.runs.append(train(method, seed))
                    self.save()

    def save(self) -> None:
        """Write ``results.json``."""
        complete = len(self.runs) == len(self.methods) * self.seeds
        content = {"complete": complete, "settings": self.settings, "runs": [asdict(run) for run in self.runs]}
        write(self.folder / "results.json", json.dumps(content, indent=1, allow_nan=False) + "\n")

    def of(self, method: str) -> list[RunResult]:
        """The runs of one method, by seed."""
        return sorted((run for run in self.runs if run.method == method), key=lambda run: run.seed)

    def rows(self) -> list[Row]:
        """The table: one row per method that has results."""
        rows = []
        for method in self.methods:
            runs = self.of(method)
            if runs:
                changes = [run.bwt for run in runs if run.bwt is not None]
                rows.append(
                    Row(
                        method=method,
                        acc=Spread.of([run.acc for run in runs]),
                        bwt=Spread.of(changes) if changes else None,
                        epochs=mean(run.total_epochs for run in runs),
                        seconds=mean(run.seconds for run in runs),
                    )
                )
        return rows

    def gains(self) -> list[Gain]:
        """For each merging method, its gain over its baseline and over the control that trains as long."""
        gains = []
        for method in self.methods:
            for other in rivals_of(method):
                theirs = {run.seed: run.acc for run in self.of(other)}
                differences = [run.acc - theirs[run.seed] for run in self.of(method) if run.seed in theirs]
                if differences:
                    gains.append(Gain(method, other, Spread.of(differences)))
        return gains

    def save_table(self) -> None:
        """Write ``table.csv``."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(["method", "acc_mean", "acc_std", "bwt_mean", "bwt_std", "epochs", "seconds"])
        for row in self.rows():
            bwt = row.bwt or Spread(float("nan"), None)
            numbers = (row.acc.mean, row.acc.std, bwt.mean, bwt.std, row.epochs, row.seconds)
            table.writerow([row.method, *("" if n is None or n != n else f"{n:.6g}" for n in numbers)])
        write(self.folder / "table.csv", text.getvalue())


def text_table(rows: Sequence[Row], bold: Callable[[str], str] = str) -> str:
    """The table as text, with the best ACC and the best BWT through ``bold``. Joint training does not compete."""
    competing = [row for row in rows if row.bwt is not None]
    best_acc = max((row.acc.mean for row in competing), default=None)
    best_bwt = max((row.bwt.mean for row in competing if row.bwt), default=None)
    width = max([len(row.method) for row in rows] + [6])
    lines = [f"{'method':{width}}  {'ACC %':>15}  {'BWT %':>15}  {'epochs':>7}  {'seconds':>7}"]
    for row in rows:
        acc, bwt = f"{row.acc.percent():>15}", f"{row.bwt.percent('+') if row.bwt else '–':>15}"
        if row.bwt and row.acc.mean == best_acc:
            acc = bold(acc)
        if row.bwt and row.bwt.mean == best_bwt:
            bwt = bold(bwt)
        lines.append(f"{row.method:{width}}  {acc}  {bwt}  {row.epochs:7.0f}  {row.seconds:7.1f}")
    return "\n".join(lines)


def text_gains(gains: Sequence[Gain]) -> str:
    """The gains as text, in points of ACC."""
    return "\n".join(f"{gain.method} over {gain.over}: {gain.acc.percent('+')} points of ACC" for gain in gains)


def write(path: Path, content: str) -> None:
    """Write a file at once or not at all."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(content)
    os.replace(partial, path)

"""What a person sees while a comparison runs."""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any

from avalanche.training.plugins import SupervisedPlugin
from avalanche.training.templates import SupervisedTemplate
from tqdm import tqdm

from became_avalanche.runs.compare import Comparison
from became_avalanche.runs.methods import JOINT, is_staged
from became_avalanche.runs.train import RunResult


class Progress(SupervisedPlugin):
    """One calm line on a terminal: method, seed, task, stage, epoch and time left. Elsewhere, one line per run."""

    def __init__(self, comparison: Comparison) -> None:
        super().__init__()
        self.comparison = comparison
        self._start = perf_counter()
        self._where = ""
        self._task = self._stage = self._epoch = 0
        self._kept = len(comparison.runs)
        done = sum(self._stages(run.method) for run in comparison.runs)
        total = sum(self._stages(method) for method in comparison.methods) * comparison.seeds
        self._bar = tqdm(
            initial=done,
            total=total,
            disable=not sys.stderr.isatty(),
            bar_format="{desc}  {bar:20}  {percentage:3.0f} %, {remaining} left",
            dynamic_ncols=True,
            leave=False,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def begin(self, method: str, seed: int) -> None:
        """A run starts."""
        self._where = f"{method}, seed {seed}"
        self._task = 0

    def end(self, run: RunResult) -> None:
        """A run has ended with a result, which is not yet among those of the comparison."""
        done, total = len(self.comparison.runs) + 1, len(self.comparison.methods) * self.comparison.seeds
        left = (perf_counter() - self._start) * (total - done) / (done - self._kept)
        bwt = "" if run.bwt is None else f", BWT {100 * run.bwt:+.2f} %"
        if self._bar.disable:
            print(
                f"{self._where}: ACC {100 * run.acc:.2f} %{bwt}, {run.total_epochs} epochs, {run.seconds:.1f} s "
                f"({done} of {total} runs, about {_duration(left)} left)",
                file=sys.stderr,
                flush=True,
            )

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._task += 1
        self._stage, self._epoch = 1, 0

    def on_stage_start(self, strategy: SupervisedTemplate, stage: int) -> None:
        """A further stage of the same task."""
        if stage > 1:
            self._stage, self._epoch = stage, 0
            self._bar.update()

    def after_training_epoch(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._epoch += 1
        task = f"task {self._task} of {self.comparison.preset.n_tasks}"
        self._bar.set_description_str(f"{self._where}, {task}, stage {self._stage}, epoch {self._epoch}")

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._bar.update()

    def _stages(self, method: str) -> int:
        tasks = self.comparison.preset.n_tasks
        return 1 if method == JOINT else 2 * tasks - 1 if is_staged(method) else tasks


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"

"""The one function that trains: one benchmark, one method, one seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from os import PathLike
from time import perf_counter
from typing import Any

import torch
from avalanche.logging import BaseLogger
from avalanche.training.determinism.rng_manager import RNGManager
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.supervised import JointTraining, Naive
from avalanche.training.templates import SupervisedTemplate

from became_avalanche.metrics.accuracy import AccuracyMatrix
from became_avalanche.plugins.merge import BecameMergePlugin, MergeRecord
from became_avalanche.runs.catalogue import find_benchmark
from became_avalanche.runs.methods import JOINT, make_plugins
from became_avalanche.runs.presets import BenchmarkPreset


@dataclass(frozen=True)
class RunResult:
    """What came out of a run. Accuracies are fractions; what was not measured is None."""

    benchmark: str
    method: str
    seed: int
    accuracy: list[list[float | None]]
    """Test accuracy: a row per task trained, a column per task."""
    acc: float
    """Mean test accuracy over all tasks at the end."""
    bwt: float | None
    """Mean change in test accuracy of the earlier tasks since each was learned."""
    valid_acc: float | None
    """Mean validation accuracy over all tasks at the end, if there are validation data: what settings are chosen by."""
    epochs: list[list[int]]
    """For each task, the epochs of each stage."""
    merges: list[MergeRecord]
    seconds: float
    """Time of training, evaluation left out."""
    budget: str = ""
    """To what the benchmark was scaled down, if it was."""

    @property
    def total_epochs(self) -> int:
        """Epochs over all tasks and stages."""
        return sum(map(sum, self.epochs))


def train(
    benchmark: str | BenchmarkPreset,
    method: str,
    seed: int = 0,
    *,
    dataset_root: str | PathLike[str] | None = None,
    device: str | torch.device = "cpu",
    plugins: Sequence[SupervisedPlugin] = (),
    loggers: Sequence[BaseLogger] = (),
    metrics: Sequence[Any] = (),
) -> RunResult:
    """Train ``method`` on all tasks of ``benchmark`` in turn.

    The seed decides on the tasks, the initial weights and the order of the data: two runs with the same seed give the
    same numbers, whatever ran before.

    :param benchmark: a name (``became presets`` lists them) or a preset, which may be scaled down or one's own.
    :param method: a name, such as ``gpm+became``.
    :param seed: the seed.
    :param dataset_root: folder of data sets, for a benchmark that needs one (``became data`` lists them).
    :param device: where to train.
    :param plugins: further plugins, to watch the training.
    :param loggers: Avalanche loggers.
    :param metrics: further Avalanche metrics for the loggers.
    """
    preset = find_benchmark(benchmark) if isinstance(benchmark, str) else benchmark
    if dataset_root is not None:
        preset = preset.at(dataset_root)
    recipe = preset.recipe_of(method)
    own_plugins = make_plugins(method, preset.strengths)
    RNGManager.set_random_seeds(seed)
    stream, model = preset.open(seed, device), preset.model()
    test, valid, epochs = AccuracyMatrix("test"), AccuracyMatrix("valid"), _EpochCounter()
    strategy = (JointTraining if method == JOINT else Naive)(
        model=model,
        optimizer=recipe.optimizer(model),
        criterion=torch.nn.CrossEntropyLoss(),
        plugins=[
            *own_plugins,
            *recipe.plugins(),
            epochs,
            *plugins,
        ],
        evaluator=EvaluationPlugin(test, valid, *metrics, loggers=list(loggers) or [BaseLogger()]),
        train_mb_size=recipe.batch_size,
        train_epochs=recipe.epochs,
        eval_mb_size=64,
        device=torch.device(device),
    )

    seconds = 0.0
    tasks = stream.train_stream[: preset.n_tasks]
    steps = [tasks] if method == JOINT else list(tasks)
    for t, step in enumerate(steps, start=1):
        start = perf_counter()
        strategy.train(step, pin_memory=False)
        seconds += perf_counter() - start
        seen = len(tasks) if method == JOINT else t
        for name in ("test", "valid"):
            if name in stream.streams:
                strategy.eval(stream.streams[name][:seen], pin_memory=False)

    return RunResult(
        benchmark=preset.name,
        method=method,
        seed=seed,
        accuracy=[[_measured(value) for value in row] for row in test.result().tolist()],
        acc=test.acc,
        bwt=_measured(test.bwt),
        valid_acc=_measured(valid.acc),
        epochs=epochs.epochs,
        merges=[record for p in own_plugins if isinstance(p, BecameMergePlugin) for record in p.merges],
        seconds=seconds,
        budget=preset.budget,
    )


def _measured(value: float) -> float | None:
    return None if value != value else value


class _EpochCounter(SupervisedPlugin):
    """Counts the epochs of each stage of each task."""

    def __init__(self) -> None:
        super().__init__()
        self.epochs: list[list[int]] = []

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self.epochs.append([0])

    def on_stage_start(self, strategy: SupervisedTemplate, stage: int) -> None:
        """A further stage of the same task."""
        if stage > 1:
            self.epochs[-1].append(0)

    def after_training_epoch(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self.epochs[-1][-1] += 1

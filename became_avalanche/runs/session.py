"""One run, task by task: train, evaluate, save, restore, record. All runs are trained here."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch
from avalanche.logging import BaseLogger
from avalanche.training.determinism.rng_manager import RNGManager
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.supervised import JointTraining, Naive
from torch import nn

from became_avalanche.metrics.accuracy import AccuracyMatrix
from became_avalanche.plugins.merge import BecameMergePlugin
from became_avalanche.plugins.plateau import PlateauPlugin
from became_avalanche.plugins.projection import GradientProjectionPlugin
from became_avalanche.results.record import (
    Matrix,
    Record,
    Seconds,
    StageRecord,
    Status,
    TaskRecord,
    parse_record,
)
from became_avalanche.runs.components import NETWORKS, find, options_of
from became_avalanche.runs.method import Method
from became_avalanche.runs.progress import Event, Report, ignore
from became_avalanche.runs.spec import RunSpec, SpecError
from became_avalanche.runs.trace import Trace, finite
from became_avalanche.strategy.allocator import keep_freed_memory
from became_avalanche.strategy.checkpoint import load_strategy_state, not_resumable, strategy_state
from became_avalanche.strategy.state import StatefulPlugin

Keep = Literal["checkpoint", "endpoints"]

# ------------------------------------------------------------------------------------------------------------ parts


def open_stream(spec: RunSpec, data: str | PathLike[str] | None) -> Any:
    """Return the Avalanche benchmark of a run.

    :param data: folder of data sets, for a stream that reads files.
    """
    function = spec.stream.function()
    options = dict(spec.stream.options)
    if "n_tasks" in options_of(function):
        options["n_tasks"] = spec.stream.n_tasks
    if spec.stream.reads_files:
        if data is None:
            raise SpecError(f"{spec.benchmark} reads data sets from disk; pass their folder as dataset_root")
        options.update(dataset_root=data, device=spec.device)
    try:
        return function(seed=spec.seed, **options)
    except TypeError as error:
        raise SpecError(f"cannot create the stream {spec.stream.name} with the options {options}: {error}") from error
    except (FileNotFoundError, ValueError) as error:
        raise SpecError(str(error)) from error


def make_network(spec: RunSpec) -> nn.Module:
    """Return the network of a run with new weights."""
    network: nn.Module = find("network", spec.network.name, NETWORKS)(**spec.network.options)
    return network.to(memory_format=torch.channels_last) if spec.network.channels_last else network


@cache
def environment() -> dict[str, str]:
    """Return the versions and the machine type, which may affect results."""
    packages = ("torch", "torchvision", "avalanche-lib", "numpy", "became-avalanche")
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "machine": platform.machine(),
        **_commit(Path(__file__).parents[2]),
    }


def _commit(clone: Path) -> dict[str, str]:
    """Return the commit of a clone of this repository. An installed package may lie inside another repository."""
    if not (clone / ".git").exists():
        return {}
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        cwd=clone,
        capture_output=True,
        text=True,
        check=False,
    )
    return {"commit": described.stdout.strip()} if described.returncode == 0 else {}


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def limited_threads(n: int) -> Iterator[None]:
    """Limit torch to ``n`` CPU threads in this context."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _flatten(metrics: Sequence[Any]) -> Iterator[Any]:
    """Yield the metrics of a nested list, which Avalanche accepts."""
    for metric in metrics:
        yield from _flatten(metric) if isinstance(metric, Sequence) else (metric,)


# ---------------------------------------------------------------------------------------------------------- session


class Session:
    """A run: its strategy, its stream, and its measurements so far.

    >>> from became_avalanche import Session, find_benchmark
    >>> session = Session(find_benchmark("split-digits").spec("gpm", n_tasks=2, max_epochs=1))
    >>> session.step()
    >>> len(session.tasks), session.finished
    (1, False)
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        data: str | PathLike[str] | None = None,
        plugins: Sequence[SupervisedPlugin] = (),
        loggers: Sequence[BaseLogger] = (),
        metrics: Sequence[Any] = (),
        keep: Keep = "checkpoint",
        report: Report = ignore,
    ) -> None:
        """Create the stream, the network and the strategy, and seed the global random state.

        :param spec: the specification.
        :param data: folder of data sets, for a benchmark that reads files.
        :param plugins: further plugins, which only observe the training. Their state is not saved.
        :param loggers: Avalanche loggers.
        :param metrics: further Avalanche metrics for the loggers.
        :param keep: ``endpoints`` keeps the weights of the last merge, for ``endpoints()``.
        :param report: is called after each epoch and each stage.
        """
        self.spec, self._report = spec, report
        self.key, self.references = spec.key(), spec.references
        self._event_key = self.key
        self.method_plugins = spec.method.make_plugins()
        for plugin in self.method_plugins:
            if isinstance(plugin, BecameMergePlugin):
                plugin.keep_last_merge = plugin.keep_last_merge or keep == "endpoints"
        if spec.device == "cpu":
            keep_freed_memory()
        recipe = spec.effective_recipe
        RNGManager.set_random_seeds(spec.seed)
        self.stream, model = open_stream(spec, data), make_network(spec)
        self.matrices = {name: AccuracyMatrix(name) for name in ("test", "valid") if name in self.stream.streams}
        schedule = recipe.plugins()
        self._trace = Trace(
            next((plugin for plugin in schedule if isinstance(plugin, PlateauPlugin)), None),
            None if spec.method.joint else self._test_data,
            self._report_stage,
        )
        self._observers = [self._trace, *plugins]
        self._stateless = [*self._observers, *_flatten(metrics)]
        self.strategy = (JointTraining if spec.method.joint else Naive)(
            model=model,
            optimizer=recipe.optimizer(model),
            criterion=nn.CrossEntropyLoss(),
            plugins=[*self.method_plugins, *schedule, *self._observers],
            evaluator=EvaluationPlugin(*self.matrices.values(), *metrics, loggers=list(loggers) or [BaseLogger()]),
            train_mb_size=recipe.batch_size,
            train_epochs=recipe.epochs,
            eval_mb_size=spec.eval_batch_size,
            device=torch.device(spec.device),
        )
        self.tasks: list[TaskRecord] = []
        self.resumed: list[int] = []

    @property
    def finished(self) -> bool:
        """Whether all tasks are trained."""
        return len(self.tasks) == self.spec.n_trainings

    def step(self) -> None:
        """Train the next task and evaluate all tasks seen."""
        n = len(self.tasks)
        experiences = self.stream.train_stream[: self.spec.n_tasks]
        plugins = [plugin for plugin in self.strategy.plugins if isinstance(plugin, StatefulPlugin)]
        before = {part: sum(plugin.seconds[part] for plugin in plugins) for part in ("memory", "fisher", "merge")}
        start = perf_counter()
        self.strategy.train(experiences if self.spec.method.joint else experiences[n], pin_memory=False)
        trained = perf_counter()
        seen = self.spec.n_tasks if self.spec.method.joint else n + 1
        for name in self.matrices:
            self.strategy.eval(self.stream.streams[name][:seen], pin_memory=False)
        parts = {part: sum(plugin.seconds[part] for plugin in plugins) - value for part, value in before.items()}
        projections = [plugin for plugin in self.method_plugins if isinstance(plugin, GradientProjectionPlugin)]
        self.tasks.append(
            TaskRecord(
                stages=[StageRecord(**stage) for stage in self._trace.stages],
                first_epoch_accuracy=self._trace.first_epoch_accuracy,
                ranks={name: rank for plugin in projections for name, rank in plugin.ranks().items()},
                memory_bytes={type(plugin).__name__: size for plugin in plugins if (size := plugin.memory_bytes())},
                seconds=Seconds(training=trained - start, evaluation=perf_counter() - trained, **parts),
            )
        )
        self._report_stage("stage", len(self._trace.stages), self._trace.stages[-1], self.matrices["test"].acc)

    # ----------------------------------------------------------------------------------------------- save and restore

    @property
    def not_resumable(self) -> list[str]:
        """Names of plugins whose state cannot be saved. A run with one of them restarts from its first task."""
        return not_resumable(self.strategy, stateless=self._stateless)

    def state(self) -> dict[str, Any]:
        """Return everything that later tasks depend on, and the record so far."""
        return {
            "key": self.key,
            "finished": len(self.tasks),
            "strategy": strategy_state(self.strategy, stateless=self._stateless),
            "record": self.record().to_json(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state into a new session. If this fails, the session may be half loaded: create another one."""
        record = parse_record(state["record"], "the record in the checkpoint")
        n = int(state["finished"])
        load_strategy_state(self.strategy, state["strategy"], self.stream.train_stream[:n], stateless=self._stateless)
        self.tasks, self.resumed = list(record.tasks), [*record.resumed, n]

    def endpoints(self) -> tuple[int, dict[str, Any]] | None:
        """Return the task and the weights of its merge, or None if there was no merge or its weights are not kept."""
        for plugin in self.method_plugins:
            if isinstance(plugin, BecameMergePlugin) and (last := plugin.last_merge) is not None:
                return last.t, {
                    "anchor": dict(last.anchor),
                    "base": dict(last.base),
                    "candidate": dict(last.candidate),
                    "coefficient": plugin.merges[-1].coefficient,
                }
        return None

    def record(self, status: Status | None = None, error: str | None = None) -> Record:
        """Return the measurements so far.

        :param status: status of the run (default: ``running`` or ``done``).
        :param error: traceback of a run that ended early.
        """
        merging = [plugin for plugin in self.method_plugins if isinstance(plugin, BecameMergePlugin)]
        return Record(
            key=self.key,
            spec=self.spec.completed().model_dump(mode="json"),
            method=self.spec.method.name,
            label=self.spec.method.shown,
            references=self.references,
            status=status or ("done" if self.finished else "running"),
            error=error,
            accuracy={name: _matrix(matrix) for name, matrix in self.matrices.items()},
            tasks=self.tasks,
            merges=[merge for plugin in merging for merge in plugin.merges],
            peak_memory_bytes=_peak_memory(torch.device(self.spec.device)),
            environment=environment(),
            resumed=self.resumed,
        )

    def _test_data(self, experience: Any) -> Any:
        return self.stream.streams["test"][experience.current_experience].dataset

    def _report_stage(self, kind: Any, stage: int, trace: dict[str, Any], accuracy: float | None = None) -> None:
        task = len(self.tasks) + (accuracy is None)
        self._report(Event(self._event_key, kind, task, stage, trace["epochs"], accuracy, sum(trace["seconds"])))


def _matrix(matrix: AccuracyMatrix) -> Matrix:
    """Return the accuracies as plain values. They are empty if a run ended in its first training."""
    return [[finite(value) for value in row] for row in matrix.result().tolist() if row]


# ------------------------------------------------------------------------------------------------------------- run


def train(
    benchmark: str | RunSpec,
    method: str | Method = "gpm+became",
    seed: int = 0,
    *,
    n_tasks: int | None = None,
    max_epochs: int | None = None,
    dataset_root: str | PathLike[str] | None = None,
    device: str = "cpu",
    threads: int = 1,
    plugins: Sequence[SupervisedPlugin] = (),
    loggers: Sequence[BaseLogger] = (),
    metrics: Sequence[Any] = (),
) -> Record:
    """Train a method on a benchmark, task by task, and return the record of the run.

    The seed determines the tasks, the initial weights and the order of the data. Two runs with the same seed give the
    same numbers, independent of earlier runs in the process. Nothing is written to disk; ``became study`` and
    ``became compare`` keep runs in folders and can resume them.

    :param benchmark: a name (``became presets`` lists them) or a ``RunSpec``. A ``RunSpec`` already holds ``method``,
        ``seed``, ``n_tasks``, ``max_epochs``, ``device`` and ``threads``, so these cannot be passed with it.
    :param method: a name, such as ``gpm+became``, or a ``Method`` with its own options.
    :param seed: the seed.
    :param n_tasks: number of tasks to train (default: all).
    :param max_epochs: maximum number of epochs per stage (default: as the recipe says).
    :param dataset_root: folder of data sets, for a benchmark that reads files (``became data`` lists them).
    :param device: device to train on.
    :param threads: CPU threads of torch.
    :param plugins: further plugins, which only observe the training.
    :param loggers: Avalanche loggers.
    :param metrics: further Avalanche metrics for the loggers.

    >>> from became_avalanche import METRICS, train
    >>> record = train("split-digits", "gpm+became", n_tasks=1, max_epochs=1)
    >>> record.status, METRICS["acc"].of(record) > 0.5
    ('done', True)
    """
    if isinstance(benchmark, RunSpec):
        spec = benchmark
        if (method, seed, n_tasks, max_epochs, device, threads) != ("gpm+became", 0, None, None, "cpu", 1):
            raise SpecError(
                "a RunSpec already holds method, seed, n_tasks, max_epochs, device and threads: set them there"
            )
    else:
        from became_avalanche.runs.catalogue import find_benchmark

        spec = find_benchmark(benchmark).spec(
            method, seed, n_tasks=n_tasks, max_epochs=max_epochs, device=device, threads=threads
        )
    spec.check()
    with limited_threads(spec.threads):
        session = Session(spec, data=dataset_root, plugins=plugins, loggers=loggers, metrics=metrics)
        while not session.finished:
            session.step()
        return session.record()

"""One run in steps: train a task, evaluate, save, restore, record. There is no other place that trains."""

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
    """The Avalanche benchmark of a run.

    :param data: folder of data sets, for a stream that reads files.
    """
    function = spec.stream.function()
    options = dict(spec.stream.options)
    if "n_tasks" in options_of(function):
        options["n_tasks"] = spec.stream.n_tasks
    if spec.stream.reads_files:
        if data is None:
            raise SpecError(f"{spec.benchmark} reads data sets from disk; name their folder")
        options.update(dataset_root=data, device=spec.device)
    try:
        return function(seed=spec.seed, **options)
    except TypeError as error:
        raise SpecError(f"the stream {spec.stream.name} cannot be made with {options}: {error}") from error
    except (FileNotFoundError, ValueError) as error:
        raise SpecError(str(error)) from error


def make_network(spec: RunSpec) -> nn.Module:
    """The network of a run with fresh weights."""
    network: nn.Module = find("network", spec.network.name, NETWORKS)(**spec.network.options)
    return network.to(memory_format=torch.channels_last) if spec.network.channels_last else network


@cache
def environment() -> dict[str, str]:
    """Everything about the machine that may decide a number."""
    packages = ("torch", "torchvision", "avalanche-lib", "numpy", "became-avalanche")
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "machine": platform.machine(),
        **({"commit": commit.stdout.strip()} if commit.returncode == 0 else {}),
    }


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@contextmanager
def limited_threads(n: int) -> Iterator[None]:
    """A context in which torch uses ``n`` threads on the CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _flat(metrics: Sequence[Any]) -> Iterator[Any]:
    """The metrics in a list of metrics and lists of metrics, as Avalanche takes it."""
    for metric in metrics:
        yield from _flat(metric) if isinstance(metric, Sequence) else (metric,)


# ---------------------------------------------------------------------------------------------------------- session


class Session:
    """A run: its strategy, its stream, and what it has measured so far."""

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
        """Set up everything before the first task. The global random state is seeded.

        :param spec: what to run.
        :param data: folder of data sets, for a benchmark that reads files.
        :param plugins: further plugins that watch the training and have no state of their own.
        :param loggers: Avalanche loggers.
        :param metrics: further Avalanche metrics for the loggers.
        :param keep: ``endpoints`` keeps the weights of each merge in ``endpoints``.
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
        self._watching = [self._trace, *plugins]
        self._stateless = [*self._watching, *_flat(metrics)]
        self.strategy = (JointTraining if spec.method.joint else Naive)(
            model=model,
            optimizer=recipe.optimizer(model),
            criterion=nn.CrossEntropyLoss(),
            plugins=[*self.method_plugins, *schedule, *self._watching],
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
        """Whether all tasks are learned."""
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
        """Names of plugins whose state cannot be saved; a run with such a plugin restarts from its first task."""
        return not_resumable(self.strategy, stateless=self._stateless)

    def state(self) -> dict[str, Any]:
        """Everything that the tasks to come depend on, and the record so far."""
        return {
            "key": self.key,
            "finished": len(self.tasks),
            "strategy": strategy_state(self.strategy, stateless=self._stateless),
            "record": self.record().to_json(),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue a fresh session from a state. If it fails, the session may be half loaded: make a new one."""
        record = parse_record(state["record"], "the record in the checkpoint")
        n = int(state["finished"])
        load_strategy_state(self.strategy, state["strategy"], self.stream.train_stream[:n], stateless=self._stateless)
        self.tasks, self.resumed = list(record.tasks), [*record.resumed, n]

    def endpoints(self) -> tuple[int, dict[str, Any]] | None:
        """The task and the weights of its merge, if they are kept and there was one in this task."""
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
        """What was measured so far.

        :param status: ``running`` or ``done`` by default.
        :param error: the traceback of a run that ended early.
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
    """The accuracies as plain values. A run that ends in its first training has measured none."""
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
    """Train a method on a benchmark, task by task, and return what it measured.

    The seed decides on the tasks, the initial weights and the order of the data: two runs with the same seed give the
    same numbers, whatever ran before. Nothing is written to disk; ``became study`` and ``became compare`` keep runs in
    folders and resume them.

    :param benchmark: a name (``became presets`` lists them); or a whole specification, which already says what the
        parameters from ``method`` to ``max_epochs``, ``device`` and ``threads`` would.
    :param method: a name, such as ``gpm+became``, or a ``Method`` with options of its own.
    :param seed: the seed.
    :param n_tasks: number of tasks to train; all by default.
    :param max_epochs: at most this many epochs per stage; by default as many as the recipe says.
    :param dataset_root: folder of data sets, for a benchmark that reads files (``became data`` lists them).
    :param device: where to train.
    :param threads: threads of torch.
    :param plugins: further plugins that watch the training.
    :param loggers: Avalanche loggers.
    :param metrics: further Avalanche metrics for the loggers.
    """
    if isinstance(benchmark, RunSpec):
        spec = benchmark
        if (method, seed, n_tasks, max_epochs, device, threads) != ("gpm+became", 0, None, None, "cpu", 1):
            raise SpecError(
                "a specification holds method, seed, n_tasks, max_epochs, device and threads: set them there"
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

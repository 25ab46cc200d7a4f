"""One run in steps: train a task, evaluate, save, restore, record. There is no other place that trains."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

import torch
from avalanche.logging import BaseLogger
from avalanche.training.determinism.rng_manager import RNGManager
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.supervised import JointTraining, Naive
from avalanche.training.templates import SupervisedTemplate
from torch import nn

from became_avalanche.metrics.accuracy import AccuracyMatrix
from became_avalanche.plugins.merge import BecameMergePlugin
from became_avalanche.plugins.plateau import PlateauPlugin
from became_avalanche.plugins.projection import GradientProjectionPlugin
from became_avalanche.results.record import (
    Matrix,
    Record,
    RecordError,
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
from became_avalanche.runs.store import RunFolder, Store, StoreError
from became_avalanche.strategy.allocator import keep_freed_memory
from became_avalanche.strategy.checkpoint import load_strategy_state, not_resumable, strategy_state
from became_avalanche.strategy.divergence import DivergenceError
from became_avalanche.strategy.passes import data_pass
from became_avalanche.strategy.protocols import StageAware
from became_avalanche.strategy.state import StatefulPlugin
from became_avalanche.strategy.statefile import StateFileError

if TYPE_CHECKING:
    from became_avalanche.logging.wandb import WandBLogger

Keep = Literal["checkpoint", "endpoints"]


@dataclass(frozen=True)
class Local:
    """What a run needs beside its specification: it decides no number and may differ from machine to machine."""

    data: str | PathLike[str] | None = None
    """Folder of data sets."""
    keep: Keep = "checkpoint"
    """``endpoints`` keeps θ*_{t-1}, θ_GP and θ̂ of every merge, too."""
    wandb: str | None = None
    """Project of Weights & Biases to log to."""
    group: str | None = None
    """Its group of runs."""


DEFAULT_LOCAL = Local()


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
def _threads(n: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(n)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Trace(SupervisedPlugin, StageAware):
    """Notes loss, learning rate and time of each epoch of each stage, and the accuracy after the first epoch."""

    def __init__(self, plateau: PlateauPlugin | None, first_epoch_data: Any, report: Any) -> None:
        super().__init__()
        self.plateau, self.first_epoch_data, self.report = plateau, first_epoch_data, report
        self.stages: list[dict[str, Any]] = []
        self.first_epoch_accuracy: float | None = None

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self.stages, self.first_epoch_accuracy = [], None
        self._start_stage()

    def on_stage_start(self, strategy: SupervisedTemplate, stage: int) -> None:
        """Note a further stage of the same task."""
        if stage > 1:
            self.report("stage", stage - 1, self.stages[-1])
            self._start_stage()

    def _start_stage(self) -> None:
        self.stages.append({"epochs": 0, **{name: [] for name in StageRecord.model_fields if name != "epochs"}})

    def before_training_epoch(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._start, self._total, self._samples = perf_counter(), 0.0, 0
        self._rate = strategy.optimizer.param_groups[0]["lr"]

    def after_training_iteration(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        size = len(strategy.mb_y)
        self._total = self._total + size * strategy.loss.detach()  # stays on the device
        self._samples += size

    def after_training_epoch(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        stage = self.stages[-1]
        stage["epochs"] += 1
        stage["training_loss"].append(_finite(float(self._total) / max(1, self._samples)))
        if self.plateau is not None:
            stage["validation_loss"].append(_finite(self.plateau.last_loss))
        stage["learning_rate"].append(self._rate)
        stage["seconds"].append(perf_counter() - self._start)
        if len(self.stages) == 1 and stage["epochs"] == 1 and self.first_epoch_data is not None:
            self.first_epoch_accuracy = _accuracy(strategy, self.first_epoch_data(strategy.experience))
        self.report("epoch", len(self.stages), stage)


@torch.no_grad()
def _accuracy(strategy: SupervisedTemplate, dataset: Any) -> float:
    right = samples = 0
    with data_pass(strategy, dataset, strategy.eval_mb_size) as batches:
        for size in batches:
            right += int((strategy.mb_output.argmax(-1) == strategy.mb_y).sum())
            samples += size
    return right / samples


def _flat(metrics: Sequence[Any]) -> Iterator[Any]:
    """The metrics in a list of metrics and lists of metrics, as Avalanche takes it."""
    for metric in metrics:
        yield from _flat(metric) if isinstance(metric, Sequence) else (metric,)


def _finite(value: float | None) -> float | None:
    return None if value is None or value != value or value in (float("inf"), float("-inf")) else value


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
        self._trace = _Trace(
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
    return [[_finite(value) for value in row] for row in matrix.result().tolist()]


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
    with _threads(spec.threads):
        session = Session(spec, data=dataset_root, plugins=plugins, loggers=loggers, metrics=metrics)
        while not session.finished:
            session.step()
        return session.record()


def run(
    spec: RunSpec,
    store: Store,
    local: Local = DEFAULT_LOCAL,
    report: Report = ignore,
    patience: float = 1.0,
) -> Record:
    """Bring a run to its end in its folder, and return its record.

    A finished run is returned as it is. An interrupted one continues after its last finished task. A training that
    diverges or fails ends with such a record; only what keeps the folder from being used raises an error (StoreError,
    RecordError, SpecError).

    :param spec: what to run.
    :param store: the folder of runs.
    :param local: what the run needs beside its specification.
    :param report: is called with the events of the run.
    :param patience: seconds to wait for another process that trains this run.
    """
    folder = store.open(spec)
    with folder.locked(patience), _threads(spec.threads):
        existing = folder.record()
        if existing is not None and existing.finished:
            return existing
        folder.keep_spec(spec)
        references = store.references(spec)
        logger = _wandb_logger(spec, folder, local)
        session: Session | None = None

        def start() -> Session:
            nonlocal session
            session = Session(
                spec,
                data=local.data,
                keep=local.keep,
                report=report,
                loggers=[logger] if logger else (),
                metrics=_logged_metrics() if logger else (),
            )
            session.key, session.references = folder.path.name, references
            return session

        try:
            record = _train_in(folder, start, local, report)
        except DivergenceError:
            record = _ended(spec, folder, session, "diverged")
        except (KeyboardInterrupt, SystemExit):
            with suppress(StoreError):
                folder.log("interrupted")
            _finish(logger, None)
            raise
        except (StoreError, RecordError, SpecError):
            _finish(logger, None)
            raise
        except Exception:
            record = _ended(spec, folder, session, "failed")
        folder.save_record(record)
        if record.status == "done":
            folder.forget_checkpoints(before=len(record.tasks))
        folder.log(record.status if record.error is None else f"{record.status}\n{record.error}")
        _finish(logger, record)
        return record


def _train_in(folder: RunFolder, start: Callable[[], Session], local: Local, report: Report) -> Record:
    """Train what is missing, with a checkpoint after each task."""
    session, notes = _restored(folder, start)
    for note in notes:
        folder.log(note)
        report(Event(session.spec.key(), "note", text=note))
    finished = len(session.tasks)
    if finished:
        report(Event(session.spec.key(), "resumed", finished))
    folder.log(f"resumed after {finished} tasks" if finished else f"started: {session.key}")
    resumable = not session.not_resumable
    while not session.finished:
        session.step()
        if local.keep == "endpoints" and (kept := session.endpoints()) is not None:
            folder.save_endpoints(*kept)
        if resumable:
            folder.save_checkpoint(len(session.tasks), session.state())
        if not session.finished:
            folder.save_record(session.record())
    return session.record()


def _restored(folder: RunFolder, start: Callable[[], Session]) -> tuple[Session, list[str]]:
    """A session that continues from the newest sound checkpoint, and what is wrong with newer ones.

    :param start: makes a fresh session.
    """
    session, notes = start(), []
    for path in [] if session.not_resumable else folder.checkpoints():
        try:
            session.load(folder.read_checkpoint(path))
            break
        except StateFileError as error:
            notes.append(f"checkpoint ignored: {error}")
        except Exception as error:  # a sound file with a state of another version of a plugin
            notes.append(f"checkpoint ignored: {path} cannot be loaded: {error!r}")
            session = start()
    return session, notes


def _ended(spec: RunSpec, folder: RunFolder, session: Session | None, status: Status) -> Record:
    """The record of a run that ended early, with the traceback of the error being handled."""
    error = traceback.format_exc()
    if session is not None:
        return session.record(status, error)
    return Record(
        key=folder.path.name,
        spec=spec.completed().model_dump(mode="json"),
        method=spec.method.name,
        label=spec.method.shown,
        references=spec.references,
        status=status,
        error=error,
        environment=environment(),
    )


def _wandb_logger(spec: RunSpec, folder: RunFolder, local: Local) -> WandBLogger | None:
    if local.wandb is None:
        return None
    from became_avalanche.logging.wandb import WandBLogger

    try:
        return WandBLogger(
            local.wandb,
            name=f"{spec.method.label or spec.method.name}-{spec.seed}",
            group=local.group or spec.benchmark,
            config=spec.completed().model_dump(mode="json"),
            directory=folder.path,
        )
    except RuntimeError as error:
        raise StoreError(str(error)) from None


def _logged_metrics() -> list[Any]:
    from avalanche.evaluation.metrics import loss_metrics

    return [loss_metrics(epoch=True)]


def _finish(logger: WandBLogger | None, record: Record | None) -> None:
    """End the run of Weights & Biases, with the result of a run that is done."""
    if logger is None:
        return
    if record is not None and record.status == "done":
        import numpy as np

        from became_avalanche.results.figures import run_figure
        from became_avalanche.results.metrics import METRICS

        values = {name.upper(): METRICS[name].of(record) for name in ("acc", "bwt")}
        summary = {name: value for name, value in values.items() if value is not None}
        accuracy = np.array(record.accuracy["test"], dtype=float)
        logger.log_result(accuracy=accuracy, picture=run_figure(record), summary=summary)
    logger.finish(exit_code=0 if record is not None and record.status == "done" else 1)

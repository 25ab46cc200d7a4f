"""Engines train many runs: in this process, in local processes, or on a Ray cluster."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.util import find_spec
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from became_avalanche.files import UserError
from became_avalanche.results.record import Record, parse_record
from became_avalanche.runs.progress import Event, Report
from became_avalanche.runs.spec import RunSpec, SpecError
from became_avalanche.runs.store import Store

if TYPE_CHECKING:
    from became_avalanche.runs.run import Local
    from became_avalanche.runs.worker import Message


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a record, or with a problem that prevented it or killed its process."""

    spec: RunSpec
    record: Record | None = None
    problem: str | None = None


class Engine(Protocol):
    """Trains many runs."""

    def run(self, specs: Sequence[RunSpec], store: Store, local: Local, report: Report) -> Iterator[Outcome]:
        """Train each run and yield its outcome as soon as it ends. A failure does not stop the other runs.

        :param specs: the specifications, in the order in which to start the runs.
        :param store: the folder of runs.
        :param local: settings that do not affect results.
        :param report: is called with the events of all runs, one at a time, in the calling process.
        """
        ...


def _outcome(spec: RunSpec, message: Message) -> Outcome:
    kind, text = message
    return Outcome(spec, parse_record(text)) if kind == "record" else Outcome(spec, problem=text)


class Inline:
    """One run after the other in this process.

    >>> from pathlib import Path
    >>> from became_avalanche import Inline, Store, find_benchmark
    >>> from became_avalanche.runs.progress import ignore
    >>> from became_avalanche.runs.run import Local
    >>> specs = [find_benchmark("split-digits").spec("gpm", n_tasks=1, max_epochs=1)]
    >>> [outcome.record.status for outcome in Inline().run(specs, Store(Path("runs")), Local(), report=ignore)]
    ['done']
    """

    def run(self, specs: Sequence[RunSpec], store: Store, local: Local, report: Report) -> Iterator[Outcome]:
        from became_avalanche.runs.worker import run_one

        for spec in specs:
            yield _outcome(spec, run_one(spec, store, local, report))


# -------------------------------------------------------------------------------------------------- local processes


class Processes:
    """Several runs at a time in local processes.

    If a worker is killed, only its own run fails. Data sets are read once, in this process, and shared with the
    workers. The workers end when this process ends.
    """

    def __init__(self, workers: int | None = None) -> None:
        """Start a process that imports torch and Avalanche. Workers are forked from it later.

        :param workers: number of runs at a time (default: one per processor).
        """
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1; got {workers}")
        self.workers = workers or _processors()
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["became_avalanche.runs.worker"])
        with _interrupts_blocked():
            forkserver.ensure_running()

    def run(self, specs: Sequence[RunSpec], store: Store, local: Local, report: Report) -> Iterator[Outcome]:
        waiting, n = list(specs), min(self.workers, len(specs))
        threads = max((spec.threads for spec in specs), default=1)
        if n * threads > _processors():
            warnings.warn(
                f"{n * threads} threads ({n} workers x {threads}) would share {_processors()} processor(s); use fewer "
                "workers or threads",
                stacklevel=2,
            )
        data = _shared_data(specs, local)
        workers: list[_Worker] = []
        try:
            while waiting or workers:
                while waiting and len(workers) < n:
                    workers.append(_Worker(self._context, data))
                    workers[-1].start(waiting.pop(0), store, local)
                ready = wait([worker.connection for worker in workers])
                for worker in [worker for worker in workers if worker.connection in ready]:
                    outcome = worker.receive(report)
                    if outcome is None:
                        continue
                    if worker.alive and waiting:
                        worker.start(waiting.pop(0), store, local)
                    else:
                        worker.stop()
                        workers.remove(worker)
                    yield outcome
        finally:
            for worker in workers:
                worker.stop()


class _Worker:
    """A worker process and the run that it trains."""

    def __init__(self, context: Any, data: Any) -> None:
        self.spec: RunSpec | None = None
        self.alive = True
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, data))
        with _interrupts_blocked():
            self.process.start()
        theirs.close()

    def start(self, spec: RunSpec, store: Store, local: Local) -> None:
        """Let the process train a run."""
        self.spec = spec
        with suppress(OSError):  # if the process is gone, ``receive`` reports it
            self.connection.send((spec.model_dump(mode="json"), str(store.root), local))

    def receive(self, report: Report) -> Outcome | None:
        """Wait for a message. Pass it to ``report`` if it is an event; otherwise return the outcome of the run."""
        assert self.spec is not None
        try:
            message = self.connection.recv()
        except (EOFError, OSError):
            self.alive = False
            problem = "its process was killed (out of memory?); rerun the same command to resume it"
            return Outcome(self.spec, problem=problem)
        if message[0] == "event":
            report(Event(**message[1]))
            return None
        spec, self.spec = self.spec, None
        return _outcome(spec, message)

    def stop(self) -> None:
        """End the process. An unfinished run can be resumed after its last finished task."""
        if self.spec is not None:
            self.process.kill()
        self.connection.close()
        self.process.join()
        self.process.close()


def _serve(*arguments: Any) -> None:
    """Serve runs in a worker process. The import is here because it imports torch, which this module avoids."""
    from became_avalanche.runs.worker import serve

    serve(*arguments)


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Start processes in this context to protect them from Ctrl-C. Their parent ends them instead."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _processors() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _shared_data(specs: Sequence[RunSpec], local: Local) -> Any:
    """Load the data sets that the runs read, in memory that worker processes can share."""
    streams = {spec.stream.name: spec for spec in specs if spec.stream.reads_files and spec.device == "cpu"}
    if not streams:
        return {}
    import_module("torch.multiprocessing")  # after this import, tensors are sent to workers in shared memory
    from became_avalanche.benchmarks.files import loaded
    from became_avalanche.runs.session import open_stream

    for spec in streams.values():
        with suppress(SpecError):  # the run itself reports the error
            open_stream(spec, local.data)
    return loaded()


# --------------------------------------------------------------------------------------------------------------- Ray


class Ray:
    """Several runs at a time on a Ray cluster (``pip install 'became-avalanche[ray]'``).

    A run that loses its node starts again on another node. It resumes from its checkpoint if both nodes share the
    folder of runs. If the driver does not share that folder, records are copied to the driver's own folder.
    """

    RETRIES = 3
    """Maximum number of times that a run starts again after it has lost its node."""
    PATIENCE = 60.0
    """Seconds to wait for the lock of a run, which a process on a lost node may still hold."""

    def __init__(self, address: str | None = None, gpus_per_run: float = 1) -> None:
        """Choose a cluster. ``run`` connects to it.

        :param address: address of a running cluster; ``auto`` finds one on this machine. By default, a new cluster is
            started on this machine.
        :param gpus_per_run: number of GPUs, or fraction of one, for each run on ``cuda``. Each run also takes as many
            processors as it has threads.
        """
        if find_spec("ray") is None:
            raise SpecError("Ray is not installed; install it with: pip install 'became-avalanche[ray]'")
        self.address, self.gpus_per_run = address, gpus_per_run

    def run(self, specs: Sequence[RunSpec], store: Store, local: Local, report: Report) -> Iterator[Outcome]:
        import ray
        from ray.util.queue import Queue
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        started = not ray.is_initialized()
        if started:
            path = os.pathsep.join(entry for entry in sys.path if entry)
            ray.init(self.address, runtime_env={"env_vars": {"PYTHONPATH": path}}, log_to_driver=False)
        here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
        events = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": here})  # survives the loss of other nodes
        work = ray.remote(max_retries=self.RETRIES)(_ray_work)
        root = str(store.root.resolve())
        if local.data is not None:
            local = replace(local, data=Path(local.data).resolve())
        waiting: dict[Any, RunSpec] = {}
        try:
            for spec in specs:
                gpus = self.gpus_per_run if spec.device.startswith("cuda") else 0
                task = work.options(num_cpus=spec.threads, num_gpus=gpus)
                waiting[task.remote(spec.model_dump(mode="json"), root, local, events, self.PATIENCE)] = spec
            while waiting:
                ready, _ = ray.wait(list(waiting), timeout=0.5)
                for event in events.get_nowait_batch(events.qsize()):
                    report(Event(**event))
                for reference in ready:
                    yield _ray_outcome(waiting.pop(reference), reference, store)
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)
            events.shutdown(force=True)
            if started:
                ray.shutdown()


def _ray_work(content: dict[str, Any], root: str, local: Local, events: Any, patience: float) -> Message:
    """Train one run on a node of the cluster."""
    from became_avalanche.runs.worker import run_one

    def report(event: Event) -> None:
        events.actor.put_nowait.remote(vars(event))  # without waiting: Ray gives away the processors of a waiting task

    return run_one(RunSpec.model_validate(content), Store(Path(root)), local, report, patience)


def _ray_outcome(spec: RunSpec, reference: Any, store: Store) -> Outcome:
    """Return the outcome of a run on the cluster, and save its record in the driver's folder."""
    import ray

    try:
        outcome = _outcome(spec, ray.get(reference))
    except ray.exceptions.RayError as error:
        return Outcome(spec, problem=f"lost on the cluster: {str(error).splitlines()[0]}")
    if outcome.record is not None:
        try:
            _save_record(spec, outcome.record, store)
        except UserError as error:
            return Outcome(spec, problem=f"the run ended on the cluster, but its record cannot be saved: {error}")
    return outcome


def _save_record(spec: RunSpec, record: Record, store: Store) -> None:
    """Save a record in the driver's folder, unless the node has written it there because both share the folder."""
    folder = store.open(spec)
    if folder.record() != record:
        with folder.locked():
            folder.keep_spec(spec)
            folder.save_record(record.model_copy(update={"key": folder.path.name}))


ENGINES: dict[str, Callable[..., Engine]] = {"inline": Inline, "processes": Processes, "ray": Ray}

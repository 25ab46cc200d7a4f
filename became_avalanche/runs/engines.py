"""Engines: specifications in, records or problems out. In this process, in local processes, or on a Ray cluster."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from became_avalanche.files import write_atomically
from became_avalanche.results.record import Record, RecordError, parse_record
from became_avalanche.runs.progress import Event, Report
from became_avalanche.runs.spec import RunSpec, SpecError
from became_avalanche.runs.store import Store, StoreError

if TYPE_CHECKING:
    from became_avalanche.runs.session import Local


@dataclass(frozen=True)
class Outcome:
    """How a run ended: with a record, or with a problem that kept it from running or killed its process."""

    spec: RunSpec
    record: Record | None = None
    problem: str | None = None


class Engine(Protocol):
    """Runs many specifications."""

    def run(self, specs: Sequence[RunSpec], store: Store, local: Local, report: Report) -> Iterator[Outcome]:
        """Bring each run to its end and yield its outcome when it is there. A failure does not stop the others.

        :param specs: what to run, in this order.
        :param store: the folder of runs.
        :param local: what a run needs beside its specification.
        :param report: is called with the events of all runs, one at a time, in the calling process.
        """
        ...


def _run_one(spec: RunSpec, store: Store, local: Local, report: Report) -> Outcome:
    from became_avalanche.runs.session import run

    try:
        return Outcome(spec, run(spec, store, local, report))
    except (StoreError, RecordError, SpecError) as error:
        return Outcome(spec, problem=str(error))


class Inline:
    """One run after the other in this process."""

    def run(self, specs: Sequence[RunSpec], store: Store, local: Local, report: Report) -> Iterator[Outcome]:
        for spec in specs:
            yield _run_one(spec, store, local, report)


# -------------------------------------------------------------------------------------------------- local processes


class Processes:
    """Several runs at a time in local processes.

    Each worker is an executor of its own with one process, so a worker that is killed fails one run and no other. Data
    sets are read once, in this process, and shared with the workers.
    """

    def __init__(self, workers: int | None = None) -> None:
        """Init.

        :param workers: runs at a time; by default one per processor.
        """
        if workers is not None and workers < 1:
            raise ValueError(f"workers must be at least 1; got {workers}")
        self.workers = workers or os.cpu_count() or 1

    def run(self, specs: Sequence[RunSpec], store: Store, local: Local, report: Report) -> Iterator[Outcome]:
        waiting, n = list(specs), min(self.workers, len(specs))
        threads = max((spec.threads for spec in specs), default=1)
        if n * threads > (os.cpu_count() or 1):
            warnings.warn(
                f"{n} workers with {threads} threads each share {os.cpu_count()} processors: use fewer of them",
                stacklevel=2,
            )
        data = _shared_data(specs, local)
        slots = [_Slot(data) for _ in range(n)]
        try:
            while waiting or any(slot.spec for slot in slots):
                for slot in slots:
                    if slot.spec is None and waiting:
                        slot.start(waiting.pop(0), store, local)
                wait([slot.future for slot in slots if slot.future], timeout=0.1, return_when=FIRST_COMPLETED)
                for slot in slots:
                    slot.pass_on(report)
                    if (outcome := slot.outcome()) is not None:
                        slot.pass_on(report)
                        yield outcome
        finally:
            for slot in slots:
                slot.stop()


class _Slot:
    """One worker, and the run that it trains."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.spec: RunSpec | None = None
        self.future: Future[tuple[str, str]] | None = None
        self._open()

    def _open(self) -> None:
        import torch.multiprocessing  # its pickler hands tensors over in shared memory

        context = torch.multiprocessing.get_context("spawn")
        self.events, sender = context.Pipe(duplex=False)
        self.executor = ProcessPoolExecutor(1, context, initializer=_start_worker, initargs=(sender, self.data))
        self.sender = sender  # kept open here, because the process starts with the first run

    def start(self, spec: RunSpec, store: Store, local: Local) -> None:
        self.spec = spec
        self.future = self.executor.submit(_work, spec.model_dump(mode="json"), str(store.root), local)

    def pass_on(self, report: Report) -> None:
        try:
            while self.events.poll():
                report(Event(**self.events.recv()))
        except (EOFError, OSError):
            pass

    def outcome(self) -> Outcome | None:
        if self.future is None or self.spec is None or not self.future.done():
            return None
        spec, future = self.spec, self.future
        self.spec = self.future = None
        try:
            kind, text = future.result()
        except BrokenProcessPool:
            self.stop()
            self._open()
            problem = "its process was killed (out of memory?); rerun the same command to resume it"
            return Outcome(spec, problem=problem)
        return Outcome(spec, parse_record(text)) if kind == "record" else Outcome(spec, problem=text)

    def stop(self) -> None:
        processes = list((self.executor._processes or {}).values())
        for process in processes:
            process.terminate()
        self.executor.shutdown(wait=True, cancel_futures=True)
        self.events.close()
        self.sender.close()


_sender: Connection | None = None


def _start_worker(sender: Connection, data: Any) -> None:
    """In a worker: the parent decides when it ends, and holds the data sets."""
    global _sender
    _sender = sender
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _quiet()
    from became_avalanche.benchmarks.files import share_loaded

    share_loaded(data)


def _work(content: dict[str, Any], root: str, local: Local) -> tuple[str, str]:
    """In a worker: train one run."""

    def report(event: Event) -> None:
        if _sender is not None:
            _sender.send(vars(event))

    outcome = _run_one(RunSpec.model_validate(content), Store(Path(root)), local, report)
    if outcome.record is not None:
        return "record", outcome.record.to_json()
    return "problem", outcome.problem or ""


def _shared_data(specs: Sequence[RunSpec], local: Local) -> Any:
    """The data sets that the runs read, loaded in this process."""
    from became_avalanche.benchmarks.files import loaded
    from became_avalanche.runs.session import open_stream

    streams = {spec.stream.name: spec for spec in specs if spec.stream.reads_files and spec.device == "cpu"}
    for spec in streams.values():
        open_stream(spec, local.data)
    return loaded()


def _quiet() -> None:
    """Silence Avalanche, which warns on import that GEM, which is not used here, lacks a solver."""
    warnings.filterwarnings("ignore", message="no QP solver found")


# --------------------------------------------------------------------------------------------------------------- Ray


class Ray:
    """Several runs at a time on a Ray cluster (``pip install became-avalanche[ray]``).

    A run that loses its node is started again on another one and resumes from its checkpoint, if both see the same
    folder of runs. Where the driver does not see it, records are brought back to the driver's own folder.
    """

    def __init__(self, address: str | None = None, gpus_per_run: float = 1) -> None:
        """Init.

        :param address: of a running cluster (``auto`` finds one on this machine); by default a new one on this machine.
        :param gpus_per_run: GPUs, or a fraction of one, that a run on ``cuda`` takes. Each run takes as many
            processors as it has threads.
        """
        try:
            import ray  # noqa: F401
        except ImportError:
            raise SpecError("Ray is not installed; install it with: pip install 'became-avalanche[ray]'") from None
        self.address, self.gpus_per_run = address, gpus_per_run

    def run(self, specs: Sequence[RunSpec], store: Store, local: Local, report: Report) -> Iterator[Outcome]:
        import ray
        from ray.util.queue import Queue

        started = not ray.is_initialized()
        if started:
            path = os.pathsep.join(entry for entry in sys.path if entry)
            ray.init(self.address, runtime_env={"env_vars": {"PYTHONPATH": path}}, log_to_driver=False)
        events = Queue()
        work = ray.remote(max_retries=3)(_ray_work)
        root = str(store.root.resolve())
        try:
            waiting = {
                work.options(
                    num_cpus=spec.threads, num_gpus=self.gpus_per_run if spec.device.startswith("cuda") else 0
                ).remote(spec.model_dump(mode="json"), root, local, events): spec
                for spec in specs
            }
            while waiting:
                ready, _ = ray.wait(list(waiting), timeout=0.5)
                while not events.empty():
                    report(Event(**events.get()))
                for reference in ready:
                    yield _ray_outcome(waiting.pop(reference), reference, store)
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)
            events.shutdown(force=True)
            if started:
                ray.shutdown()


def _ray_work(content: dict[str, Any], root: str, local: Local, events: Any) -> tuple[str, str]:
    """On a node of the cluster: train one run."""
    _quiet()
    outcome = _run_one(
        RunSpec.model_validate(content), Store(Path(root)), local, lambda event: events.put_nowait(vars(event))
    )
    if outcome.record is not None:
        return "record", outcome.record.to_json()
    return "problem", outcome.problem or ""


def _ray_outcome(spec: RunSpec, reference: Any, store: Store) -> Outcome:
    import ray

    try:
        kind, text = ray.get(reference)
    except ray.exceptions.RayError as error:
        return Outcome(spec, problem=f"lost on the cluster: {str(error).splitlines()[0]}")
    if kind != "record":
        return Outcome(spec, problem=text)
    folder = store.open(spec)
    if not folder.record_path.exists():  # the node has a file system of its own
        write_atomically(folder.record_path, text)
    return Outcome(spec, parse_record(text))


ENGINES: dict[str, Callable[..., Engine]] = {"inline": Inline, "processes": Processes, "ray": Ray}

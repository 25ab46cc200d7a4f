"""Train a run in its folder: lock it, resume after the last finished task, save the record."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING, Any

from became_avalanche.files import UserError
from became_avalanche.results.record import Record, Status
from became_avalanche.runs.progress import Event, Report, ignore
from became_avalanche.runs.session import Keep, Session, environment, limited_threads
from became_avalanche.runs.spec import RunSpec
from became_avalanche.runs.store import RunFolder, Store, StoreError
from became_avalanche.strategy.divergence import DivergenceError
from became_avalanche.strategy.statefile import StateFileError

if TYPE_CHECKING:
    from became_avalanche.logging.wandb import WandBLogger


@dataclass(frozen=True)
class Local:
    """Settings of a run that do not affect its results and may differ between machines."""

    data: str | PathLike[str] | None = None
    """Folder of data sets."""
    keep: Keep = "checkpoint"
    """``endpoints`` also keeps the weights θ*_{t-1}, θ_GP and θ̂ of every merge."""
    wandb: str | None = None
    """Weights & Biases project to log to."""
    group: str | None = None
    """Weights & Biases group of the run (default: the benchmark)."""


DEFAULT_LOCAL = Local()


def run(
    spec: RunSpec,
    store: Store,
    local: Local = DEFAULT_LOCAL,
    report: Report = ignore,
    patience: float = 1.0,
) -> Record:
    """Train a run in its folder, and return its record.

    The record of a finished run is returned without training. An interrupted run resumes after its last finished task.
    If the training diverges or fails, the record says so. An error is raised only if the run cannot be started or its
    folder cannot be used (StoreError, RecordError, SpecError).

    :param spec: the specification.
    :param store: the folder of runs.
    :param local: settings that do not affect results.
    :param report: is called with the events of the run.
    :param patience: seconds to wait if another process trains this run.
    """
    folder = store.open(spec)
    with folder.locked(patience), limited_threads(spec.threads):
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
            record = _train(folder, start, local, report, logger)
        except DivergenceError:
            record = _unfinished_record(spec, folder, session, "diverged")
        except (KeyboardInterrupt, SystemExit):
            with suppress(StoreError):
                folder.log("interrupted")
            _finish_logging(logger, None)
            raise
        except UserError:
            _finish_logging(logger, None)
            raise
        except Exception:
            record = _unfinished_record(spec, folder, session, "failed")
        folder.save_record(record)
        if record.status == "done":
            folder.delete_checkpoints(before=len(record.tasks))
        folder.log(record.status if record.error is None else f"{record.status}\n{record.error}")
        _finish_logging(logger, record)
        return record


def _train(
    folder: RunFolder, start: Callable[[], Session], local: Local, report: Report, logger: WandBLogger | None
) -> Record:
    """Train the remaining tasks, and save a checkpoint after each."""
    session, notes = _restore(folder, start)
    for note in notes:
        folder.log(note)
        report(Event(session.spec.key(), "note", text=note))
    finished = len(session.tasks)
    if finished:
        report(Event(session.spec.key(), "resumed", finished))
    folder.log(f"resumed after {finished} tasks" if finished else f"started: {session.key}")
    if logger is not None:
        _start_logging(logger, folder, resumed=finished > 0)
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


def _restore(folder: RunFolder, start: Callable[[], Session]) -> tuple[Session, list[str]]:
    """Return a session that resumes from the newest valid checkpoint, and notes on checkpoints that are not valid.

    :param start: creates a new session.
    """
    session, notes = start(), []
    for path in [] if session.not_resumable else folder.checkpoints():
        try:
            session.load(folder.read_checkpoint(path))
            break
        except StateFileError as error:
            notes.append(f"checkpoint ignored: {error}")
        except Exception as error:  # a valid file with the state of another version of a plugin
            notes.append(f"checkpoint ignored: {path} cannot be loaded: {error!r}")
            session = start()
    return session, notes


def _unfinished_record(spec: RunSpec, folder: RunFolder, session: Session | None, status: Status) -> Record:
    """Return the record of a run that ended early, with the traceback of the current exception."""
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

    return WandBLogger(
        local.wandb,
        name=f"{spec.method.shown}-{spec.seed}",
        group=local.group or spec.benchmark,
        job_type=spec.method.shown,
        config=spec.completed().model_dump(mode="json"),
        directory=folder.path,
        start=False,
    )


def _start_logging(logger: WandBLogger, folder: RunFolder, resumed: bool) -> None:
    """Resume the Weights & Biases run of this folder, or start a new one if the training starts from scratch."""
    try:
        logger.start(folder.wandb_id() if resumed else None)
    except RuntimeError as error:
        raise StoreError(str(error)) from None
    if logger.run is not None:
        folder.keep_wandb_id(logger.run.id)


def _logged_metrics() -> list[Any]:
    from avalanche.evaluation.metrics import loss_metrics

    return [loss_metrics(epoch=True)]


def _finish_logging(logger: WandBLogger | None, record: Record | None) -> None:
    """End the Weights & Biases run, and log the record if there is one."""
    if logger is None or logger.run is None:
        return
    if record is not None:
        logger.log_record(record)
    logger.finish(exit_code=0 if record is not None and record.status == "done" else 1)

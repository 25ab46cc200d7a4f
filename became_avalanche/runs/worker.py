"""Code of worker processes: train one run after the other, and report to the parent process.

Engines preload this module where they can, so it imports everything that a run needs.
"""

from __future__ import annotations

import os
import signal
import warnings
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Thread
from time import monotonic
from typing import TYPE_CHECKING, Any

with warnings.catch_warnings():
    # Avalanche warns on import that GEM, which is not used here, lacks a solver.
    warnings.filterwarnings("ignore", message="no QP solver found")
    from became_avalanche.benchmarks.files import share_loaded
    from became_avalanche.runs.run import run

from became_avalanche.files import UserError
from became_avalanche.runs.spec import RunSpec
from became_avalanche.runs.store import Store

if TYPE_CHECKING:
    from became_avalanche.runs.progress import Event, Report
    from became_avalanche.runs.run import Local

Message = tuple[str, Any]
"""``("event", fields)``, ``("record", JSON text)`` or ``("problem", message)``."""


def run_one(spec: RunSpec, store: Store, local: Local, report: Report, patience: float = 1.0) -> Message:
    """Train a run. Return its record, or the problem that prevented it."""
    try:
        return "record", run(spec, store, local, report, patience).to_json()
    except UserError as error:
        return "problem", str(error)
    except Exception as error:  # a bug of this package must not stop the other runs
        return "problem", f"{type(error).__name__}: {error}"


def serve(connection: Connection, data: Any) -> None:
    """Train the runs that come through the connection until it is closed.

    :param connection: receives a specification, the folder of runs and ``Local`` for each run; sends messages.
    :param data: data sets that the parent has loaded.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to stop
    Thread(target=_end_with_parent, daemon=True).start()
    share_loaded(data)
    while True:
        try:
            content, root, local = connection.recv()
        except EOFError:
            return
        spec = RunSpec.model_validate(content)
        connection.send(
            run_one(spec, Store(Path(root)), local, _throttled(lambda event: connection.send(("event", vars(event)))))
        )


def _throttled(report: Report) -> Report:
    """Drop most epoch events: people cannot read more than a few per second, and each costs the parent time."""
    last = 0.0

    def throttled(event: Event) -> None:
        nonlocal last
        if event.kind == "epoch":
            if monotonic() - last < 0.3:
                return
            last = monotonic()
        report(event)

    return throttled


def _end_with_parent() -> None:
    """End this process as soon as its parent has ended. This is safe: files are written completely or not at all."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)

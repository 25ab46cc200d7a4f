"""The folder of runs. Each run has one folder, which is locked during training. Finished runs are never overwritten."""

from __future__ import annotations

import fcntl
import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic, sleep
from typing import IO, Any

from became_avalanche.files import UserError, open_regular, read_file, write_atomically
from became_avalanche.results.record import Record, RecordError, References, read_record
from became_avalanche.runs.spec import RunSpec, SpecError, read_values

CHECKPOINT = "checkpoint"
WANDB_ID = "wandb-id.txt"


class StoreError(UserError, RuntimeError):
    """Raised if the folder of a run cannot be used: it is locked or cannot be written."""


class RunFolder:
    """The folder of one run.

    ``spec.json``     the complete specification
    ``record.json``   the status and the measurements so far
    ``log.txt``       when the run was started, resumed and finished, and its errors
    ``checkpoint-NNN.safetensors``  everything that later tasks depend on, after NNN finished trainings
    ``endpoints-NNN.safetensors``   θ*_{t-1}, θ_GP and θ̂ of the merge of task NNN, with ``--keep endpoints``
    ``wandb-id.txt``  the id of the Weights & Biases run, which is resumed together with this run
    ``lock``          held by the process that trains the run
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def record_path(self) -> Path:
        """Path of the record."""
        return self.path / "record.json"

    def record(self) -> Record | None:
        """Return the record, or None if there is none yet. Raises a RecordError if it is corrupt or of another run."""
        if not self.record_path.exists():
            return None
        record = read_record(self.record_path)
        if record.key != self.path.name:
            raise RecordError(f"{self.record_path} belongs to another run, {record.key}; move it away")
        return record

    def save_record(self, record: Record) -> None:
        """Write the record. Raises a StoreError instead of overwriting a finished record."""
        if (existing := self.record()) is not None and existing.finished:
            raise StoreError(f"{self.record_path} belongs to a finished run and is not overwritten")
        self._write("record.json", record.to_json())

    def keep_spec(self, spec: RunSpec) -> None:
        """Write ``spec.json`` unless it exists."""
        if not (self.path / "spec.json").exists():
            self._write("spec.json", spec.to_json())

    def wandb_id(self) -> str | None:
        """Return the id of the Weights & Biases run, or None if there is none."""
        path = self.path / WANDB_ID
        text = read_file(path).decode(errors="replace").strip() if path.exists() else ""
        return text if re.fullmatch(r"[\w-]{1,64}", text) else None

    def keep_wandb_id(self, run_id: str) -> None:
        """Save the id of the Weights & Biases run."""
        self._write(WANDB_ID, f"{run_id}\n")

    def log(self, text: str) -> None:
        """Append a line with the time to ``log.txt``."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with self._store_errors(), open(self.path / "log.txt", "a", opener=_open_no_link) as file:
            file.write(f"{now} {text.rstrip()}\n")

    def _write(self, name: str, content: str) -> None:
        with self._store_errors():
            write_atomically(self.path / name, content)

    # -------------------------------------------------------------------------------------------------- checkpoints

    def checkpoints(self) -> list[Path]:
        """Return the paths of the checkpoints, newest first."""
        return sorted(self.path.glob(f"{CHECKPOINT}-*.safetensors"), reverse=True)

    def read_checkpoint(self, path: Path) -> dict[str, Any]:
        """Return the state in a checkpoint. Raises a StateFileError if it is not a valid checkpoint of this run."""
        from became_avalanche.strategy.statefile import StateFileError, read_state

        state = read_state(path, kind=CHECKPOINT)
        if state.get("key") != self.path.name:
            raise StateFileError(f"{path} belongs to another run, {state.get('key')}")
        return state

    def save_checkpoint(self, n: int, state: dict[str, Any]) -> None:
        """Save the state after ``n`` finished trainings. The previous checkpoint stays in case this one is damaged."""
        from became_avalanche.strategy.statefile import write_state

        path = self._checkpoint(n)
        with self._store_errors():
            if path.exists():  # it could not be loaded: otherwise this task would not be trained again
                os.replace(path, _free_name(path))
            write_state(path, state, kind=CHECKPOINT)
            self.delete_checkpoints(before=n - 1)

    def delete_checkpoints(self, before: int) -> None:
        """Delete the checkpoints with fewer than ``before`` finished trainings."""
        for path in self.checkpoints():
            if path.name < self._checkpoint(before).name:
                path.unlink(missing_ok=True)

    def save_endpoints(self, t: int, state: dict[str, Any]) -> None:
        """Save the three weight vectors of the merge of task ``t``."""
        from became_avalanche.strategy.statefile import write_state

        with self._store_errors():
            write_state(self.path / f"endpoints-{t:03d}.safetensors", state, kind="endpoints")

    def _checkpoint(self, n: int) -> Path:
        return self.path / f"{CHECKPOINT}-{n:03d}.safetensors"

    # --------------------------------------------------------------------------------------------------------- lock

    @contextmanager
    def locked(self, patience: float = 1.0) -> Iterator[None]:
        """Lock the run in this context, so that no other process trains it.

        The system releases the lock when the process ends, even if it is killed.

        :param patience: seconds to wait for another process. After that, a StoreError names the process. The default
            is not zero because ``holder`` also takes the lock, for an instant.
        """
        with self._lock_file() as file:
            self._acquire(file, patience)
            with self._store_errors():
                file.truncate(0)
                file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
                for leftover in self.path.glob(".*.tmp"):  # left by a process that was killed while it wrote
                    leftover.unlink(missing_ok=True)
            try:
                yield
            finally:
                with suppress(OSError):
                    file.truncate(0)

    def _lock_file(self) -> IO[bytes]:
        with self._store_errors():
            return open(self.path / "lock", "a+b", buffering=0, opener=_open_no_link)

    def _acquire(self, file: IO[bytes], patience: float) -> None:
        end = monotonic() + patience
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if monotonic() >= end:
                    raise StoreError(f"{self.path} is being trained by {_lock_owner(self.path / 'lock')}") from None
                sleep(0.02)
            except OSError as error:
                raise StoreError(f"cannot lock {self.path}: {error.strerror}; choose another folder") from error

    def holder(self) -> str | None:
        """Return which process trains this run now, or None."""
        try:
            with open(self.path / "lock", opener=_open_no_link) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _lock_owner(self.path / "lock")
        except OSError:  # there is no lock file, or the file system has no locks
            return None
        return None

    @contextmanager
    def _store_errors(self) -> Iterator[None]:
        """Turn file system errors into a StoreError with a clear message."""
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"cannot write to {self.path}: {error.strerror or error}; finished tasks are kept: fix this, then "
                "rerun the same command to resume"
            ) from error


def _open_no_link(path: str, flags: int) -> int:
    """Open a file of a run. Links, which may lead to a file elsewhere, and pipes, which may block, are refused."""
    return open_regular(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _lock_owner(lock: Path) -> str:
    try:
        owner = json.loads(read_file(lock))
        return f"process {owner['pid']} on {owner['host']}"
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        return "another process"


def _free_name(path: Path) -> Path:
    """Return an unused name for a checkpoint that cannot be loaded."""
    n = 1
    while (free := path.with_name(f"{path.name}.unreadable{n}")).exists():
        n += 1
    return free


class Store:
    """A folder of runs.

    >>> from pathlib import Path
    >>> from became_avalanche import Store, find_benchmark
    >>> store = Store(Path("runs"))
    >>> spec = find_benchmark("split-digits").spec("gpm+became")
    >>> store.folder(spec).path.name
    'split-digits.gpm+became.seed0...'
    >>> store.find(spec) is None  # not trained yet
    True
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def make_writable(self) -> None:
        """Create the folder. Raises a StoreError if it is not writable."""
        probe = self.root / f".writable-{os.getpid()}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise StoreError(f"cannot write to {self.root}: {error.strerror}; choose another folder") from None

    def folder(self, spec: RunSpec) -> RunFolder:
        """Return the folder of a run, whether it exists or not.

        A run's specification holds the value of every option. If a default has changed since a run was finished, that
        run is a different one, and this run gets another folder next to it. Raises a SpecError or RecordError if an
        existing folder cannot be read.
        """
        key, n = spec.key(), 1
        wanted = spec.completed().model_dump(mode="json")
        match wanted:
            case {"method": {"merge": {"options": {"fisher": dict(fisher)}}}}:
                from became_avalanche.merging.fisher import Fisher

                fisher["mode"] = Fisher(**fisher).mode  # an older run may differ in this default
        while True:
            folder = RunFolder(self.root / (key if n == 1 else f"{key}~{n}"))
            if not differences(_stored_spec(folder), wanted):
                return folder
            n += 1

    def open(self, spec: RunSpec) -> RunFolder:
        """Return the folder of a run, and create it if necessary."""
        folder = self.folder(spec)
        if folder.path.is_symlink():  # nothing is written outside of the folder of runs
            raise StoreError(
                f"{folder.path} is a link to {folder.path.resolve()}; replace the link by the folder itself"
            )
        with folder._store_errors():
            folder.path.mkdir(parents=True, exist_ok=True)
        return folder

    def find(self, spec: RunSpec) -> Record | None:
        """Return the record of a run, or None if there is none. Raises a RecordError if it cannot be read."""
        return self.folder(spec).record()

    def references(self, spec: RunSpec) -> References:
        """Return the folder names of the runs with the same seed that a run is compared with."""
        try:
            baseline, control = (
                None if other is None else self.folder(spec.with_method(other)).path.name
                for other in (spec.method.baseline, spec.method.equal_training)
            )
        except (SpecError, RecordError):  # an unreadable folder of another run must not stop this one
            return spec.references
        return References(baseline=baseline, control=control)

    def records(self) -> Iterator[Record]:
        """Yield all readable records in the folder."""
        for path in sorted(self.root.glob("*/record.json")):
            try:
                yield read_record(path)
            except RecordError:
                continue


def _stored_spec(folder: RunFolder) -> dict[str, Any]:
    """Return the specification in a run's folder, or in its record. It is empty if there is none."""
    path = folder.path / "spec.json"
    record = None if path.exists() else folder.record()
    stored = read_values(path) if path.exists() else {} if record is None else record.spec
    match stored:
        case {"method": {"base": str(base), "merge": {"rule": "became" | "became-exact", "options": dict(options)}}}:
            if base == "finetune" or ":" in base:
                # A specification without this option is older than the option. Runs without projection then left the
                # new head out of λ. For all other rules, the option makes no difference.
                options.setdefault("new_head", "apart")
    return stored


def differences(stored: Any, wanted: Any, place: str = "") -> list[str]:
    """Return the fields in which two specifications differ. Fields that only one of them has do not count."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        return [
            field
            for name in stored.keys() & wanted.keys()
            if name != "label"
            for field in differences(stored[name], wanted[name], f"{place}.{name}" if place else name)
        ]
    return [] if stored == wanted else [place]

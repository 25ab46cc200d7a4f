"""The folder of runs: one folder per run, locked while it runs, and nothing finished is ever overwritten."""

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
    """The folder of a run cannot be used: it is locked or cannot be written."""


class RunFolder:
    """The folder of one run.

    ``spec.json``     its specification, complete
    ``record.json``   what it measured so far, with its status
    ``log.txt``       when it was started, resumed and finished, and its errors
    ``checkpoint-NNN.safetensors``  everything that the rest depends on, after NNN finished trainings
    ``endpoints-NNN.safetensors``   θ*_{t-1}, θ_GP and θ̂ of the merge of task NNN, if they are kept
    ``wandb-id.txt``  the id of its run of Weights & Biases, which it continues when it resumes
    ``lock``          held by the process that trains the run
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def record_path(self) -> Path:
        """Where the record is."""
        return self.path / "record.json"

    def record(self) -> Record | None:
        """The record, or None if there is none yet; raises a RecordError if it is not a sound record of this run."""
        if not self.record_path.exists():
            return None
        record = read_record(self.record_path)
        if record.key != self.path.name:
            raise RecordError(f"{self.record_path} belongs to another run, {record.key}; move it away")
        return record

    def save_record(self, record: Record) -> None:
        """Write the record, unless that would overwrite a finished one."""
        if (existing := self.record()) is not None and existing.finished:
            raise StoreError(f"{self.record_path} is finished and is not overwritten")
        self._write("record.json", record.to_json())

    def keep_spec(self, spec: RunSpec) -> None:
        """Write ``spec.json`` unless it is there."""
        if not (self.path / "spec.json").exists():
            self._write("spec.json", spec.to_json())

    def wandb_id(self) -> str | None:
        """The id of its run of Weights & Biases, if it has one."""
        path = self.path / WANDB_ID
        text = read_file(path).decode(errors="replace").strip() if path.exists() else ""
        return text if re.fullmatch(r"[\w-]{1,64}", text) else None

    def keep_wandb_id(self, run_id: str) -> None:
        """Remember the id of its run of Weights & Biases."""
        self._write(WANDB_ID, f"{run_id}\n")

    def log(self, text: str) -> None:
        """Append a line with the time to ``log.txt``."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with self._explained(), open(self.path / "log.txt", "a", opener=_no_link) as file:
            file.write(f"{now} {text.rstrip()}\n")

    def _write(self, name: str, content: str) -> None:
        with self._explained():
            write_atomically(self.path / name, content)

    # -------------------------------------------------------------------------------------------------- checkpoints

    def checkpoints(self) -> list[Path]:
        """The checkpoints, the newest first."""
        return sorted(self.path.glob(f"{CHECKPOINT}-*.safetensors"), reverse=True)

    def read_checkpoint(self, path: Path) -> dict[str, Any]:
        """The state in a checkpoint; raises a StateFileError if it is not a sound checkpoint of this run."""
        from became_avalanche.strategy.statefile import StateFileError, read_state

        state = read_state(path, kind=CHECKPOINT)
        if state.get("key") != self.path.name:
            raise StateFileError(f"{path} belongs to another run, {state.get('key')}")
        return state

    def save_checkpoint(self, n: int, state: dict[str, Any]) -> None:
        """Keep the state after ``n`` finished trainings, and the one before in case this file is damaged later."""
        from became_avalanche.strategy.statefile import write_state

        path = self._checkpoint(n)
        with self._explained():
            if path.exists():  # it could not be loaded, or the run would not have come here again
                os.replace(path, _free_name(path))
            write_state(path, state, kind=CHECKPOINT)
            self.forget_checkpoints(before=n - 1)

    def forget_checkpoints(self, before: int) -> None:
        """Delete the checkpoints after fewer than ``before`` trainings."""
        for path in self.checkpoints():
            if path.name < self._checkpoint(before).name:
                path.unlink(missing_ok=True)

    def save_endpoints(self, t: int, state: dict[str, Any]) -> None:
        """Keep the three weight vectors of the merge of task ``t``."""
        from became_avalanche.strategy.statefile import write_state

        with self._explained():
            write_state(self.path / f"endpoints-{t:03d}.safetensors", state, kind="endpoints")

    def _checkpoint(self, n: int) -> Path:
        return self.path / f"{CHECKPOINT}-{n:03d}.safetensors"

    # --------------------------------------------------------------------------------------------------------- lock

    @contextmanager
    def locked(self, patience: float = 1.0) -> Iterator[None]:
        """A context in which no other process may train this run.

        The lock ends with the process, however that ends.

        :param patience: seconds to wait for another process; then a StoreError says which one it is. ``holder`` takes
            the lock for an instant, too, so this is not zero.
        """
        with self._lock_file() as file:
            self._acquire(file, patience)
            with self._explained():
                file.truncate(0)
                file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
                for leftover in self.path.glob(".*.tmp"):  # of a process that was killed while it wrote
                    leftover.unlink(missing_ok=True)
            try:
                yield
            finally:
                with suppress(OSError):
                    file.truncate(0)

    def _lock_file(self) -> IO[bytes]:
        with self._explained():
            return open(self.path / "lock", "a+b", buffering=0, opener=_no_link)

    def _acquire(self, file: IO[bytes], patience: float) -> None:
        end = monotonic() + patience
        while True:
            try:
                return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if monotonic() >= end:
                    raise StoreError(f"{self.path} is being trained by {_owner(self.path / 'lock')}") from None
                sleep(0.02)
            except OSError as error:
                raise StoreError(f"cannot lock {self.path}: {error.strerror}; choose another folder") from error

    def holder(self) -> str | None:
        """Who trains this run now, or None."""
        try:
            with open(self.path / "lock", opener=_no_link) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _owner(self.path / "lock")
        except OSError:  # there is no lock, or none can be taken here
            return None
        return None

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """File system errors as one clear message."""
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"cannot write to {self.path}: {error.strerror or error}; nothing that was finished is lost: rerun the "
                "same command to resume when this is solved"
            ) from error


def _no_link(path: str, flags: int) -> int:
    """Open a file of a run, but no link, which may lead to a file elsewhere, and no pipe, which may block."""
    return open_regular(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _owner(lock: Path) -> str:
    try:
        owner = json.loads(read_file(lock))
        return f"process {owner['pid']} on {owner['host']}"
    except (ValueError, KeyError, TypeError, OSError, RecursionError):
        return "another process"


def _free_name(path: Path) -> Path:
    """A name for a checkpoint that cannot be loaded, under which no other one is kept."""
    n = 1
    while (free := path.with_name(f"{path.name}.unreadable{n}")).exists():
        n += 1
    return free


class Store:
    """A folder of runs."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make_writable(self) -> None:
        """Make the folder; raises a StoreError if nothing can be written there."""
        probe = self.root / f".writable-{os.getpid()}"
        try:
            self.root.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise StoreError(f"cannot write to {self.root}: {error.strerror}; choose another folder") from None

    def folder(self, spec: RunSpec) -> RunFolder:
        """The folder of a run, whether it exists or not.

        A run keeps the default of every option. If such a default has changed since, the finished run is another one,
        and this one gets a folder beside it. Raises a SpecError or RecordError if it cannot be read which run it is.
        """
        key, n = spec.key(), 1
        wanted = spec.completed().model_dump(mode="json")
        while True:
            folder = RunFolder(self.root / (key if n == 1 else f"{key}~{n}"))
            if not differences(_stored_spec(folder), wanted):
                return folder
            n += 1

    def open(self, spec: RunSpec) -> RunFolder:
        """The folder of a run, made if need be."""
        folder = self.folder(spec)
        if folder.path.is_symlink():  # of somebody else's study, perhaps: nothing is written outside of the folder
            raise StoreError(f"{folder.path} is a link to {folder.path.resolve()}; put the folder itself in its place")
        with folder._explained():
            folder.path.mkdir(parents=True, exist_ok=True)
        return folder

    def find(self, spec: RunSpec) -> Record | None:
        """The record of a run, if there is one; raises a RecordError if it cannot be read."""
        return self.folder(spec).record()

    def references(self, spec: RunSpec) -> References:
        """The folders of the runs of the same seed that a run is compared with."""
        try:
            baseline, control = (
                None if other is None else self.folder(spec.with_method(other)).path.name
                for other in (spec.method.baseline, spec.method.equal_training)
            )
        except (SpecError, RecordError):  # theirs cannot be read, which is no reason to stop this run
            return spec.references
        return References(baseline=baseline, control=control)

    def records(self) -> Iterator[Record]:
        """All records in the folder that can be read."""
        for path in sorted(self.root.glob("*/record.json")):
            try:
                yield read_record(path)
            except RecordError:
                continue


def _stored_spec(folder: RunFolder) -> dict[str, Any]:
    """The specification that is kept in a folder, or in its record; empty if there is none."""
    path = folder.path / "spec.json"
    record = None if path.exists() else folder.record()
    stored = read_values(path) if path.exists() else {} if record is None else record.spec
    match stored:
        case {"method": {"base": str(base), "merge": {"rule": "became" | "became-exact", "options": dict(options)}}}:
            if base == "finetune" or ":" in base:
                # Specifications without this option are older than it. Without projection these runs left the new head
                # out of λ. Other rules than these two give it the same weights either way.
                options.setdefault("new_head", "apart")
    return stored


def differences(stored: Any, wanted: Any, place: str = "") -> list[str]:
    """The fields in which two specifications differ; a field that only one of them has does not count."""
    if isinstance(stored, dict) and isinstance(wanted, dict):
        return [
            field
            for name in stored.keys() & wanted.keys()
            if name != "label"
            for field in differences(stored[name], wanted[name], f"{place}.{name}" if place else name)
        ]
    return [] if stored == wanted else [place]

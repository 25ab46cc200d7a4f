"""The folder of runs: one folder per run, locked while it runs, and nothing finished is ever overwritten."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from became_avalanche.files import write_atomically
from became_avalanche.results.record import Record, RecordError, read_record
from became_avalanche.runs.spec import RunSpec, SpecError

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

CHECKPOINT = "checkpoint"


class StoreError(RuntimeError):
    """The folder of a run cannot be used: it is locked, foreign or cannot be written."""


class RunFolder:
    """The folder of one run.

    ``spec.json``     its specification, complete
    ``record.json``   what it measured so far, with its status
    ``log.txt``       when it was started, resumed and finished, and its errors
    ``checkpoint-NNN.safetensors``  everything that the rest depends on, after NNN finished trainings
    ``endpoints-NNN.safetensors``   θ*_{t-1}, θ_GP and θ̂ of the merge of task NNN, if they are kept
    ``lock``          held by the process that trains the run
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def record_path(self) -> Path:
        """Where the record is."""
        return self.path / "record.json"

    def record(self) -> Record | None:
        """The record, or None if there is none yet; raises a RecordError if it cannot be read."""
        return read_record(self.record_path) if self.record_path.exists() else None

    def save_record(self, record: Record) -> None:
        """Write the record, unless that would overwrite a finished one."""
        if (existing := self.record()) is not None and existing.finished:
            raise StoreError(f"{self.record_path} is finished and is not overwritten")
        self.write("record.json", record.to_json())

    def write(self, name: str, content: str) -> None:
        """Write a text file of the run completely or not at all."""
        with self._explained():
            write_atomically(self.path / name, content)

    def log(self, text: str) -> None:
        """Append a line with the time to ``log.txt``."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        with self._explained(), open(self.path / "log.txt", "a") as file:
            file.write(f"{now} {text.rstrip()}\n")

    # -------------------------------------------------------------------------------------------------- checkpoints

    def save_checkpoint(self, n: int, state: dict[str, Any]) -> None:
        """Keep the state after ``n`` finished trainings, and one older state in case this file is damaged later."""
        from became_avalanche.strategy.statefile import write_state

        path = self._checkpoint(n)
        if path.exists():  # it could not be read, or the run would not have come here again
            os.replace(path, path.with_name(f"{path.name}.unreadable"))
        with self._explained():
            write_state(path, state, kind=CHECKPOINT)
        self.forget_checkpoints(but=2)

    def forget_checkpoints(self, but: int) -> None:
        """Delete all checkpoints but the newest."""
        for old in self._checkpoints()[:-but]:
            old.unlink(missing_ok=True)

    def load_checkpoint(self, load: Callable[[dict[str, Any]], int]) -> tuple[int, list[str]]:
        """Load the newest readable checkpoint.

        :param load: takes the state and returns the number of finished trainings; may raise a ValueError.
        :return: that number, 0 if there is no checkpoint that can be read, and what is wrong with the others.
        """
        from became_avalanche.strategy.statefile import StateFileError, read_state

        problems: list[str] = []
        for path in reversed(self._checkpoints()):
            try:
                state = read_state(path, kind=CHECKPOINT)
                if state.get("key") != self.path.name:
                    raise StateFileError(f"{path} belongs to another run, {state.get('key')}")
                return load(state), problems
            except StateFileError as error:
                problems.append(str(error))
        return 0, problems

    def save_endpoints(self, t: int, state: dict[str, Any]) -> None:
        """Keep the three weight vectors of the merge of task ``t``."""
        from became_avalanche.strategy.statefile import write_state

        with self._explained():
            write_state(self.path / f"endpoints-{t:03d}.safetensors", state, kind="endpoints")

    def _checkpoint(self, n: int) -> Path:
        return self.path / f"{CHECKPOINT}-{n:03d}.safetensors"

    def _checkpoints(self) -> list[Path]:
        return sorted(self.path.glob(f"{CHECKPOINT}-*.safetensors"))

    # --------------------------------------------------------------------------------------------------------- lock

    @contextmanager
    def locked(self) -> Iterator[None]:
        """A context in which no other process may train this run; raises a StoreError that says who does."""
        with self._explained():
            file = open(self.path / "lock", "a+")  # noqa: SIM115
        with file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except OSError:
                    raise StoreError(f"{self.path} is being trained by {_holder(self.path / 'lock')}") from None
            file.truncate(0)
            file.write(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
            file.flush()
            try:
                yield
            finally:
                file.truncate(0)

    def holder(self) -> str | None:
        """Who trains this run now, or None."""
        try:
            with open(self.path / "lock") as file:
                if fcntl is None:
                    return None
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except FileNotFoundError:
            return None
        except OSError:
            return _holder(self.path / "lock")
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


def _holder(lock: Path) -> str:
    try:
        held = json.loads(lock.read_text())
        return f"process {held['pid']} on {held['host']}"
    except (ValueError, KeyError, OSError):
        return "another process"


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
        and this one gets a folder beside it.
        """
        key, n = spec.key(), 1
        wanted = json.loads(spec.to_json())
        while True:
            path = self.root / (key if n == 1 else f"{key}~{n}")
            if not (path / "spec.json").exists() or not differences(_stored_spec(path), wanted):
                return RunFolder(path)
            n += 1

    def open(self, spec: RunSpec) -> RunFolder:
        """The folder of a run with its ``spec.json``, made if need be."""
        folder = self.folder(spec)
        with folder._explained():
            folder.path.mkdir(parents=True, exist_ok=True)
        if not (folder.path / "spec.json").exists():
            folder.write("spec.json", spec.to_json())
        return folder

    def find(self, spec: RunSpec) -> Record | None:
        """The record of a run, if there is one; raises a RecordError if it cannot be read."""
        return self.folder(spec).record()

    def records(self) -> Iterator[Record]:
        """All records in the folder that can be read."""
        for path in sorted(self.root.glob("*/record.json")):
            try:
                yield read_record(path)
            except RecordError:
                continue


def _stored_spec(path: Path) -> dict[str, Any]:
    try:
        content = json.loads((path / "spec.json").read_bytes())
    except (OSError, ValueError) as error:
        raise SpecError(f"{path / 'spec.json'} cannot be read ({error}); move the folder away or repair it") from None
    if not isinstance(content, dict) or "benchmark" not in content:
        raise SpecError(f"{path / 'spec.json'} is not the specification of a run; move the folder away")
    return content


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

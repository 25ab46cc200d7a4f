"""Small helpers that every room may use: files that are never half-written, and names that people mistype."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

T = TypeVar("T")


class UserError(Exception):
    """An error that its message explains to the person who runs a command: it needs no traceback."""


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """A file to be read; an OSError for pipes and devices, which may block or have no end."""
    without_waiting = getattr(os, "O_NONBLOCK", 0)
    return open(path, "rb", opener=lambda name, flags: open_regular(name, flags | without_waiting))


def open_regular(path: str, flags: int) -> int:
    """``os.open``; an OSError if it is not a regular file."""
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def read_file(path: str | os.PathLike[str]) -> bytes:
    """The content of a file that ``open_file`` opens."""
    with open_file(path) as file:
        return file.read()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all, even if the process is killed or the disk is full.

    The content goes to a temporary file beside it, which then takes its name.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power failure, where the file system supports it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError:  # Windows cannot open folders
        return
    try:
        os.fsync(descriptor)
    except OSError:
        pass
    finally:
        os.close(descriptor)


def sealed_json(content: Mapping[str, Any]) -> str:
    """JSON text with a checksum over its content, so that a later change of the file is noticed."""
    sealed = {**content, "sha256": _checksum(content)}
    return json.dumps(sealed, indent=1, allow_nan=False, ensure_ascii=False) + "\n"


def unsealed(text: str | bytes, where: str, what: str, schema: int) -> dict[str, Any]:
    """What ``sealed_json`` was given; raises a ValueError if the text is corrupt, foreign or of a newer version.

    Content without a checksum is accepted.

    :param where: where the text is from, for the error.
    :param what: what it should be, for the error.
    :param schema: the newest version of its format that can be read.
    """
    content = _parsed(text, where)
    if not isinstance(content, dict) or not isinstance(version := content.get("schema_version"), int):
        raise ValueError(f"{where} is not {what}: it has no schema_version")
    if version > schema:
        raise ValueError(
            f"{where} has schema version {version}, and this version of became-avalanche reads up to {schema}: upgrade "
            "the package"
        )
    checksum = content.pop("sha256", None)
    if checksum not in (None, _checksum(content)):
        raise ValueError(f"{where} is corrupt: its content does not match its checksum")
    return content


def _parsed(text: str | bytes, where: str) -> Any:
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError(f"{where} is corrupt: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where} is corrupt: {error}") from None


def _no_number(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


def _checksum(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def look_up(kind: str, name: str, registry: Mapping[str, T]) -> T:
    """``registry[name]``; raises a ValueError with the nearest name, or all names, if there is none."""
    if name in registry:
        return registry[name]
    raise ValueError(f"unknown {kind} {name!r}; {suggestion(name, registry)}")


def suggestion(name: str, names: Iterable[str], choices: str | None = None) -> str:
    """What to write instead of an unknown name.

    :param choices: what to say if no name is near; by default, all names.
    """
    by_lower_case = {known.lower(): known for known in names}
    if close := get_close_matches(name.lower(), by_lower_case, n=1):
        return f"did you mean {by_lower_case[close[0]]!r}?"
    return choices or f"choose one of: {', '.join(by_lower_case.values())}"

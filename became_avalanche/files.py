"""Helpers for the whole package: files that are never half-written, and suggestions for mistyped names."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

T = TypeVar("T")


class UserError(Exception):
    """An error whose message is enough for the person who runs a command. It is shown without a traceback."""


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a file for reading. Raises an OSError for pipes and devices, which may block or have no end."""
    nonblocking = getattr(os, "O_NONBLOCK", 0)
    return open(path, "rb", opener=lambda name, flags: open_regular(name, flags | nonblocking))


def open_regular(path: str, flags: int) -> int:
    """Call ``os.open``. Raises an OSError if it is not a regular file."""
    descriptor = os.open(path, flags, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file")
    return descriptor


def read_file(path: str | os.PathLike[str]) -> bytes:
    """Read a file that ``open_file`` opens."""
    with open_file(path) as file:
        return file.read()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file completely or not at all, even if the process is killed or the disk is full.

    The content is written to a temporary file in the same folder, which is then renamed.
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
    """Return JSON text with a checksum of its content, so that later changes of the file are noticed.

    Each list of numbers is on one line.
    """
    sealed = {**content, "sha256": _checksum(content)}
    text = json.dumps(sealed, indent=1, allow_nan=False, ensure_ascii=False)
    return _NUMBERS.sub(lambda numbers: " ".join(numbers[0].split()), text) + "\n"


_NUMBERS = re.compile(r"(?<=\[)\n[^][{}\"]+(?=\])")
"""What is between the brackets of a list of numbers. It starts with a line break, which JSON strings cannot contain."""


def unsealed(text: str | bytes, where: str, what: str, schema: int) -> dict[str, Any]:
    """Return the content of a text by ``sealed_json``. Content without a checksum is accepted.

    Raises a ValueError if the text is corrupt, of another kind, or of a newer version.

    :param where: source of the text, for the error.
    :param what: expected kind of content, for the error.
    :param schema: newest version of the format that can be read.
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
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError(f"{where} is corrupt: it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"{where} is corrupt: {error}") from None


def _refuse_constant(constant: str) -> Any:
    raise ValueError(f"{constant} is not a number")


def _checksum(content: Mapping[str, Any]) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def look_up(kind: str, name: str, registry: Mapping[str, T]) -> T:
    """Return ``registry[name]``. If there is none, a ValueError suggests the nearest name or lists all names."""
    if name in registry:
        return registry[name]
    raise ValueError(f"unknown {kind} {name!r}; {suggestion(name, registry)}")


def suggestion(name: str, names: Iterable[str], choices: str | None = None) -> str:
    """Return advice on what to write instead of an unknown name.

    :param choices: advice if no name is similar (default: a list of all names).
    """
    by_lower_case = {known.lower(): known for known in names}
    if close := get_close_matches(name.lower(), by_lower_case, n=1):
        return f"did you mean {by_lower_case[close[0]]!r}?"
    return choices or f"choose one of: {', '.join(by_lower_case.values())}"

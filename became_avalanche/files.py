"""Small helpers that every room may use: files that are never half-written, and names that people mistype."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


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


def look_up(kind: str, name: str, registry: Mapping[str, T]) -> T:
    """``registry[name]``; raises a ValueError with the nearest name, or all names, if there is none."""
    if name in registry:
        return registry[name]
    raise ValueError(f"unknown {kind} {name!r}; {suggestion(name, registry)}")


def suggestion(name: str, names: Iterable[str]) -> str:
    """What to write instead of an unknown name."""
    names = list(names)
    close = get_close_matches(name, names, n=1)
    return f"did you mean {close[0]!r}?" if close else f"choose one of: {', '.join(names)}"

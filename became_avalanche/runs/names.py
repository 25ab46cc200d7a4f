"""Finding things by name, for people who mistype."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import TypeVar

T = TypeVar("T")


def look_up(kind: str, name: str, registry: Mapping[str, T]) -> T:
    """``registry[name]``, or a ValueError that names what there is."""
    if name in registry:
        return registry[name]
    close = get_close_matches(name, registry, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "there is " + ", ".join(registry)
    raise ValueError(f"unknown {kind} {name!r}; {hint}")

"""Data files from elsewhere, opened without trust."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

_ARRAYS = {
    ("_codecs", "encode"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
}
"""What a pickle of plain values and numpy arrays needs."""


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ARRAYS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only plain values and arrays are allowed")
        return super().find_class(module, name)


def load_pickle(path: Path) -> Any:
    """Plain values and numpy arrays from a pickle; a ValueError if it is damaged or has anything else in it."""
    try:
        with path.open("rb") as file:
            return _ArraysOnly(file, encoding="latin1").load()
    except (pickle.UnpicklingError, EOFError, ValueError, IndexError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"{path} is not a sound data file: {error or 'it ends too early'}; delete it and get it anew"
        ) from error

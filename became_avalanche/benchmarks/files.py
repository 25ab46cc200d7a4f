"""Read data sets from disk. Missing data sets are downloaded where possible. The content of files is not trusted.

A missing data set raises a FileNotFoundError, an incomplete or corrupt one a ValueError. Both say what to do.
"""

from __future__ import annotations

import gzip
import mmap
import os
import pickle
import pickletools
import struct
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import wraps
from math import prod
from pathlib import Path
from typing import Any, TypeVar
from urllib.error import URLError

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from became_avalanche.files import open_file

Array = NDArray[Any]

DOWNLOAD_AGAIN = "delete the data set and download it again"


@dataclass(frozen=True)
class Source:
    """A data set on disk."""

    name: str
    folder: str
    """Subfolder of the folder of data sets."""
    check: Callable[[Path], int]
    """Returns the number of training images in a folder. Raises a ValueError if the data set is incomplete."""
    origin: str
    """Which files to download, and from where."""
    download: Callable[[Path], object] | None = None
    """Downloads the data set into a folder."""

    def place(self, root: Path) -> Path | None:
        """Return the folder of the data set, or None if it does not exist."""
        return root / self.folder if (root / self.folder).is_dir() else None

    def get(self, root: Path) -> Path:
        """Return the folder of the data set. Downloads the data set if it is missing."""
        if found := self.place(root):
            return found
        goal = root / self.folder
        failure = ""
        if self.download is not None:
            try:
                self.download(goal)
                return goal
            except (URLError, OSError, RuntimeError) as error:
                failure = f" and could not be downloaded ({error})"
        raise FileNotFoundError(f"{self.name} is missing{failure}; {self.advice(root)}")

    def advice(self, root: Path) -> str:
        """Return what to do if the data set is missing."""
        return f"get {self.origin}, so that {root / self.folder} exists"


# ------------------------------------------------------------------------------------------------------------- memory

T = TypeVar("T")

_LOADED: dict[str, dict[str, Any]] = {}
"""The images that have been read, by the name of the loader and by folder."""


def cached(n: int) -> Callable[[Callable[[Path], T]], Callable[[Path], T]]:
    """Decorate a loader so that it caches the images of the last ``n`` folders in memory."""

    def decorate(load: Callable[[Path], T]) -> Callable[[Path], T]:
        name = f"{load.__module__}.{load.__qualname__}"

        @wraps(load)
        def load_cached(folder: Path) -> T:
            cache = _LOADED.setdefault(name, {})
            place = str(folder.resolve())
            if place not in cache:
                images = load(folder)
                while len(cache) >= n:
                    del cache[next(iter(cache))]
                cache[place] = images
            found: T = cache[place]
            return found

        return load_cached

    return decorate


def loaded() -> dict[str, dict[str, Any]]:
    """Return all images that this process has read, to be passed to ``share_loaded`` in another process."""
    return _LOADED


def forget_loaded() -> None:
    """Clear the cache of images."""
    _LOADED.clear()


def share_loaded(images: dict[str, dict[str, Any]]) -> None:
    """Use images that another process has read instead of reading them again."""
    _LOADED.update(images)


# ------------------------------------------------------------------------------------------------------------ pickles


class _Dtype:
    """Replaces ``numpy.dtype``, whose pickled state could make NumPy read numbers of the file as memory addresses."""

    def __init__(self, name: Any, *options: Any) -> None:
        if not isinstance(name, str) or np.dtype(name).kind not in "biuf":
            raise pickle.UnpicklingError(f"it has an array of {name}, but only numbers are allowed")
        self.dtype: np.dtype[Any] = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array:
    """Replaces a NumPy array. ``numbers`` returns its values."""

    def __init__(self, *empty: Any) -> None:
        self.values: Array = np.empty(0, np.uint8)

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, columns_first, content = state
        if content:
            flat = np.frombuffer(_bytes(content), kind.dtype)
            self.values = flat.reshape(shape, order="F" if columns_first else "C")


def _bytes(content: Any, codec: str = "latin1") -> bytes:
    return content.encode("latin1") if isinstance(content, str) else bytes(memoryview(content))


def _scalar(kind: _Dtype, content: Any) -> Any:
    return np.frombuffer(_bytes(content), kind.dtype)[0]


_REPLACEMENTS: dict[str, Any] = {
    "_codecs.encode": _bytes,
    "numpy.dtype": _Dtype,
    "numpy.ndarray": "ndarray",
    "numpy.core.multiarray._reconstruct": _Array,
    "numpy._core.multiarray._reconstruct": _Array,
    "numpy.core.multiarray.scalar": _scalar,
    "numpy._core.multiarray.scalar": _scalar,
}
"""The names that a pickle of plain values and arrays of numbers refers to, and what the unpickler uses instead."""


def _check_numbering(pickled: Any) -> None:
    """Raise an UnpicklingError if the pickle gives a value a number that is too large.

    The unpickler would reserve memory for all smaller numbers.
    """
    for n, (opcode, argument, _) in enumerate(pickletools.genops(pickled)):
        if opcode.name.endswith("PUT") and int(argument or 0) > n:
            raise pickle.UnpicklingError(f"it gives a value the number {argument}, but has fewer values")


_UNPICKLING_ERRORS = (
    *(pickle.UnpicklingError, EOFError, OSError, ValueError, LookupError, AttributeError, TypeError),
    *(OverflowError, MemoryError, RecursionError),
)
"""Errors that may be raised when a file is unpickled that is corrupt or not a pickle."""


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in _REPLACEMENTS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, but only plain values and arrays are allowed")
        return _REPLACEMENTS[f"{module}.{name}"]


def load_pickle(path: Path) -> Any:
    """Return the content of a pickle: plain values, and arrays that ``numbers`` can read.

    Raises a ValueError if the file is corrupt or contains anything else.
    """
    try:
        with open_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            _check_numbering(content)
            content.seek(0)
            return _ArraysOnly(content, encoding="latin1").load()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing, but other files of the data set exist; {DOWNLOAD_AGAIN}") from None
    except _UNPICKLING_ERRORS as error:
        raise ValueError(f"{path} is corrupt: {str(error) or 'it ends too early'}; {DOWNLOAD_AGAIN}") from error


def numbers(values: Any) -> Array:
    """Return the values of an array or of a list of integers. Raises a TypeError for anything else."""
    if isinstance(values, _Array):
        return values.values
    if isinstance(values, list) and all(isinstance(value, int | np.integer) for value in values):
        return np.array(values, dtype=np.int64)
    raise TypeError(f"a {type(values).__name__} is not a list of numbers")


def pickled_images(path: Path, keys: tuple[str, ...]) -> tuple[Array, ...]:
    """Read the arrays with these keys from a pickle. The first array must contain images as bytes."""
    content = load_pickle(path)
    try:
        arrays = tuple(numbers(content[key]) for key in keys)
    except (KeyError, TypeError, IndexError, ValueError) as error:
        raise ValueError(
            f"{path} is not the expected file: it has no arrays {', '.join(keys)}; {DOWNLOAD_AGAIN}"
        ) from error
    if arrays[0].dtype != np.uint8:
        raise ValueError(
            f"{path} is not the expected file: its images are {arrays[0].dtype}, not bytes; {DOWNLOAD_AGAIN}"
        )
    return arrays


def equal_classes(path: Path, labels: Array, classes: int, per_class: int) -> Tensor:
    """Labels as a tensor. Raises a ValueError unless they are 0 to ``classes - 1`` with ``per_class`` images each."""
    values, counts = np.unique(labels, return_counts=True)
    if values.tolist() != list(range(classes)) or set(counts.tolist()) != {per_class}:
        raise ValueError(
            f"{path} is incomplete: {classes} classes of {per_class} images are expected; {DOWNLOAD_AGAIN}"
        )
    return torch.from_numpy(labels.astype(np.int64))


# ---------------------------------------------------------------------------------------------------------- idx files

IDX_LIMIT = 2**30
"""Maximum number of bytes. A compressed file could unpack to any size."""


def load_idx(folder: Path, name: str) -> Tensor:
    """Read the bytes of an idx file, the format of MNIST, plain or compressed as ``.gz``."""
    path = folder / name
    if not path.exists():
        path = folder / f"{name}.gz"
    try:
        with open_file(path) as raw, gzip.open(raw) if path.suffix == ".gz" else raw as file:
            content = bytearray()
            while len(content) <= IDX_LIMIT and (part := file.read(2**20)):
                content += part
        zero, kind, dimensions = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
    except FileNotFoundError:
        raise ValueError(f"{folder} is incomplete: {name} is missing, with and without .gz; {DOWNLOAD_AGAIN}") from None
    except (EOFError, OSError, zlib.error, struct.error) as error:
        raise ValueError(f"{path} is not a readable idx file: {error}; {DOWNLOAD_AGAIN}") from error
    start = 4 + 4 * dimensions
    if zero != 0 or kind != 8 or len(content) != start + prod(shape):
        raise ValueError(f"{path} is an incomplete idx file: it has {len(content)} bytes; {DOWNLOAD_AGAIN}")
    return torch.frombuffer(content, dtype=torch.uint8, offset=start).reshape(shape)


# ---------------------------------------------------------------------------------------------------- folders of images

IMAGES = {".jpeg", ".jpg", ".png"}


def image_files(folder: Path) -> list[Path]:
    """The image files in a folder, sorted by name."""
    with os.scandir(folder) as entries:
        return sorted(Path(entry) for entry in entries if Path(entry).suffix.lower() in IMAGES and entry.is_file())


def check_equal_sizes(folder: Path, counts: Sequence[int], classes: int, tolerance: float = 0.0) -> None:
    """Raise a ValueError unless there are ``classes`` classes with the same number of images.

    Anything else means that the data set was not unpacked completely.

    :param tolerance: the fraction by which a class may be smaller than the largest one.
    """
    if len(counts) != classes or not min(counts) or min(counts) < (1 - tolerance) * max(counts):
        found = f"{len(counts)} classes" + (f" of {min(counts)} to {max(counts)} images" if counts else "")
        raise ValueError(f"{folder} is incomplete: it has {found} instead of {classes} of equal size; {DOWNLOAD_AGAIN}")


PIXELS_LIMIT = 2**26
"""Maximum number of pixels of an image. A compressed image could unpack to any size."""


def decode(paths: Sequence[Path], size: int, mode: str, name: str) -> Tensor:
    """Decode image files to bytes (n, channels, size, size), with a progress bar on a terminal.

    :param mode: PIL's mode: ``RGB`` or ``L`` (grey).
    """

    def one(path: Path) -> Tensor:
        try:
            with Image.open(path, formats=("JPEG", "PNG")) as file:  # other formats, such as EPS, run programs
                if file.width * file.height > PIXELS_LIMIT:
                    raise ValueError(f"it has {file.width} x {file.height} pixels")
                image = file.convert(mode)
            if image.size != (size, size):
                image = image.resize((size, size), Image.Resampling.BILINEAR)
            return torch.from_numpy(np.array(image)).reshape(size, size, -1).permute(2, 0, 1)
        except Exception as error:  # a decoder may raise anything on a corrupt file
            raise ValueError(f"{path} cannot be decoded as an image: {error}; {DOWNLOAD_AGAIN}") from error

    images = torch.empty(len(paths), len(mode), size, size, dtype=torch.uint8)
    with ThreadPoolExecutor() as pool, tqdm(total=len(paths), desc=f"reading {name}", disable=None, leave=False) as bar:
        for i, image in enumerate(pool.map(one, paths)):
            images[i] = image
            bar.update()
    return images

"""Data sets on disk. Missing ones are downloaded where possible. Files are opened without trusting their content.

Loaders raise a FileNotFoundError for missing files and a ValueError for corrupt ones. Both say what to do.
"""

from __future__ import annotations

import gzip
import pickle
import struct
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

Array = NDArray[Any]

DOWNLOAD_AGAIN = "delete it and download it again"


@dataclass(frozen=True)
class Source:
    """A data set on disk."""

    name: str
    folder: str
    """Subfolder in the folder of data sets."""
    check: Callable[[Path], int]
    """Returns the number of training images in a folder. Raises a ValueError if the data set is incomplete."""
    origin: str
    """Which files to download, and from where."""
    download: Callable[[Path], object] | None = None
    """Downloads the data set into a folder."""

    def place(self, root: Path) -> Path | None:
        """The folder of the data set, or None if it does not exist."""
        return root / self.folder if (root / self.folder).is_dir() else None

    def get(self, root: Path) -> Path:
        """The folder of the data set. Downloads it if it is missing."""
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
        """What to do if it is missing."""
        return f"get {self.origin}, so that {root / self.folder} is there"


# ------------------------------------------------------------------------------------------------------------- memory

T = TypeVar("T")

_LOADED: dict[str, dict[str, Any]] = {}
"""Loader -> folder -> the images that it has read."""


def keeps(n: int) -> Callable[[Callable[[Path], T]], Callable[[Path], T]]:
    """Decorate a loader so that it keeps the images of the last ``n`` folders in memory."""

    def decorate(load: Callable[[Path], T]) -> Callable[[Path], T]:
        name = f"{load.__module__}.{load.__qualname__}"

        @wraps(load)
        def kept(folder: Path) -> T:
            own = _LOADED.setdefault(name, {})
            place = str(folder.resolve())
            if place not in own:
                images = load(folder)
                while len(own) >= n:
                    del own[next(iter(own))]
                own[place] = images
            found: T = own[place]
            return found

        return kept

    return decorate


def loaded() -> dict[str, dict[str, Any]]:
    """All images that this process has read, to be passed to ``share_loaded`` in another one."""
    return _LOADED


def forget_loaded() -> None:
    """Free the memory of all images that were read."""
    _LOADED.clear()


def share_loaded(images: dict[str, dict[str, Any]]) -> None:
    """Use images that another process has read instead of reading them again."""
    _LOADED.update(images)


# ------------------------------------------------------------------------------------------------------------ pickles

_ARRAYS = {
    ("_codecs", "encode"),
    ("numpy", "dtype"),
    ("numpy", "ndarray"),
    ("numpy.core.multiarray", "_reconstruct"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy.core.multiarray", "scalar"),
    ("numpy._core.multiarray", "scalar"),
}
"""The only names that an unpickled file may refer to: those that plain values and numpy arrays need."""


_UNSOUND = (
    *(pickle.UnpicklingError, EOFError, OSError, ValueError, LookupError, AttributeError, TypeError),
    *(OverflowError, MemoryError, RecursionError),
)
"""Errors that unpickling a corrupt file, or one that is not a pickle, may raise."""


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ARRAYS:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, and only plain values and arrays are allowed")
        return super().find_class(module, name)


def load_pickle(path: Path) -> Any:
    """Read plain values and numpy arrays from a pickle. Raises a ValueError if it is corrupt or holds anything else."""
    try:
        with path.open("rb") as file:
            return _ArraysOnly(file, encoding="latin1").load()
    except FileNotFoundError:
        raise ValueError(f"{path} is missing, and other files of the data set are there; {DOWNLOAD_AGAIN}") from None
    except _UNSOUND as error:
        raise ValueError(f"{path} is corrupt: {error or 'it ends too early'}; {DOWNLOAD_AGAIN}") from error


def pickled_images(path: Path, keys: tuple[str, ...]) -> tuple[Array, ...]:
    """Read the arrays with these keys from a pickle. The first one must hold images as bytes."""
    content = load_pickle(path)
    try:
        arrays = tuple(np.asarray(content[key]) for key in keys)
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


def load_idx(folder: Path, name: str) -> Tensor:
    """Read the bytes of an idx file, the format of MNIST, plain or compressed as ``.gz``."""
    path = folder / name
    if not path.exists():
        path = folder / f"{name}.gz"
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
        zero, kind, dimensions = struct.unpack_from(">HBB", content)
        shape = struct.unpack_from(f">{dimensions}I", content, 4)
    except FileNotFoundError:
        raise ValueError(f"{folder} is incomplete: {name} is missing, with and without .gz; {DOWNLOAD_AGAIN}") from None
    except (EOFError, OSError, struct.error) as error:
        raise ValueError(f"{path} is not a readable idx file: {error}; {DOWNLOAD_AGAIN}") from error
    start = 4 + 4 * dimensions
    if zero != 0 or kind != 8 or len(content) != start + prod(shape):
        raise ValueError(f"{path} is an incomplete idx file: it has {len(content)} bytes; {DOWNLOAD_AGAIN}")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=start).reshape(shape)


# ---------------------------------------------------------------------------------------------------- folders of images

IMAGES = {".jpeg", ".jpg", ".png"}


def image_files(folder: Path) -> list[Path]:
    """The image files in a folder, sorted by name."""
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in IMAGES)


def refuse_unequal(folder: Path, counts: Sequence[int], classes: int, tolerance: float = 0.0) -> None:
    """Raise a ValueError unless there are ``classes`` classes with equally many images.

    Anything else means that the data set was not unpacked completely.

    :param tolerance: how much smaller than the largest class a class may be, as a fraction.
    """
    if len(counts) != classes or not min(counts) or min(counts) < (1 - tolerance) * max(counts):
        found = f"{len(counts)} classes" + (f" of {min(counts)} to {max(counts)} images" if counts else "")
        raise ValueError(
            f"{folder} is incomplete: it has {found}, and {classes} of equal size are expected; {DOWNLOAD_AGAIN}"
        )


def decode(paths: Sequence[Path], size: int, mode: str, name: str) -> Tensor:
    """Decode image files to bytes (n, channels, size, size), with a progress bar on a terminal.

    :param mode: PIL's mode: ``RGB`` or ``L`` (grey).
    """

    def one(path: Path) -> Tensor:
        try:
            with Image.open(path) as file:
                image = file.convert(mode)
            if image.size != (size, size):
                image = image.resize((size, size), Image.Resampling.BILINEAR)
            return torch.from_numpy(np.array(image)).reshape(size, size, -1).permute(2, 0, 1)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise ValueError(f"{path} cannot be decoded as an image: {error}; {DOWNLOAD_AGAIN}") from error

    images = torch.empty(len(paths), len(mode), size, size, dtype=torch.uint8)
    with ThreadPoolExecutor() as pool, tqdm(total=len(paths), desc=f"reading {name}", disable=None, leave=False) as bar:
        for i, image in enumerate(pool.map(one, paths)):
            images[i] = image
            bar.update()
    return images

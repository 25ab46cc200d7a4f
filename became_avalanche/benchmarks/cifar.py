"""CIFAR-100, cut into tasks as in the gradient projection papers."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.error import URLError

import numpy as np
import torch
from avalanche.benchmarks.scenarios import GenericCLScenario
from torch import Tensor
from torchvision.datasets import CIFAR100

from became_avalanche.benchmarks.files import load_pickle
from became_avalanche.benchmarks.tensors import Images, image_stream

NORMALISATION = {
    "gpm": {"mean": (125.3 / 255, 123.0 / 255, 113.9 / 255), "std": (63.0 / 255, 62.1 / 255, 66.7 / 255)},
    "nscl": {"mean": (0.507, 0.487, 0.441), "std": (0.267, 0.256, 0.276)},
}
"""By protocol, as the published codes have them. Those of ``gpm`` are CIFAR-10's."""

SUPERCLASS_ORDERS = (
    tuple(range(20)),
    (15, 12, 5, 9, 7, 16, 18, 17, 1, 0, 3, 8, 11, 14, 10, 6, 2, 4, 13, 19),
    (17, 1, 19, 18, 12, 7, 6, 0, 11, 15, 10, 5, 13, 3, 9, 16, 4, 14, 2, 8),
    (11, 9, 6, 5, 12, 4, 0, 10, 13, 7, 14, 3, 15, 16, 8, 1, 2, 19, 18, 17),
    (6, 14, 0, 11, 12, 17, 13, 4, 9, 1, 7, 19, 8, 10, 3, 15, 18, 5, 2, 16),
)
"""The five published orders of the superclasses."""

FOLDER = "cifar-100-python"


def split_cifar100(
    n_tasks: int = 10,
    seed: int = 0,
    *,
    dataset_root: str | PathLike[str],
    protocol: Literal["gpm", "nscl"] = "gpm",
    task_order: Sequence[int] | None = None,
) -> GenericCLScenario:
    """CIFAR-100 in tasks of equally many classes in their natural order.

    Labels start from zero in each task.

    :param n_tasks: number of tasks: 10 or 20 in the papers, or another divisor of 100.
    :param seed: which images are kept for validation.
    :param dataset_root: folder with ``cifar-100-python``, as torchvision keeps it. It is downloaded if it is missing.
    :param protocol: ``gpm``, with a random twentieth of each task's training images in a ``valid`` stream and no
        augmentation, or ``nscl``, with all of them in training, randomly cropped and flipped, and no ``valid`` stream.
    :param task_order: the tasks by number, in the order in which they come, if not in their natural order.
    """
    if n_tasks < 1 or 100 % n_tasks:
        raise ValueError(f"n_tasks must divide the 100 classes of CIFAR-100; got {n_tasks}")
    train, test = (
        _tasks(part.images, part.fine, torch.arange(100).reshape(n_tasks, -1)) for part in _both_parts(dataset_root)
    )
    constants = NORMALISATION.get(protocol, NORMALISATION["gpm"])
    return image_stream(train, test, **constants, protocol=protocol, seed=seed, task_order=task_order)


def cifar100_superclass(
    order: int = 0, seed: int = 0, *, dataset_root: str | PathLike[str], reference: bool = False
) -> GenericCLScenario:
    """CIFAR-100 in 20 tasks of five classes that have a superclass in common.

    Labels start from zero in each task. Pixels lie between 0 and 1, without normalisation; a random twentieth of each
    task's training images is in the ``valid`` stream.

    :param order: which of the five published orders of the superclasses, from 0.
    :param seed: which images are kept for validation.
    :param dataset_root: as for ``split_cifar100``.
    :param reference: scramble the pixels as the published loaders do, which take the three colours one after the other
        for the three colours of one pixel after the other.
    """
    if order not in range(len(SUPERCLASS_ORDERS)):
        raise ValueError(f"order must be one of the published orders 0 to {len(SUPERCLASS_ORDERS) - 1}; got {order}")
    parts = _both_parts(dataset_root)
    pairs = sorted(set(zip(parts[0].coarse.tolist(), parts[0].fine.tolist(), strict=True)))
    if [superclass for superclass, _ in pairs] != [k // 5 for k in range(100)]:
        raise ValueError(f"{Path(dataset_root) / FOLDER} is not CIFAR-100: its superclasses are not 20 of five classes")
    classes = torch.tensor([label for _, label in pairs]).reshape(20, 5)
    train, test = (_tasks(_scrambled(part.images) if reference else part.images, part.fine, classes) for part in parts)
    return image_stream(train, test, mean=(0, 0, 0), std=(1, 1, 1), seed=seed, task_order=SUPERCLASS_ORDERS[order])


class _Part(NamedTuple):
    images: Tensor
    """Bytes (n, 3, 32, 32)."""
    fine: Tensor
    coarse: Tensor


def _both_parts(dataset_root: str | PathLike[str]) -> tuple[_Part, _Part]:
    root = Path(dataset_root)
    return _part(root, "train", 50000), _part(root, "test", 10000)


def _part(root: Path, name: str, rows: int) -> _Part:
    path = root / FOLDER / name
    if not path.exists():
        try:
            CIFAR100(str(root), download=True)
        except (URLError, OSError, RuntimeError) as error:
            raise FileNotFoundError(
                f"{path} is missing and could not be downloaded ({error}); get cifar-100-python.tar.gz from "
                f"{CIFAR100.url} and unpack it in {root}"
            ) from error
    content = load_pickle(path)
    try:
        images, fine, coarse = (np.asarray(content[key]) for key in ("data", "fine_labels", "coarse_labels"))
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is not a part of CIFAR-100: it has no data, fine_labels and coarse_labels") from error
    if images.shape != (rows, 3072) or images.dtype != np.uint8 or not fine.shape == coarse.shape == (rows,):
        raise ValueError(
            f"{path} is not a part of CIFAR-100: it has images of shape {images.shape} and type {images.dtype} and "
            f"{fine.size} labels, and {rows} rows of 3072 bytes are expected; delete it and get it anew"
        )
    return _Part(torch.from_numpy(images.copy()).reshape(-1, 3, 32, 32), torch.tensor(fine), torch.tensor(coarse))


def _tasks(images: Tensor, labels: Tensor, classes: Tensor) -> list[Images]:
    """Images and labels of each task, given its classes, a row per task."""
    tasks = []
    for own in classes:
        chosen = torch.isin(labels, own)
        tasks.append((images[chosen], torch.searchsorted(own, labels[chosen])))
    return tasks


def _scrambled(images: Tensor) -> Tensor:
    return images.reshape(-1, 32, 32, 3).permute(0, 3, 1, 2)

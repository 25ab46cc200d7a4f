"""CIFAR-100, cut into tasks as in the gradient projection papers."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from urllib.error import URLError

import numpy as np
import torch
from avalanche.benchmarks.scenarios import GenericCLScenario
from torch import Tensor
from torchvision.datasets import CIFAR100

from became_avalanche.benchmarks.files import load_pickle
from became_avalanche.benchmarks.tensors import Images, benchmark_of, normalise, split_off_validation

MEAN = (125.3 / 255, 123.0 / 255, 113.9 / 255)
STD = (63.0 / 255, 62.1 / 255, 66.7 / 255)
"""Those of CIFAR-10, as the published codes have them."""

FOLDER = "cifar-100-python"


def split_cifar100(n_tasks: int = 10, seed: int = 0, *, dataset_root: str | PathLike[str]) -> GenericCLScenario:
    """CIFAR-100 in tasks of equally many classes in their natural order.

    Streams are ``train``, ``valid`` and ``test``. Labels start from zero in each task. Images are normalised and not
    augmented; a random twentieth of each task's training images is kept for validation.

    :param n_tasks: number of tasks: 10 or 20 in the papers, or another divisor of 100.
    :param seed: which images are kept for validation.
    :param dataset_root: folder with ``cifar-100-python``, as torchvision keeps it. It is downloaded if it is missing.
    """
    if n_tasks < 1 or 100 % n_tasks:
        raise ValueError(f"n_tasks must divide the 100 classes of CIFAR-100; got {n_tasks}")
    root = Path(dataset_root)
    train, test = (_tasks(*_cifar100(root, part), classes=100 // n_tasks) for part in ("train", "test"))
    return benchmark_of(*split_off_validation(train, seed), test, normalise(MEAN, STD))


def _cifar100(root: Path, part: str) -> Images:
    """Images as bytes (n, 3, 32, 32), and labels."""
    path = root / FOLDER / part
    if not path.exists():
        try:
            CIFAR100(str(root), download=True)
        except (URLError, OSError, RuntimeError) as error:
            raise FileNotFoundError(
                f"{path} is missing and could not be downloaded ({error}); get cifar-100-python.tar.gz from "
                f"{CIFAR100.url} and unpack it in {root}"
            ) from error
    content = load_pickle(path)
    expected = 50000 if part == "train" else 10000
    try:
        images, labels = np.asarray(content["data"]), np.asarray(content["fine_labels"])
    except (KeyError, TypeError, IndexError) as error:
        raise ValueError(f"{path} is not a part of CIFAR-100: it has no data and fine_labels") from error
    if images.shape != (expected, 3072) or images.dtype != np.uint8 or labels.shape != (expected,):
        raise ValueError(
            f"{path} is not a part of CIFAR-100: it has images of shape {images.shape} and type {images.dtype} and "
            f"{labels.size} labels, and {expected} rows of 3072 bytes are expected; delete it and get it anew"
        )
    return torch.from_numpy(images.copy()).reshape(-1, 3, 32, 32), torch.from_numpy(labels)


def _tasks(images: Tensor, labels: Tensor, classes: int) -> list[Images]:
    """Images and labels of each task."""
    chosen = [(first <= labels) & (labels < first + classes) for first in range(0, 100, classes)]
    return [(images[task], labels[task] % classes) for task in chosen]

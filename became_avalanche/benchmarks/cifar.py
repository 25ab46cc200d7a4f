"""CIFAR-100, cut into tasks as in the gradient projection papers."""

from __future__ import annotations

from os import PathLike

import numpy as np
import torch
from avalanche.benchmarks.scenarios import GenericCLScenario
from avalanche.benchmarks.scenarios.deprecated.generic_benchmark_creation import (
    create_generic_benchmark_from_tensor_lists,
)
from torch import Tensor
from torchvision.datasets import CIFAR100

MEAN = (125.3 / 255, 123.0 / 255, 113.9 / 255)
STD = (63.0 / 255, 62.1 / 255, 66.7 / 255)
"""Those of CIFAR-10, as the published codes have them."""

VALIDATION = 0.05


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
    classes = 100 // n_tasks
    train, test = (_tasks(CIFAR100(str(dataset_root), train=part, download=True), classes) for part in (True, False))
    generator = torch.Generator().manual_seed(seed)
    shuffles = [torch.randperm(len(y), generator=generator) for _, y in train]
    cuts = [int(VALIDATION * len(shuffle)) for shuffle in shuffles]
    return create_generic_benchmark_from_tensor_lists(
        [(x[s[cut:]], y[s[cut:]]) for (x, y), s, cut in zip(train, shuffles, cuts, strict=True)],
        test,
        other_streams_tensors={
            "valid": [(x[s[:cut]], y[s[:cut]]) for (x, y), s, cut in zip(train, shuffles, cuts, strict=True)]
        },
        task_labels=list(range(n_tasks)),
    )


def _tasks(data: CIFAR100, classes: int) -> list[tuple[Tensor, Tensor]]:
    """Normalised images and labels of each task."""
    labels = np.array(data.targets)
    tasks = []
    for first in range(0, 100, classes):
        chosen = (first <= labels) & (labels < first + classes)
        images = torch.from_numpy(data.data[chosen]).permute(0, 3, 1, 2).float() / 255
        mean, std = (torch.tensor(values).reshape(3, 1, 1) for values in (MEAN, STD))
        tasks.append(((images - mean) / std, torch.from_numpy(labels[chosen] - first)))
    return tasks

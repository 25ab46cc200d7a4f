"""Real images that ship with a dependency: scikit-learn's handwritten digits (1797 images of 8 x 8 pixels).

The split into training (70 %), validation (10 %) and test data (20 %) is always the same. The seed decides only how the
tasks are made, so no seed trains on test images.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from avalanche.benchmarks.scenarios import GenericCLScenario
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

from became_avalanche.benchmarks.tensors import Images, benchmark_of


def split_digits(seed: int = 0) -> GenericCLScenario:
    """Five tasks of two digits each, as a task-incremental benchmark with ``train``, ``valid`` and ``test`` streams.

    Labels are 0 and 1 in each task.

    :param seed: which digits form which task.
    """
    classes = torch.randperm(10, generator=torch.Generator().manual_seed(seed)).reshape(5, 2)

    def task(images: Images, t: int) -> Images:
        x, y = images
        chosen = torch.isin(y, classes[t])
        return x[chosen], (y[chosen] == classes[t, 1]).long()

    return _benchmark(task, n_tasks=5)


def permuted_digits(seed: int = 0, n_tasks: int = 10) -> GenericCLScenario:
    """Ten classes per task, with the pixels permuted differently in each task, as a task-incremental benchmark.

    Streams are ``train``, ``valid`` and ``test``.

    :param seed: which permutations.
    :param n_tasks: number of tasks.
    """
    return _benchmark(_permuted(seed, n_tasks), n_tasks)


def _permuted(seed: int, n_tasks: int) -> Callable[[Images, int], Images]:
    """A function that puts the pixels of a task into its order."""
    if n_tasks < 1:
        raise ValueError(f"n_tasks must be at least 1; got {n_tasks}")
    generator = torch.Generator().manual_seed(seed)
    permutations = [torch.randperm(64, generator=generator) for _ in range(n_tasks)]

    def task(images: Images, t: int) -> Images:
        x, y = images
        return x.flatten(1)[:, permutations[t]].reshape(x.shape), y

    return task


def class_digits(seed: int = 0) -> GenericCLScenario:
    """Five experiences of two digits each, as a class-incremental benchmark: one head for all, no task labels.

    Classes are numbered in the order in which they come. Streams are ``train``, ``valid`` and ``test``.

    :param seed: which digits come when.
    """
    classes = torch.randperm(10, generator=torch.Generator().manual_seed(seed)).reshape(5, 2)

    def task(images: Images, t: int) -> Images:
        x, y = images
        chosen = torch.isin(y, classes[t])
        return x[chosen], 2 * t + (y[chosen] == classes[t, 1]).long()

    return _benchmark(task, n_tasks=5, task_labels=False)


def domain_digits(seed: int = 0, n_tasks: int = 5) -> GenericCLScenario:
    """All ten digits in each experience, with the pixels in another order, as a domain-incremental benchmark.

    There is one head for all and no task label. Streams are ``train``, ``valid`` and ``test``.

    :param seed: which permutations.
    :param n_tasks: number of domains.
    """
    return _benchmark(_permuted(seed, n_tasks), n_tasks, task_labels=False)


def _benchmark(task: Callable[[Images, int], Images], n_tasks: int, *, task_labels: bool = True) -> GenericCLScenario:
    x, y = load_digits(return_X_y=True)
    images = torch.tensor(x / 16, dtype=torch.float32).reshape(-1, 1, 8, 8)
    labels = torch.tensor(y, dtype=torch.long)
    rest, test = train_test_split(range(len(y)), test_size=0.2, stratify=y, random_state=0)
    train, valid = train_test_split(rest, test_size=0.125, stratify=y[rest], random_state=0)
    train_tasks, valid_tasks, test_tasks = (
        [task((images[part], labels[part]), t) for t in range(n_tasks)] for part in (train, valid, test)
    )
    transforms = [_as_they_are] * n_tasks
    return benchmark_of(train_tasks, valid_tasks, test_tasks, transforms, task_labels=task_labels)


def _as_they_are(images: Tensor) -> Tensor:
    return images

"""Benchmarks of real images that need no download: scikit-learn's handwritten digits (1797 images of 8 x 8 pixels).

The split into training (70 %), validation (10 %) and test data (20 %) is always the same. The seed decides only how the
tasks are made, so no seed trains on the test images of another.
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
    """Return five tasks of two digits each, as a task-incremental benchmark.

    Labels are 0 and 1 in each task. The streams are ``train``, ``valid`` and ``test``.

    >>> from became_avalanche import split_digits
    >>> benchmark = split_digits()
    >>> [len(experience.dataset) for experience in benchmark.test_stream]
    [72, 73, 73, 71, 71]
    >>> [experience.task_label for experience in benchmark.train_stream]
    [0, 1, 2, 3, 4]
    >>> image, label, task_label = benchmark.train_stream[0].dataset[0]
    >>> image.shape
    torch.Size([1, 8, 8])

    :param seed: decides which digits form a task.
    """
    classes = torch.randperm(10, generator=torch.Generator().manual_seed(seed)).reshape(5, 2)

    def task(images: Images, t: int) -> Images:
        x, y = images
        chosen = torch.isin(y, classes[t])
        return x[chosen], (y[chosen] == classes[t, 1]).long()

    return _benchmark(task, n_tasks=5)


def permuted_digits(seed: int = 0, n_tasks: int = 10) -> GenericCLScenario:
    """Return tasks of all ten digits, with the pixels permuted differently in each, as a task-incremental benchmark.

    The streams are ``train``, ``valid`` and ``test``.

    >>> from became_avalanche import permuted_digits
    >>> benchmark = permuted_digits(n_tasks=3)
    >>> [(experience.task_label, len(experience.dataset)) for experience in benchmark.train_stream]
    [(0, 1257), (1, 1257), (2, 1257)]

    :param seed: decides the permutations.
    :param n_tasks: number of tasks.
    """
    return _benchmark(_permuted(seed, n_tasks), n_tasks)


def _permuted(seed: int, n_tasks: int) -> Callable[[Images, int], Images]:
    """Return a function that permutes the pixels of the images of a task."""
    if n_tasks < 1:
        raise ValueError(f"n_tasks must be at least 1; got {n_tasks}")
    generator = torch.Generator().manual_seed(seed)
    permutations = [torch.randperm(64, generator=generator) for _ in range(n_tasks)]

    def task(images: Images, t: int) -> Images:
        x, y = images
        return x.flatten(1)[:, permutations[t]].reshape(x.shape), y

    return task


def class_digits(seed: int = 0) -> GenericCLScenario:
    """Return five experiences of two digits each, as a class-incremental benchmark.

    It is made for models with a single head: all samples have the task label 0. Classes are numbered in the order in
    which they are trained. The streams are ``train``, ``valid`` and ``test``.

    >>> from became_avalanche import class_digits
    >>> [sorted(experience.classes_in_this_experience) for experience in class_digits().train_stream]
    [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]

    :param seed: decides the order of the digits.
    """
    classes = torch.randperm(10, generator=torch.Generator().manual_seed(seed)).reshape(5, 2)

    def task(images: Images, t: int) -> Images:
        x, y = images
        chosen = torch.isin(y, classes[t])
        return x[chosen], 2 * t + (y[chosen] == classes[t, 1]).long()

    return _benchmark(task, n_tasks=5, task_labels=False)


def domain_digits(seed: int = 0, n_tasks: int = 5) -> GenericCLScenario:
    """Return experiences of all ten digits with the pixels permuted differently, as a domain-incremental benchmark.

    It is made for models with a single head: all samples have the task label 0. The streams are ``train``, ``valid``
    and ``test``.

    >>> from became_avalanche import domain_digits
    >>> [(experience.task_label, len(experience.dataset)) for experience in domain_digits(n_tasks=3).test_stream]
    [(0, 360), (0, 360), (0, 360)]

    :param seed: decides the permutations.
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
    transforms = [_unchanged] * n_tasks
    return benchmark_of(train_tasks, valid_tasks, test_tasks, transforms, task_labels=task_labels)


def _unchanged(images: Tensor) -> Tensor:
    return images

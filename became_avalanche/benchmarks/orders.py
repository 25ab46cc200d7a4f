"""Benchmarks whose order of tasks depends on the seed, as in the paper's tables."""

from __future__ import annotations

from os import PathLike
from typing import Any

import numpy as np
from avalanche.benchmarks.scenarios import GenericCLScenario

from became_avalanche.benchmarks.cifar import SUPERCLASS_ORDERS, cifar100_superclass
from became_avalanche.benchmarks.five import MEMBERS, five_datasets


def cifar100_superclass_in_turn(
    seed: int = 0, *, dataset_root: str | PathLike[str], **options: Any
) -> GenericCLScenario:
    """Return CIFAR-100 by superclass, in one of the five published orders.

    :param seed: decides the order, which is number ``seed`` modulo 5, and which images are used for validation.
    :param dataset_root: folder of data sets.
    :param options: further options of ``cifar100_superclass``.
    """
    return cifar100_superclass(seed % len(SUPERCLASS_ORDERS), seed, dataset_root=dataset_root, **options)


def five_datasets_in_turn(seed: int = 0, *, dataset_root: str | PathLike[str], **options: Any) -> GenericCLScenario:
    """Return 5-Datasets in the order of the GPM paper for seed 0, and in a random order for every other seed.

    The BECAME paper does not say which orders it uses.

    :param seed: decides the order, and which images are used for validation.
    :param dataset_root: folder of data sets.
    :param options: further options of ``five_datasets``.
    """
    order = np.arange(5) if seed == 0 else np.random.RandomState(seed).permutation(5)
    return five_datasets([list(MEMBERS)[k] for k in order], seed, dataset_root=dataset_root, **options)

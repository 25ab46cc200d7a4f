"""CIFAR-100, split into tasks as in the gradient projection papers."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from avalanche.benchmarks.scenarios import GenericCLScenario
from torch import Tensor
from torchvision.datasets import CIFAR100

from became_avalanche.benchmarks.files import DOWNLOAD_AGAIN, Source, cached, equal_classes, pickled_images
from became_avalanche.benchmarks.tensors import StreamOptions, check_n_tasks, image_stream, normalise, tasks_of

if TYPE_CHECKING:
    from typing_extensions import Unpack

NORMALISATION = {
    "gpm": {"mean": (125.3 / 255, 123.0 / 255, 113.9 / 255), "std": (63.0 / 255, 62.1 / 255, 66.7 / 255)},
    "nscl": {"mean": (0.507, 0.487, 0.441), "std": (0.267, 0.256, 0.276)},
}
"""Mean and standard deviation by protocol, as in the published codes. The values of ``gpm`` are those of CIFAR-10."""

SUPERCLASS_ORDERS = (
    tuple(range(20)),
    (15, 12, 5, 9, 7, 16, 18, 17, 1, 0, 3, 8, 11, 14, 10, 6, 2, 4, 13, 19),
    (17, 1, 19, 18, 12, 7, 6, 0, 11, 15, 10, 5, 13, 3, 9, 16, 4, 14, 2, 8),
    (11, 9, 6, 5, 12, 4, 0, 10, 13, 7, 14, 3, 15, 16, 8, 1, 2, 19, 18, 17),
    (6, 14, 0, 11, 12, 17, 13, 4, 9, 1, 7, 19, 8, 10, 3, 15, 18, 5, 2, 16),
)
"""The five published orders of the superclasses."""


def split_cifar100(
    n_tasks: int = 10, seed: int = 0, *, dataset_root: str | PathLike[str], **options: Unpack[StreamOptions]
) -> GenericCLScenario:
    """Return CIFAR-100 in tasks with the same number of classes, in their natural order.

    Labels start from zero in each task.

    :param n_tasks: number of tasks: 10 or 20 in the papers, or another divisor of 100.
    :param seed: decides which images are used for validation.
    :param dataset_root: folder with ``cifar-100-python``, as torchvision keeps it. It is downloaded if it is missing.
    :param options: ``protocol``, ``task_order`` and ``device`` of ``image_stream``.
    """
    check_n_tasks(n_tasks, 100, "CIFAR-100")
    classes = torch.arange(100).reshape(n_tasks, -1)
    train, test = (tasks_of(part.images, part.fine, classes) for part in read_cifar100(dataset_root))
    constants = NORMALISATION.get(options.get("protocol", "gpm"), NORMALISATION["gpm"])
    return image_stream(train, test, [normalise(**constants)] * n_tasks, seed, **options)


def cifar100_superclass(
    order: int = 0,
    seed: int = 0,
    *,
    dataset_root: str | PathLike[str],
    reference: bool = False,
    **options: Unpack[StreamOptions],
) -> GenericCLScenario:
    """Return CIFAR-100 in 20 tasks, one per superclass, with five classes each.

    Labels start from zero in each task. Pixels lie between 0 and 1, without normalisation.

    :param order: number of the published order of the superclasses, 0 to 4.
    :param seed: decides which images are used for validation.
    :param dataset_root: as for ``split_cifar100``.
    :param reference: scramble the pixels as the published loaders do. The files store the three colour planes of an
        image one after the other, but these loaders read them as if the colours of each pixel were stored together.
    :param options: ``protocol``, ``task_order`` (overrides ``order``) and ``device`` of ``image_stream``.
    """
    if order not in range(len(SUPERCLASS_ORDERS)):
        raise ValueError(f"order must be one of the published orders 0 to {len(SUPERCLASS_ORDERS) - 1}; got {order}")
    parts = read_cifar100(dataset_root)
    pairs = sorted(set(zip(parts[0].coarse.tolist(), parts[0].fine.tolist(), strict=True)))
    if [superclass for superclass, _ in pairs] != [k // 5 for k in range(100)]:
        raise ValueError(
            f"{dataset_root} does not contain CIFAR-100: it must have 20 superclasses of five classes each"
        )
    classes = torch.tensor([label for _, label in pairs]).reshape(20, 5)
    train, test = (
        tasks_of(_scrambled(part.images) if reference else part.images, part.fine, classes) for part in parts
    )
    options = {"task_order": SUPERCLASS_ORDERS[order], **options}
    return image_stream(train, test, [normalise((0, 0, 0), (1, 1, 1))] * 20, seed, **options)


class _Part(NamedTuple):
    images: Tensor
    """Bytes (n, 3, 32, 32)."""
    fine: Tensor
    coarse: Tensor


def read_cifar100(dataset_root: str | PathLike[str]) -> tuple[_Part, _Part]:
    """Return the training and the test images of CIFAR-100, with their labels."""
    return _load_cached(CIFAR_100.get(Path(dataset_root)))


@cached(1)
def _load_cached(folder: Path) -> tuple[_Part, _Part]:
    return _load(folder)


def _load(folder: Path) -> tuple[_Part, _Part]:
    return _part(folder / "train", 50000), _part(folder / "test", 10000)


def _part(path: Path, rows: int) -> _Part:
    images, fine, coarse = pickled_images(path, ("data", "fine_labels", "coarse_labels"))
    if images.shape != (rows, 3072) or not fine.shape == coarse.shape == (rows,):
        raise ValueError(
            f"{path} is not a file of CIFAR-100: it has images of shape {images.shape} and {fine.size} labels instead "
            f"of {rows} rows of 3072 bytes; {DOWNLOAD_AGAIN}"
        )
    pixels = torch.from_numpy(images.copy()).reshape(-1, 3, 32, 32)
    return _Part(pixels, equal_classes(path, fine, 100, rows // 100), torch.tensor(coarse))


def _scrambled(images: Tensor) -> Tensor:
    """Return the bytes of each image, read as if the colours of each pixel were stored together."""
    return images.reshape(-1, 32, 32, 3).permute(0, 3, 1, 2)


CIFAR_100 = Source(
    name="CIFAR-100",
    folder="cifar-100-python",
    check=lambda folder: len(_load(folder)[0].images),
    origin=f"cifar-100-python.tar.gz from {CIFAR100.url} and unpack it",
    download=lambda goal: CIFAR100(str(goal.parent), download=True),
)

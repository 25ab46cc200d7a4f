"""5-Datasets: five data sets of ten classes, one per task."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from avalanche.benchmarks.scenarios import GenericCLScenario
from scipy.io import loadmat, whosmat
from torch import Tensor
from torch.nn import functional as F
from torchvision.datasets import CIFAR10, MNIST, SVHN, FashionMNIST

from became_avalanche.benchmarks.cifar import NORMALISATION
from became_avalanche.benchmarks.files import (
    DOWNLOAD_AGAIN,
    Source,
    cached,
    check_equal_sizes,
    decode,
    image_files,
    load_idx,
    pickled_images,
)
from became_avalanche.benchmarks.tensors import Images, StreamOptions, image_stream, normalise
from became_avalanche.files import open_file

if TYPE_CHECKING:
    from typing_extensions import Unpack

Parts = tuple[Images, Images]
"""Training and test images of 32 x 32 pixels."""

SIZES = {"cifar10": (50000, 10000), "mnist": (60000, 10000), "svhn": (73257, 26032)}
"""Number of training and test images. Fashion-MNIST has as many as MNIST. Copies of notMNIST differ in size."""

UNREADABLE = {
    "Q3Jvc3NvdmVyIEJvbGRPYmxpcXVlLnR0Zg==.png",
    "RGVtb2NyYXRpY2FCb2xkT2xkc3R5bGUgQm9sZC50dGY=.png",
    "RnJlaWdodERpc3BCb29rSXRhbGljLnR0Zg==.png",
    "SG90IE11c3RhcmQgQlROIFBvc3Rlci50dGY=.png",
    "TmlraXNFRi1TZW1pQm9sZEl0YWxpYy5vdGY=.png",
    "Um9tYW5hIEJvbGQucGZi.png",
    "VHJhbnNpdCBCb2xkLnR0Zg==.png",
}
"""Files of notMNIST that cannot be decoded: they are corrupt in the published archive."""


class Member(NamedTuple):
    """One of the five data sets."""

    source: Source
    load: Callable[[Path], Parts]
    mean: tuple[float, ...]
    std: tuple[float, ...]


def five_datasets(
    order: Sequence[str] = ("cifar10", "mnist", "svhn", "fashion-mnist", "notmnist"),
    seed: int = 0,
    *,
    dataset_root: str | PathLike[str],
    **options: Unpack[StreamOptions],
) -> GenericCLScenario:
    """Return five tasks of ten classes: CIFAR-10, MNIST, SVHN, Fashion-MNIST and notMNIST.

    All images are in colour, with 32 x 32 pixels.

    :param order: names of the data sets in the order of training. Some may be left out.
    :param seed: decides which images are used for validation.
    :param dataset_root: folder with ``cifar-10-batches-py``, ``MNIST/raw``, ``SVHN`` and ``FashionMNIST/raw``, with the
        same files as torchvision's, which are downloaded if they are missing. It must also have ``notMNIST``, either as
        four idx files or as folders ``A`` to ``J`` of images in ``Train`` and ``Test``.
    :param options: ``protocol``, ``task_order`` and ``device`` of ``image_stream``.
    """
    unknown = set(order) - MEMBERS.keys()
    if unknown or not order or len(set(order)) != len(order):
        raise ValueError(f"order must name some of {', '.join(MEMBERS)}, each at most once; got {list(order)}")
    root = Path(dataset_root)
    members = [MEMBERS[name] for name in order]
    places = [member.source.get(root) for member in members]
    train, test = zip(*(member.load(place) for member, place in zip(members, places, strict=True)), strict=True)
    return image_stream(train, test, [normalise(member.mean, member.std) for member in members], seed, **options)


def _checked(place: Path, parts: Parts, sizes: tuple[int, int] | None = None) -> Parts:
    """Return the parts. Raises a ValueError unless they have the labels 0 to 9 and the expected number of images."""
    for (images, labels), size in zip(parts, sizes or (None, None), strict=True):
        if len(images) != len(labels) or len(labels) != (size or len(labels)):
            raise ValueError(
                f"{place} is incomplete: it has {len(images)} images and {len(labels)} labels"
                + (f" instead of {size}" if size else "")
                + f"; {DOWNLOAD_AGAIN}"
            )
        if sorted(set(labels.tolist())) != list(range(10)):
            raise ValueError(f"{place} is corrupt: its labels are not 0 to 9; {DOWNLOAD_AGAIN}")
    return parts


@cached(1)
def _cifar10(folder: Path) -> Parts:
    def part(*names: str) -> Images:
        files = [pickled_images(folder / name, ("data", "labels")) for name in names]
        for name, (images, _) in zip(names, files, strict=True):
            if images.shape[1:] != (3072,):
                raise ValueError(
                    f"{folder / name} is not a file of CIFAR-10: its images have the shape {images.shape}; "
                    f"{DOWNLOAD_AGAIN}"
                )
        pixels, labels = (torch.from_numpy(np.concatenate(arrays)) for arrays in zip(*files, strict=True))
        return pixels.reshape(-1, 3, 32, 32), labels.long()

    parts = part(*(f"data_batch_{k}" for k in range(1, 6))), part("test_batch")
    return _checked(folder, parts, SIZES["cifar10"])


def _idx(folder: Path, prefix: str) -> Images:
    images = load_idx(folder, f"{prefix}-images-idx3-ubyte")
    labels = load_idx(folder, f"{prefix}-labels-idx1-ubyte")
    if images.shape[1:] != (28, 28) or labels.dim() != 1:
        raise ValueError(
            f"{folder} does not have the format of MNIST: its images have the shape {tuple(images.shape[1:])} instead "
            f"of (28, 28); {DOWNLOAD_AGAIN}"
        )
    return _padded(images.unsqueeze(1)), labels.long()


def _padded(images: Tensor) -> Tensor:
    """Pad 28 x 28 pixels with black to 32 x 32."""
    return F.pad(images, [2, 2, 2, 2])


@cached(2)
def _mnist(folder: Path) -> Parts:
    return _checked(folder, (_idx(folder, "train"), _idx(folder, "t10k")), SIZES["mnist"])


@cached(1)
def _svhn(folder: Path) -> Parts:
    def part(name: str) -> Images:
        path = folder / f"{name}_32x32.mat"
        try:
            with open_file(path) as file:
                shapes = {name: shape for name, shape, _ in whosmat(file)}
                if shapes["X"][:3] != (32, 32, 3) or max(*shapes["X"], *shapes["y"]) > 100_000:
                    raise ValueError(f"its images have the shape {shapes['X']}, its labels {shapes['y']}")
                file.seek(0)
                content = loadmat(file, variable_names=["X", "y"])
            images, labels = content["X"], content["y"].astype(np.int64)
        except FileNotFoundError:
            raise ValueError(f"{folder} is incomplete: {path.name} is missing; {DOWNLOAD_AGAIN}") from None
        except Exception as error:  # the reader may raise anything on a corrupt file
            raise ValueError(
                f"{path} is not a readable file of SVHN: {str(error) or 'it ends too early'}; {DOWNLOAD_AGAIN}"
            ) from error
        if images.dtype != np.uint8:
            raise ValueError(
                f"{path} is not a file of SVHN: its images are {images.dtype}, not bytes; {DOWNLOAD_AGAIN}"
            )
        digits = torch.from_numpy(labels.reshape(-1))
        return torch.from_numpy(images.transpose(3, 2, 0, 1).copy()), digits % 10  # SVHN labels the digit zero with 10

    return _checked(folder, (part("train"), part("test")), SIZES["svhn"])


@cached(1)
def _notmnist(folder: Path) -> Parts:
    raw = next((place for place in (folder, folder / "raw") if any(place.glob("*-ubyte*"))), None)
    if raw is not None:
        return _checked(raw, (_idx(raw, "train"), _idx(raw, "t10k")))
    parts = []
    for files in _notmnist_files(folder):
        labels = torch.arange(10).repeat_interleave(torch.tensor([len(paths) for paths in files]))
        parts.append((_padded(decode([path for paths in files for path in paths], 28, "L", "notMNIST")), labels))
    return parts[0], parts[1]


def _notmnist_files(folder: Path) -> list[list[list[Path]]]:
    """Return the image files of each letter, for training and for testing. Letters differ a little in size."""
    parts = []
    for name in ("Train", "Test"):
        if not (folder / name).is_dir():
            raise ValueError(f"{folder} is incomplete: it has neither idx files nor a folder {name}; {DOWNLOAD_AGAIN}")
        letters = sorted(letter for letter in (folder / name).iterdir() if letter.is_dir())
        files = [[path for path in image_files(letter) if path.name not in UNREADABLE] for letter in letters]
        check_equal_sizes(folder / name, [len(paths) for paths in files], 10, tolerance=0.1)
        parts.append(files)
    return parts


def _check_notmnist(folder: Path) -> int:
    if (folder / "Train").is_dir():
        return sum(map(len, _notmnist_files(folder)[0]))
    return _counter(_notmnist)(folder)


def _counter(load: Callable[[Path], Parts]) -> Callable[[Path], int]:
    """Return a function that counts the training images in a folder."""
    return lambda folder: len(load(folder)[0][1])


def _torchvision(kind: type[MNIST]) -> Callable[[Path], object]:
    """Return a function that downloads a data set of torchvision."""
    return lambda goal: kind(str(goal.parents[1]), download=True)


def _download_svhn(goal: Path) -> None:
    for split in ("train", "test"):
        SVHN(str(goal), split=split, download=True)


MEMBERS = {
    "cifar10": Member(
        Source(
            "CIFAR-10",
            "cifar-10-batches-py",
            _counter(_cifar10),
            f"cifar-10-python.tar.gz from {CIFAR10.url} and unpack it",
            lambda goal: CIFAR10(str(goal.parent), download=True),
        ),
        _cifar10,
        **NORMALISATION["gpm"],
    ),
    "mnist": Member(
        Source(
            "MNIST",
            "MNIST/raw",
            _counter(_mnist),
            f"the four files *-ubyte.gz from {MNIST.mirrors[0]}",
            _torchvision(MNIST),
        ),
        _mnist,
        mean=(0.1,) * 3,
        std=(0.2752,) * 3,
    ),
    "svhn": Member(
        Source(
            "SVHN",
            "SVHN",
            _counter(_svhn),
            f"train_32x32.mat and test_32x32.mat from {SVHN.split_list['train'][0].rpartition('/')[0]}",
            _download_svhn,
        ),
        _svhn,
        mean=(0.4377, 0.4438, 0.4728),
        std=(0.198, 0.201, 0.197),
    ),
    "fashion-mnist": Member(
        Source(
            "Fashion-MNIST",
            "FashionMNIST/raw",
            _counter(_mnist),
            f"the four files *-ubyte.gz from {FashionMNIST.mirrors[0]}",
            _torchvision(FashionMNIST),
        ),
        _mnist,
        mean=(0.2190,) * 3,
        std=(0.3318,) * 3,
    ),
    "notmnist": Member(
        Source(
            "notMNIST",
            "notMNIST",
            _check_notmnist,
            "notMNIST_large.tar.gz and notMNIST_small.tar.gz (http://yaroslavvb.blogspot.com/2011/09/notmnist-dataset.html)"
            " and unpack them as notMNIST/Train and notMNIST/Test, or its four idx files",
        ),
        _notmnist,
        mean=(0.4254,) * 3,
        std=(0.4501,) * 3,
    ),
}
"""The five data sets, with the normalisation of the published codes."""

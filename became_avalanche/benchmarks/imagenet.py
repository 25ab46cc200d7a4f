"""TinyImageNet and miniImageNet, split into tasks as in the gradient projection papers."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from avalanche.benchmarks.datasets import TinyImagenet
from avalanche.benchmarks.scenarios import GenericCLScenario
from torch import Tensor

from became_avalanche.benchmarks.files import (
    DOWNLOAD_AGAIN,
    Array,
    Source,
    cached,
    check_equal_sizes,
    decode,
    equal_classes,
    image_files,
    load_pickle,
    numbers,
    pickled_images,
)
from became_avalanche.benchmarks.tensors import (
    Images,
    StreamOptions,
    check_n_tasks,
    image_stream,
    normalise,
    tasks_of,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def split_tinyimagenet(
    n_tasks: int = 25, seed: int = 0, *, dataset_root: str | PathLike[str], **options: Unpack[StreamOptions]
) -> GenericCLScenario:
    """Return TinyImageNet (200 classes, 64 x 64 pixels) in tasks with the same number of classes.

    Classes are in the order of their WordNet names. Labels start from zero in each task. The ``test`` stream has the
    official validation images, because the labels of the official test images are not public. Copies with fewer images
    work if all classes have the same number of images.

    :param n_tasks: number of tasks: 25 in the papers, or another divisor of 200.
    :param seed: decides which images are used for validation.
    :param dataset_root: folder with ``tiny-imagenet-200``. It is downloaded if it is missing.
    :param options: ``protocol``, ``task_order`` and ``device`` of ``image_stream``.
    """
    check_n_tasks(n_tasks, 200, "TinyImageNet")
    parts = _tiny(TINY_IMAGENET.get(Path(dataset_root)))
    train, test = (tasks_of(*part, torch.arange(200).reshape(n_tasks, -1)) for part in parts)
    return image_stream(train, test, [normalise(MEAN, STD)] * n_tasks, seed, **options)


def split_miniimagenet(
    n_tasks: int = 20, seed: int = 0, *, dataset_root: str | PathLike[str], **options: Unpack[StreamOptions]
) -> GenericCLScenario:
    """Return miniImageNet (100 classes, 84 x 84 pixels) in tasks with the same number of classes, in random order.

    Each class has 500 training and 100 test images. Labels start from zero in each task.

    :param n_tasks: number of tasks: 20 in the papers, or another divisor of 100.
    :param seed: decides the order of the classes, as in the published codes, and which images are used for validation.
    :param dataset_root: folder with ``miniimagenet``, which holds ``train.pkl`` and ``test.pkl`` with ``images`` and
        ``labels``; or ``mini-imagenet-cache-train.pkl``, ``-val.pkl`` and ``-test.pkl`` with ``image_data`` and
        ``class_dict``; or a folder of images for each class, directly or in ``train``, ``val`` and ``test``.
    :param options: ``protocol``, ``task_order`` and ``device`` of ``image_stream``.
    """
    check_n_tasks(n_tasks, 100, "miniImageNet")
    parts = _mini(MINI_IMAGENET.get(Path(dataset_root)))
    classes = torch.from_numpy(np.random.RandomState(seed).permutation(100)).reshape(n_tasks, -1)
    train, test = (tasks_of(*part, classes) for part in parts)
    return image_stream(train, test, [normalise(MEAN, STD)] * n_tasks, seed, **options)


# -------------------------------------------------------------------------------------------------------- TinyImageNet

Files = list[list[Path]]
"""The image files of each class."""


def _tiny_files(folder: Path) -> tuple[Files, Files]:
    """Return the training and the test images, with classes in the order of their names."""
    try:
        names = sorted((folder / "wnids.txt").read_text().split())
        train = [image_files(folder / "train" / name / "images") for name in names]
        test = _tiny_test(folder / "val", names)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise ValueError(f"{folder} is incomplete: {error.filename} is missing; {DOWNLOAD_AGAIN}") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{folder} is corrupt: its tables are not text ({error}); {DOWNLOAD_AGAIN}") from error
    for part, files in (("train", train), ("val", test)):
        check_equal_sizes(folder / part, [len(paths) for paths in files], 200)
    return train, test


def _tiny_test(folder: Path, names: list[str]) -> Files:
    """Return the validation images: from one folder with a table of classes, as published, or a folder per class."""
    table = folder / "val_annotations.txt"
    if not table.exists():
        return [image_files(folder / name) for name in names]
    files: dict[str, list[Path]] = {name: [] for name in names}
    present = set(image_files(folder / "images"))
    for line in table.read_text().splitlines():
        file, name, *_ = [*line.split("\t"), ""]
        path = folder / "images" / file
        if path not in present or name not in files:
            raise ValueError(f"{folder} is incomplete: {table.name} lists {line!r}, which is missing; {DOWNLOAD_AGAIN}")
        files[name].append(path)
    return list(files.values())


@cached(1)
def _tiny(folder: Path) -> tuple[Images, Images]:
    train, test = _tiny_files(folder)
    return _decoded(train, 64, "TinyImageNet"), _decoded(test, 64, "TinyImageNet")


def _decoded(files: Files, size: int, name: str) -> Images:
    labels = torch.arange(len(files)).repeat_interleave(torch.tensor([len(paths) for paths in files]))
    return decode([path for paths in files for path in paths], size, "RGB", name), labels


TINY_IMAGENET = Source(
    name="TinyImageNet",
    folder="tiny-imagenet-200",
    check=lambda folder: sum(map(len, _tiny_files(folder)[0])),
    origin=f"tiny-imagenet-200.zip from {TinyImagenet.filename[1]} and unpack it",
    download=lambda goal: TinyImagenet(goal.parent, download=True),
)

# -------------------------------------------------------------------------------------------------------- miniImageNet

PER_CLASS = 600
"""Images per class."""
TRAINED = 500
"""Training images per class. The others are test images."""


@cached(1)
def _mini(folder: Path) -> tuple[Images, Images]:
    if (folder / "train.pkl").exists() or (folder / "test.pkl").exists():
        return _mini_part(folder / "train.pkl", TRAINED), _mini_part(folder / "test.pkl", PER_CLASS - TRAINED)
    if list(folder.glob("mini-imagenet-cache-*.pkl")):
        images, labels = _mini_cache(folder)
    else:
        images, labels = _decoded(_mini_files(folder), 84, "miniImageNet")
    chosen = np.random.RandomState(1234)
    orders = [np.flatnonzero(labels.numpy() == k)[chosen.permutation(PER_CLASS)] for k in range(100)]
    train, test = (np.concatenate(part) for part in zip(*((o[:TRAINED], o[TRAINED:]) for o in orders), strict=True))
    return (images[train], labels[train]), (images[test], labels[test])


def _mini_part(path: Path, per_class: int) -> Images:
    images, labels = pickled_images(path, ("images", "labels"))
    if len(images) != len(labels):
        raise ValueError(
            f"{path} is incomplete: it has {len(images)} images and {len(labels)} labels; {DOWNLOAD_AGAIN}"
        )
    return _mini_images(path, images), equal_classes(path, labels, 100, per_class)


def _mini_cache(folder: Path) -> Images:
    """Read the three pickles for few-shot learning, each with other classes."""
    images, names = [], []
    for part in ("train", "val", "test"):
        path = folder / f"mini-imagenet-cache-{part}.pkl"
        (pixels,) = pickled_images(path, ("image_data",))
        images.append(_mini_images(path, pixels))
        class_names = np.full(len(pixels), "", dtype=object)
        try:
            for name, rows in load_pickle(path)["class_dict"].items():
                class_names[numbers(rows)] = str(name)
        except (KeyError, AttributeError, IndexError, ValueError, TypeError) as error:
            raise ValueError(f"{path} is not the expected file: bad class_dict ({error}); {DOWNLOAD_AGAIN}") from error
        names.append(class_names)
    labels = np.unique(np.concatenate(names).astype(str), return_inverse=True)[1]
    return torch.cat(images), equal_classes(folder, labels, 100, PER_CLASS)


def _mini_images(path: Path, images: Array) -> Tensor:
    if images.shape[1:] != (84, 84, 3):
        raise ValueError(
            f"{path} is not a file of miniImageNet: its images have the shape {images.shape[1:]} instead of "
            f"(84, 84, 3); {DOWNLOAD_AGAIN}"
        )
    return torch.from_numpy(images.copy()).permute(0, 3, 1, 2)


def _mini_files(folder: Path) -> Files:
    parts = [folder / part for part in ("train", "val", "test") if (folder / part).is_dir()] or [folder]
    folders = (entry for part in parts for entry in part.iterdir() if entry.is_dir())
    files = [image_files(entry) for entry in sorted(folders, key=lambda entry: entry.name)]
    check_equal_sizes(folder, [len(paths) for paths in files], 100)
    if len(files[0]) != PER_CLASS:
        raise ValueError(
            f"{folder} is incomplete: its classes have {len(files[0])} images instead of {PER_CLASS}; {DOWNLOAD_AGAIN}"
        )
    return files


MINI_IMAGENET = Source(
    name="miniImageNet",
    folder="miniimagenet",
    check=lambda folder: len(_mini(folder)[0][1]) if any(folder.glob("*.pkl")) else TRAINED * len(_mini_files(folder)),
    origin="train.pkl and test.pkl of the published codes, mini-imagenet-cache-train.pkl, -val.pkl and -test.pkl, or "
    "100 folders of 600 images (ImageNet's licence forbids a download)",
)

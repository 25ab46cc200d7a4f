"""Images in memory as Avalanche streams, fetched a batch at a time.

Avalanche fetches samples one by one, through several nested data sets, and stacks them. Here a data set returns a
``Row`` for each index. A row only refers to its sample and reads it when it is accessed. ``collate``, the
``collate_fn`` of the data set, reads all rows of a batch at once. Avalanche's loaders, subsets, concatenations, replay
buffers and transforms work as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Literal, TypedDict

import torch
from avalanche.benchmarks.scenarios import GenericCLScenario
from avalanche.benchmarks.utils.classification_dataset import TaskAwareSupervisedClassificationDataset
from avalanche.benchmarks.utils.data_attribute import DataAttribute
from avalanche.benchmarks.utils.flat_data import ConstantSequence, FlatData
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset, default_collate

Images = tuple[Tensor, Tensor]
"""Images (n, channels, height, width), usually as bytes, and labels."""

Transform = Callable[[Tensor], Tensor]
"""Transforms a batch of images."""


class ImageTensor(Dataset[tuple[Tensor, int]]):
    """Images of one task, with the transforms that turn a batch of them into the network's input."""

    def __init__(self, images: Images, transform: Transform, augment: Transform | None = None) -> None:
        """Init.

        :param images: images and labels.
        :param transform: turns stored images into floats.
        :param augment: changes stored images before ``transform``, only in training.
        """
        self.images, self.targets = images
        self.transform, self.augment = transform, augment

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, rows: Tensor, training: bool) -> Tensor:
        """Return the network's input for the images in these rows."""
        images = self.images[rows]
        if training and self.augment is not None:
            images = self.augment(images)
        return self.transform(images)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.batch(torch.tensor([row]), training=False)[0], int(self.targets[row])


class Row(Sequence[Any]):
    """A sample (image, label, task label) that is read only when one of its items is accessed."""

    __slots__ = ("dataset", "number")

    def __init__(self, dataset: ImageTask, number: int) -> None:
        self.dataset, self.number = dataset, number

    def __len__(self) -> int:
        return len(self._values())

    def __getitem__(self, item: Any) -> Any:
        return self._values()[item]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._values())

    def _values(self) -> list[Any]:
        x, *labels = self.dataset.batch([self.number])
        return [x[0], *(label[0].item() if label.dim() == 1 else label[0] for label in labels)]


class ImageTask(TaskAwareSupervisedClassificationDataset[Any]):
    """An Avalanche data set made of ``ImageTensor``s or parts of them, which fetches whole batches at once."""

    _sample_index: _SampleIndex | None = None

    def __getitem__(self, index: Any) -> Any:
        samples = self._sample_index  # called for every sample of a batch, so the property is avoided
        if samples is None or samples.flat_data is not self._flat_data:
            samples = self.sample_index
        if not samples.complete or isinstance(index, slice):
            return super().__getitem__(index)
        return Row(self, index)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self.sample_index.complete:
            return [Row(self, index) for index in indices]
        return [self[index] for index in indices]

    @property
    def sample_index(self) -> _SampleIndex:
        """Where each sample is stored. The index is built again when the flattened data have been replaced."""
        if self._sample_index is None or self._sample_index.flat_data is not self._flat_data:
            self._sample_index = _SampleIndex(self._flat_data)
        return self._sample_index

    def batch(self, indices: list[int]) -> list[Tensor]:
        """Return images, labels, and what else Avalanche adds to a sample: by default the task label."""
        chosen = torch.tensor(indices)
        x = self.sample_index.images(chosen, self._flat_data._transform_groups.current_group == "train")
        extra = [attribute for attribute in self._data_attributes.values() if attribute.use_in_getitem]
        return [
            x,
            self.sample_index.labels[chosen],
            *(self.sample_index.extra(attribute)[chosen] for attribute in extra),
        ]


class _SampleIndex:
    """Index of Avalanche's flattened data: for each sample, the ``ImageTensor`` that stores it, and its row there."""

    def __init__(self, flat_data: Any) -> None:
        self.flat_data = flat_data
        self.tensors: list[ImageTensor] = []
        self.complete = True
        """Whether all samples are in ``tensors`` and no transform was added. Otherwise Avalanche has to read them."""
        self._extra: dict[str, tuple[DataAttribute[Any], Tensor]] = {}
        locations = self._locate(flat_data)
        self.complete = self.complete and bool(self.tensors)
        if self.complete:
            self.tensor_numbers, self.rows = locations.unbind(1)
            self.labels = torch.empty(len(locations), dtype=torch.long, device=self.tensors[0].targets.device)
            for k, tensor in enumerate(self.tensors):
                inside = self.tensor_numbers == k
                self.labels[inside] = tensor.targets[self.rows[inside]]

    def _locate(self, data: Any) -> Tensor:
        """Return one line per sample of ``data``: the number of its tensor, and its row in the tensor."""
        if isinstance(data, ImageTensor):
            self.tensors.append(data)
            rows = torch.arange(len(data))
            return torch.stack([torch.full_like(rows, len(self.tensors) - 1), rows], dim=1)
        if not isinstance(data, FlatData) or not _without_transforms(data):
            self.complete = False
            return torch.empty(0, 2)
        locations = torch.cat([self._locate(part) for part in data._datasets])
        if data._indices is None or not self.complete:
            return locations
        return locations[torch.tensor(data._indices, dtype=torch.long)]

    def extra(self, attribute: DataAttribute[Any]) -> Tensor:
        """Return the values of a data attribute for all samples."""
        known = self._extra.get(attribute.name)
        if known is None or known[0] is not attribute:
            known = self._extra[attribute.name] = (attribute, default_collate(list(attribute)))
        return known[1]

    def images(self, chosen: Tensor, training: bool) -> Tensor:
        """Return the network's input for the samples with these indices."""
        if len(self.tensors) == 1:
            return self.tensors[0].batch(self.rows[chosen], training)
        numbers, rows = self.tensor_numbers[chosen], self.rows[chosen]
        present: list[int] = sorted(set(numbers.tolist()))
        parts = [self.tensors[k].batch(rows[numbers == k], training) for k in present]
        order = torch.cat([(numbers == k).nonzero()[:, 0] for k in present])
        return torch.cat(parts)[order.argsort()]


def _without_transforms(data: Any) -> bool:
    groups = (getattr(data, name, None) for name in ("_transform_groups", "_frozen_transform_groups"))
    return all(transform is None for group in groups if group for transform in group.transform_groups.values())


def collate(batch: list[Any]) -> list[Tensor]:
    """Collate rows of one data set, or of several as in replay, to a batch. Other samples are collated by torch."""
    first = batch[0]
    if not isinstance(first, Row):
        return list(default_collate(batch))
    if all(row.dataset is first.dataset for row in batch):
        return first.dataset.batch([row.number for row in batch])
    parts = [list(rows) for _, rows in groupby(batch, key=lambda row: id(getattr(row, "dataset", None)))]
    fetched = [collate(part) for part in parts]
    return [torch.cat(values) for values in zip(*fetched, strict=True)]


def benchmark_of(
    train: Sequence[Images],
    valid: Sequence[Images],
    test: Sequence[Images],
    transforms: Sequence[Transform],
    augment: Transform | None = None,
    *,
    task_labels: bool = True,
) -> GenericCLScenario:
    """Return an Avalanche benchmark with the streams ``train``, ``test`` and, unless it is empty, ``valid``.

    :param train: images and labels of each task; likewise ``valid`` and ``test``.
    :param transforms: for each task, the function that turns stored images into floats.
    :param augment: changes stored images of the training stream before the transform, in training only. If a user adds
        a transform group, it replaces ``augment``.
    :param task_labels: give each task a separate task label. If False, all tasks have the label 0.
    """

    def task(images: Images, t: int, training: bool) -> ImageTask:
        tensor = ImageTensor(images, transforms[t], augment if training else None)
        label = t if task_labels else 0
        attributes = [
            DataAttribute(tensor.targets.tolist(), "targets"),
            DataAttribute(ConstantSequence(label, len(tensor)), "targets_task_labels", use_in_getitem=True),
        ]
        dataset = ImageTask([tensor], data_attributes=attributes, collate_fn=collate)
        return dataset if training else dataset.eval()

    return GenericCLScenario(
        stream_definitions={
            name: ([task(images, t, name == "train") for t, images in enumerate(tasks)],)
            for name, tasks in (("train", train), ("test", test), ("valid", valid))
            if tasks
        }
    )


class StreamOptions(TypedDict, total=False):
    """The options that all benchmarks of images share; see ``image_stream``."""

    protocol: Literal["gpm", "nscl"]
    task_order: Sequence[int] | None
    device: str | torch.device


def image_stream(
    train: Sequence[Images],
    test: Sequence[Images],
    transforms: Sequence[Transform],
    seed: int = 0,
    *,
    protocol: Literal["gpm", "nscl"] = "gpm",
    task_order: Sequence[int] | None = None,
    device: str | torch.device = "cpu",
) -> GenericCLScenario:
    """Return a task-incremental benchmark of images, in one of the two protocols of the paper.

    >>> import torch
    >>> from became_avalanche import image_stream
    >>> def task(n):
    ...     return torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8), torch.arange(n) % 2
    >>> train, test = [task(40), task(60)], [task(10), task(10)]
    >>> benchmark = image_stream(train, test, transforms=[lambda images: images / 255] * 2)
    >>> for name in ("train", "valid", "test"):
    ...     print(name, [len(experience.dataset) for experience in benchmark.streams[name]])
    train [38, 57]
    valid [2, 3]
    test [10, 10]

    :param train: images as bytes (n, channels, height, width) and labels, for each task; likewise ``test``.
    :param transforms: for each task, the function that turns a batch of bytes into floats.
    :param seed: decides which images are used for validation.
    :param protocol: ``gpm`` puts a random twentieth of each task's training images into a ``valid`` stream and does not
        augment images. ``nscl`` trains on all images, randomly cropped (padding 4) and flipped, and has no ``valid``
        stream.
    :param task_order: the numbers of the tasks in the order of training. Some tasks may be left out (default: all, in
        the order of ``train``).
    :param device: the device on which images are stored and batches are made. For a GPU, train and evaluate with
        ``pin_memory=False``.
    """
    if protocol not in ("gpm", "nscl"):
        raise ValueError(f"protocol must be 'gpm' or 'nscl'; got {protocol!r}")
    order = list(range(len(train))) if task_order is None else list(task_order)
    if len(set(order)) != len(order) or not set(order) <= set(range(len(train))) or not order:
        raise ValueError(f"task_order must name tasks from 0 to {len(train) - 1}, each at most once; got {task_order}")
    valid: Sequence[Images] = []
    if protocol == "gpm":
        train, valid = split_off_validation(train, seed)

    def chosen(tasks: Sequence[Images]) -> list[Images]:
        return [(tasks[t][0].to(device), tasks[t][1].to(device)) for t in order] if tasks else []

    augment = crop_and_flip if protocol == "nscl" else None
    return benchmark_of(chosen(train), chosen(valid), chosen(test), [transforms[t] for t in order], augment)


def tasks_of(images: Tensor, labels: Tensor, classes: Tensor) -> list[Images]:
    """Return the images and labels of each task.

    :param classes: the classes of each task, one row per task. The first class of a row gets the label 0, and so on.
    """
    tasks = []
    for row in classes:
        chosen = torch.isin(labels, row)
        tasks.append((images[chosen], (labels[chosen].unsqueeze(1) == row).int().argmax(1)))
    return tasks


def check_n_tasks(n_tasks: int, classes: int, name: str) -> None:
    """Raise a ValueError unless ``n_tasks`` divides the number of classes."""
    if n_tasks < 1 or classes % n_tasks:
        raise ValueError(f"n_tasks must divide the {classes} classes of {name}; got {n_tasks}")


def crop_and_flip(images: Tensor, padding: int = 4) -> Tensor:
    """Shift each image of a batch by up to ``padding`` pixels, fill with zeros, and mirror it with probability 1/2."""
    n, _, height, width = images.shape
    device = images.device
    padded = F.pad(images, [padding] * 4)
    down, right = torch.randint(2 * padding + 1, (2, n, 1), device=device)
    rows, columns = down + torch.arange(height, device=device), right + torch.arange(width, device=device)
    mirrored = torch.rand(n, 1, device=device) < 0.5
    columns = torch.where(mirrored, columns.flip(1), columns)
    which = torch.arange(n, device=device).reshape(n, 1, 1)
    return padded[which, :, rows.unsqueeze(2), columns.unsqueeze(1)].permute(0, 3, 1, 2).contiguous()


def split_off_validation(tasks: Sequence[Images], seed: int, part: float = 0.05) -> tuple[list[Images], list[Images]]:
    """Split off a random part of each task. Return the rest of each task, and the parts."""
    generator = torch.Generator().manual_seed(seed)
    train, valid = [], []
    for x, y in tasks:
        shuffle = torch.randperm(len(y), generator=generator)
        left_out, kept = shuffle.tensor_split([int(part * len(y))])
        valid.append((x[left_out], y[left_out]))
        train.append((x[kept], y[kept]))
    return train, valid


def normalise(mean: Sequence[float], std: Sequence[float]) -> Transform:
    """Return a transform that divides bytes by 255, subtracts ``mean`` and divides by ``std``, per channel.

    A grey image becomes an image with as many channels as ``mean`` has.
    """
    shift, scale = (torch.tensor(values).reshape(-1, 1, 1) for values in (mean, std))

    def transform(images: Tensor) -> Tensor:
        return images.float().div_(255).sub(shift.to(images.device)).div_(scale.to(images.device))

    return transform

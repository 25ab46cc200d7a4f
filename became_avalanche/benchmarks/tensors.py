"""Images in memory as an Avalanche stream, fetched a batch at a time.

Avalanche fetches samples one by one, through several layers of data sets, and stacks them. Here a sample is a ``Row``,
which knows where it is and is read only if somebody looks at it; what puts rows together to a batch (``collate_fn``)
fetches them all at once. Loaders, subsets, concatenations, replay buffers and transforms of Avalanche work as ever.
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
"""Images (n, channels, height, width), most often as bytes, and labels."""

Transform = Callable[[Tensor], Tensor]
"""Of a batch."""


class ImageTensor(Dataset[tuple[Tensor, int]]):
    """Images of one task, with what turns a batch of them into the network's input."""

    def __init__(self, images: Images, transform: Transform, augment: Transform | None = None) -> None:
        """Init.

        :param images: images and labels.
        :param transform: stored images to floats.
        :param augment: stored images to such images, only in training.
        """
        self.images, self.targets = images
        self.transform, self.augment = transform, augment

    def __len__(self) -> int:
        return len(self.targets)

    def batch(self, rows: Tensor, training: bool) -> Tensor:
        """The network's input for the images with these numbers."""
        images = self.images[rows]
        if training and self.augment is not None:
            images = self.augment(images)
        return self.transform(images)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.batch(torch.tensor([row]), training=False)[0], int(self.targets[row])


class Row(Sequence[Any]):
    """A sample that is not read yet: image, label, task label, as soon as somebody looks."""

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
    """An Avalanche data set of ``ImageTensor``s, or of parts of them, whose batches are fetched at once."""

    _where: _Where | None = None

    def __getitem__(self, index: Any) -> Any:
        where = self._where  # called for every sample of a batch, so without the detour over the property
        if where is None or where.of is not self._flat_data:
            where = self.where
        if not where.plain or isinstance(index, slice):
            return super().__getitem__(index)
        return Row(self, index)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self.where.plain:
            return [Row(self, index) for index in indices]
        return [self[index] for index in indices]

    @property
    def where(self) -> _Where:
        """Where the samples are."""
        if self._where is None or self._where.of is not self._flat_data:
            self._where = _Where(self._flat_data)
        return self._where

    def batch(self, indices: list[int]) -> list[Tensor]:
        """Images, labels, and what else Avalanche adds to a sample: by default the task label."""
        chosen = torch.tensor(indices)
        x = self.where.images(chosen, self._flat_data._transform_groups.current_group == "train")
        extra = [attribute for attribute in self._data_attributes.values() if attribute.use_in_getitem]
        return [x, self.where.labels[chosen], *(self.where.extra(attribute)[chosen] for attribute in extra)]


class _Where:
    """In which tensor, and where in it, each sample of a data set is."""

    def __init__(self, flat_data: Any) -> None:
        self.of = flat_data
        self.tensors: list[ImageTensor] = []
        self.plain = True
        self._extra: dict[str, tuple[DataAttribute[Any], Tensor]] = {}
        places = self._places(flat_data)
        self.plain = self.plain and bool(self.tensors)
        if self.plain:
            self.which, self.rows = places.unbind(1)
            self.labels = torch.empty(len(places), dtype=torch.long, device=self.tensors[0].targets.device)
            for k, tensor in enumerate(self.tensors):
                mine = self.which == k
                self.labels[mine] = tensor.targets[self.rows[mine]]

    def _places(self, data: Any) -> Tensor:
        """One line per sample: number of the tensor, number of the row."""
        if isinstance(data, ImageTensor):
            self.tensors.append(data)
            rows = torch.arange(len(data))
            return torch.stack([torch.full_like(rows, len(self.tensors) - 1), rows], dim=1)
        if not isinstance(data, FlatData) or not _without_transforms(data):
            self.plain = False
            return torch.empty(0, 2)
        places = torch.cat([self._places(part) for part in data._datasets])
        if data._indices is None or not self.plain:
            return places
        return places[torch.tensor(data._indices, dtype=torch.long)]

    def extra(self, attribute: DataAttribute[Any]) -> Tensor:
        """All values of an attribute of the samples."""
        known = self._extra.get(attribute.name)
        if known is None or known[0] is not attribute:
            known = self._extra[attribute.name] = (attribute, default_collate(list(attribute)))
        return known[1]

    def images(self, chosen: Tensor, training: bool) -> Tensor:
        """The network's input for the samples with these numbers."""
        if len(self.tensors) == 1:
            return self.tensors[0].batch(self.rows[chosen], training)
        which, rows = self.which[chosen], self.rows[chosen]
        sources: list[int] = sorted(set(which.tolist()))
        parts = [self.tensors[k].batch(rows[which == k], training) for k in sources]
        order = torch.cat([(which == k).nonzero()[:, 0] for k in sources])
        return torch.cat(parts)[order.argsort()]


def _without_transforms(data: Any) -> bool:
    groups = (getattr(data, name, None) for name in ("_transform_groups", "_frozen_transform_groups"))
    return all(transform is None for group in groups if group for transform in group.transform_groups.values())


def collate(batch: list[Any]) -> list[Tensor]:
    """Rows of one data set or of several (replay) to a batch; anything else as torch does."""
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
    """An Avalanche benchmark with a task label for each task, and a stream ``valid`` if there is any.

    :param train: images and labels of each task; likewise the others.
    :param transforms: stored images to floats, for each task.
    :param augment: stored images to such images, on the training stream while it is trained on. A transform group
        that a user adds takes its place.
    :param task_labels: whether tasks have labels of their own; otherwise all have the label 0.
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
    """Options that all streams of images have; see ``image_stream``."""

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
    """A benchmark by one of the two protocols of the paper.

    :param train: images and labels of each task; likewise ``test``.
    :param transforms: bytes to floats, for each task.
    :param seed: which images are kept for validation.
    :param protocol: ``gpm``, with a random twentieth of each task's training images in a ``valid`` stream and no
        augmentation, or ``nscl``, with all of them in training, randomly cropped (padding 4) and flipped, and
        no ``valid`` stream.
    :param task_order: the tasks by number, in the order in which they come, if not in their natural order.
    :param device: where the images are kept, and made into batches. On a GPU, train and evaluate with
        ``pin_memory=False``.
    """
    if protocol not in ("gpm", "nscl"):
        raise ValueError(f"protocol must be 'gpm' or 'nscl'; got {protocol!r}")
    order = list(range(len(train))) if task_order is None else list(task_order)
    if len(set(order)) != len(order) or not set(order) <= set(range(len(train))) or not order:
        raise ValueError(f"task_order must name tasks from 0 to {len(train) - 1}, each once at most; got {task_order}")
    valid: Sequence[Images] = []
    if protocol == "gpm":
        train, valid = split_off_validation(train, seed)

    def chosen(tasks: Sequence[Images]) -> list[Images]:
        return [(tasks[t][0].to(device), tasks[t][1].to(device)) for t in order] if tasks else []

    augment = crop_and_flip if protocol == "nscl" else None
    return benchmark_of(chosen(train), chosen(valid), chosen(test), [transforms[t] for t in order], augment)


def tasks_of(images: Tensor, labels: Tensor, classes: Tensor) -> list[Images]:
    """Images and labels of each task, given its classes, a row per task: the first class of the row has label 0."""
    tasks = []
    for own in classes:
        chosen = torch.isin(labels, own)
        tasks.append((images[chosen], (labels[chosen].unsqueeze(1) == own).int().argmax(1)))
    return tasks


def refuse_uneven(n_tasks: int, classes: int, name: str) -> None:
    """Raise a ValueError if so many tasks cannot have equally many classes."""
    if n_tasks < 1 or classes % n_tasks:
        raise ValueError(f"n_tasks must divide the {classes} classes of {name}; got {n_tasks}")


def crop_and_flip(images: Tensor, padding: int = 4) -> Tensor:
    """Each image of a batch moved by up to ``padding`` pixels, zeros where it is not, and half of them mirrored."""
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
    """The tasks with a random part of each left out, and these parts."""
    generator = torch.Generator().manual_seed(seed)
    train, valid = [], []
    for x, y in tasks:
        shuffle = torch.randperm(len(y), generator=generator)
        left_out, kept = shuffle.tensor_split([int(part * len(y))])
        valid.append((x[left_out], y[left_out]))
        train.append((x[kept], y[kept]))
    return train, valid


def normalise(mean: Sequence[float], std: Sequence[float]) -> Transform:
    """Bytes to floats of a given mean and standard deviation per channel, where 255 is 1. Grey becomes all channels."""
    shift, scale = (torch.tensor(values).reshape(-1, 1, 1) for values in (mean, std))

    def transform(images: Tensor) -> Tensor:
        return images.float().div_(255).sub(shift.to(images.device)).div_(scale.to(images.device))

    return transform

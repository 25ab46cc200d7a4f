"""Streams and plugins that test specifications name by import path, with small benchmarks and records."""

import torch

from became_avalanche import (
    BecameMergePlugin,
    Benchmark,
    GPMPlugin,
    Network,
    NSCLRecipe,
    Recipe,
    Record,
    Stream,
    find_benchmark,
    image_stream,
)
from became_avalanche.benchmarks.tensors import normalise
from became_avalanche.results.record import Seconds, StageRecord, TaskRecord
from tests.helpers import blobs


def tiny_blobs(seed, samples=20):
    """Three tasks that a small network learns in a moment."""
    return blobs(seed=seed, samples=samples)


def images(n, size, classes, seed):
    """Noise images in which one channel encodes the class."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    x = torch.randint(256, (n, 3, size, size), generator=generator, dtype=torch.uint8)
    x[:, 0, : size // 2] = (20 * y.reshape(-1, 1, 1)).to(torch.uint8)
    return x, y


def tiny_images(seed):
    """Three tasks of images without validation data."""
    tasks = [(x[:, :2], y) for x, y in (images(30, 6, 2, k + 10 * seed) for k in range(3))]
    return image_stream(tasks, tasks, [normalise((0.5, 0.5), (0.2, 0.2))] * 3, seed, protocol="nscl")


class OwnProjection(GPMPlugin):
    """A projection that a user has written."""

    def __init__(self, threshold=0.9):
        super().__init__(threshold)


class OwnMerge(BecameMergePlugin):
    """A merge that a user has written, with an additional option."""

    def __init__(self, strength=1.0, **options):
        super().__init__(**options)
        self.strength = strength


BLOBS = Benchmark(
    name="blobs",
    stream=Stream(name=tiny_blobs, n_tasks=3),
    network=Network(name="tests.helpers:mlp"),
    recipe=Recipe(learning_rate=0.1, batch_size=10, epochs=3, patience=1, factor=2, lr_min=0.05),
    hyperparameters=find_benchmark("split-digits").hyperparameters,
)
"""Every method trains on it within a second."""

IMAGES = Benchmark(
    name="images",
    stream=Stream(name=tiny_images, n_tasks=3),
    network=Network(name="tests.helpers:convnet"),
    recipe=NSCLRecipe(10, epochs=3, patience=1, plateaus=1),
    hyperparameters={"nscl": {"a": 10}},
)


def record_of(spec, status="done", finished=None, seconds=(1.0, 0.5), **fields):
    """A record of a run, without accuracies."""
    stages = [[StageRecord(epochs=1)] * (spec.method.n_stages if t else 1) for t in range(spec.n_trainings)]
    spent = Seconds(training=seconds[0], evaluation=seconds[1])
    return Record(
        key=spec.key(),
        spec=spec.completed().model_dump(mode="json"),
        method=spec.method.name,
        label=spec.method.shown,
        status=status,
        tasks=[TaskRecord(stages=stages, seconds=spent) for stages in stages[:finished]],
        **fields,
    )

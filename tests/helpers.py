"""Small streams, models and strategies for the tests of the plugins."""

import io
from contextlib import contextmanager
from functools import cache

import torch
from avalanche.benchmarks import benchmark_from_datasets, with_classes_timeline
from avalanche.benchmarks.scenarios.deprecated.generic_benchmark_creation import (
    create_generic_benchmark_from_tensor_lists,
)
from avalanche.benchmarks.utils import as_classification_dataset
from avalanche.logging import TextLogger
from avalanche.models import MultiHeadClassifier, MultiTaskModule
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.supervised import Naive
from torch import nn
from torch.utils.data import TensorDataset

from became_avalanche import StageAware


@cache
def blobs(n_tasks=3, classes=2, samples=20, shape=(6,), task_labels=True, seed=0):
    """Tasks of noisy class means: separable, but not at once, and different from task to task."""
    generator = torch.Generator().manual_seed(seed)

    def task(t, n):
        means = torch.randn(classes, *shape, generator=torch.Generator().manual_seed(1000 * seed + t))
        y = torch.arange(n) % classes
        return means[y] + 0.7 * torch.randn(n, *shape, generator=generator), y

    train, valid, test = ([task(t, n) for t in range(n_tasks)] for n in (samples, 12, 20))
    labels = list(range(n_tasks)) if task_labels else [0] * n_tasks
    return create_generic_benchmark_from_tensor_lists(
        train, test, other_streams_tensors={"valid": valid}, task_labels=labels
    )


def blobs_without_task_labels(**kwargs):
    """The same tasks as a stream of Avalanche's newer kind, whose experiences and batches know nothing of tasks."""
    streams = {}
    for name, stream in blobs(**kwargs).streams.items():
        pairs = [[experience.dataset[i][:2] for i in range(len(experience.dataset))] for experience in stream]
        tensors = [(torch.stack([x for x, _ in task]), torch.tensor([y for _, y in task])) for task in pairs]
        streams[name] = [as_classification_dataset(_Labelled(*task)) for task in tensors]
    return with_classes_timeline(benchmark_from_datasets(**streams))


class _Labelled(TensorDataset):
    def __init__(self, x, y):
        super().__init__(x, y)
        self.targets = y.tolist()


class Network(MultiTaskModule):
    """Any feature extractor with one head per task."""

    def __init__(self, features, width):
        super().__init__()
        self.features = features
        self.classifier = MultiHeadClassifier(width)

    def forward(self, x, task_labels):
        return self.classifier(self.features(x), task_labels)


def mlp(bias=False):
    return Network(nn.Sequential(nn.Linear(6, 12, bias=bias), nn.ReLU(), nn.Linear(12, 10, bias=bias), nn.ReLU()), 10)


def convnet():
    """Convolutions with biases, stride, padding and groups, and batch normalisation."""
    return Network(
        nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Conv2d(4, 8, 3, stride=2, groups=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32, 10),
            nn.ReLU(),
        ),
        10,
    )


CONV_SHAPE = (2, 6, 6)


class Block(nn.Module):
    """A residual block with a strided shortcut convolution."""

    def __init__(self, channels, out):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, out, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, padding=1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Conv2d(channels, out, 1, stride=2, bias=False)

    def forward(self, x):
        y = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (y + self.shortcut(x)).relu()


def resnet():
    """A small ResNet for images of CONV_SHAPE."""
    return Network(
        nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1, bias=False),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            Block(4, 6),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
        ),
        24,
    )


def naive(model, plugins=(), optimizer=None, metrics=(), loggers=(), **kwargs):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    settings = {"train_mb_size": 10, "train_epochs": 2, "eval_mb_size": 20, **kwargs}
    evaluator = EvaluationPlugin(*metrics, loggers=list(loggers) or [TextLogger(io.StringIO())])
    return Naive(model=model, optimizer=optimizer, plugins=list(plugins), evaluator=evaluator, **settings)


def stream_of(plugins, make_model=mlp, benchmark=None, optimizer=None, seed=0, **kwargs):
    """Train a strategy on a stream and return it."""
    torch.manual_seed(seed)
    model = make_model()
    strategy = naive(model, plugins, optimizer and optimizer(model.parameters()), **kwargs)
    for experience in (benchmark or blobs()).train_stream:
        strategy.train(experience)
    return strategy


def batch_of(experience):
    """All data of an experience, through the plain dataset."""
    dataset = experience.dataset.eval()
    x, y, *_ = dataset.collate_fn([dataset[i] for i in range(len(dataset))])
    return x, y


def logits_of(strategy, experience):
    """What the strategy's evaluation of an experience computes."""
    outputs = []
    original = strategy.forward
    strategy.forward = lambda: outputs.append(original()) or outputs[-1]
    strategy.eval(experience)
    del strategy.forward
    return torch.cat(outputs)


def weights(model):
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(first, second):
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


class Spy(SupervisedPlugin, StageAware):
    """Calls functions of the strategy at callbacks: ``Spy(after_update=f)``, also at ``on_stage_start``."""

    CALLBACKS = tuple(name for name in dir(SupervisedPlugin) if name.startswith(("before_", "after_")))

    def __init__(self, **calls):
        super().__init__()
        for name, call in calls.items():
            assert name in (*self.CALLBACKS, "on_stage_start"), name
            if name != "on_stage_start":
                setattr(self, name, lambda strategy, call=call, **kwargs: call(strategy))
        self._on_stage_start = calls.get("on_stage_start", lambda strategy, stage: None)

    def on_stage_start(self, strategy, stage):
        self._on_stage_start(strategy, stage)


class Stages:
    """The weights at the start and the end of each stage of a stream, and of each experience, seen from outside."""

    def __init__(self):
        self.starts, self.ends, self.merged, self._stage = [], [], [], None

    def plugin(self):
        return Spy(
            on_stage_start=self.note_stage,
            before_training_epoch=self.note_start,
            after_training_epoch=self.note_end,
            after_training_exp=lambda s: self.merged.append(weights(s.model)),
        )

    def note_stage(self, strategy, stage):
        self._stage = stage

    def note_start(self, strategy):
        if self._stage is not None:
            self.starts.append((strategy.clock.train_exp_counter, self._stage, weights(strategy.model)))
            self._stage = None

    def note_end(self, strategy):
        if strategy.clock.train_exp_epochs == strategy.train_epochs - 1:
            self.ends.append(weights(strategy.model))


@contextmanager
def harmed(path, aside, content=None):
    """A file or folder that is missing for a while, or has other content: bytes, or a function of what it has.

    :param aside: where it is meanwhile.
    """
    path.rename(aside)
    try:
        if content is not None:
            path.write_bytes(content(aside.read_bytes()) if callable(content) else content)
        yield
    finally:
        path.unlink(missing_ok=True)
        aside.rename(path)


def half(content):
    """The first half of a file."""
    return content[: len(content) // 2]

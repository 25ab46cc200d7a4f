"""Avalanche's own example scripts, with our plugins added to their list and nothing else changed.

They are quick versions: handwritten digits of 8 x 8 pixels in place of MNIST, few experiences, small networks. Each is
run as it is, with gradient projection, and with the merge, too.
"""

import io

import pytest
import torch
from avalanche.benchmarks import class_incremental_benchmark, nc_benchmark
from avalanche.benchmarks.utils import as_classification_dataset
from avalanche.benchmarks.utils.data_loader import TaskBalancedDataLoader
from avalanche.checkpointing import maybe_load_checkpoint, save_checkpoint
from avalanche.evaluation.metrics import (
    accuracy_metrics,
    bwt_metrics,
    class_accuracy_metrics,
    confusion_matrix_metrics,
    forgetting_metrics,
    forward_transfer_metrics,
    loss_metrics,
    timing_metrics,
)
from avalanche.logging import CSVLogger, InteractiveLogger, TextLogger
from avalanche.models import MTSimpleMLP, SimpleMLP
from avalanche.training.determinism.rng_manager import RNGManager
from avalanche.training.plugins import EvaluationPlugin, ReplayPlugin, SupervisedPlugin
from avalanche.training.supervised import EWC, Cumulative, Naive
from sklearn.datasets import load_digits
from torch.nn import CrossEntropyLoss
from torch.optim import SGD, Adam
from torch.utils.data import TensorDataset
from torchvision.transforms import Compose, Lambda, RandomCrop

from became_avalanche import BecameMergePlugin, GPMPlugin


class Digits(TensorDataset):
    """As ``torchvision.datasets.MNIST``: images, ``targets`` and a transform."""

    def __init__(self, train, transform=None):
        images, labels = load_digits(return_X_y=True)
        part = slice(200) if train else slice(1000, 1080)
        self.targets, self.transform = labels[part].tolist(), transform
        super().__init__(torch.tensor(images[part], dtype=torch.float32).reshape(-1, 1, 8, 8) / 16)

    def __getitem__(self, index):
        (x,) = super().__getitem__(index)
        return x if self.transform is None else self.transform(x), self.targets[index]


def split_mnist(**options):
    return nc_benchmark(Digits(True), Digits(False), 5, **{"task_labels": False, "seed": 1, **options})


def simple_mlp():
    return SimpleMLP(num_classes=10, input_size=64, hidden_size=24)


def text_logger():
    return TextLogger(io.StringIO())


# ---------------------------------------------------------------------------------------------------------- scripts


def naive(plugins):
    benchmark = split_mnist()
    evaluator = EvaluationPlugin(
        accuracy_metrics(minibatch=True, epoch=True, experience=True, stream=True),
        loss_metrics(minibatch=True, epoch=True, experience=True, stream=True),
        loggers=[InteractiveLogger()],
    )
    model = simple_mlp()
    strategy = Naive(
        model=model,
        optimizer=SGD(model.parameters(), lr=0.1),
        criterion=CrossEntropyLoss(),
        train_epochs=1,
        train_mb_size=32,
        evaluator=evaluator,
        plugins=plugins,
    )
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream[:])
    return strategy


def multihead(plugins):
    model = MTSimpleMLP(input_size=64, hidden_size=24)
    benchmark = split_mnist(task_labels=True)
    evaluator = EvaluationPlugin(
        accuracy_metrics(minibatch=False, epoch=True, experience=True, stream=True),
        forgetting_metrics(experience=True),
        loggers=[text_logger()],
    )
    strategy = EWC(
        model=model,
        optimizer=Adam(model.parameters(), lr=0.01),
        criterion=CrossEntropyLoss(),
        train_mb_size=32,
        train_epochs=2,
        eval_mb_size=128,
        evaluator=evaluator,
        ewc_lambda=0.4,
        plugins=plugins,
    )
    for train_task in benchmark.train_stream:
        strategy.train(train_task)
        strategy.eval(benchmark.test_stream)
    return strategy


def optimizer_param_groups(plugins):
    model = MTSimpleMLP(input_size=64, hidden_size=24)
    benchmark = split_mnist(task_labels=True)
    head, rest = {"params": [], "lr": 0.1}, {"params": [], "lr": 0.01}
    for name, parameter in model.named_parameters():
        (head if "classifier" in name else rest)["params"].append(parameter)
    strategy = EWC(
        model=model,
        optimizer=SGD([head, rest]),
        criterion=CrossEntropyLoss(),
        train_mb_size=32,
        train_epochs=2,
        evaluator=EvaluationPlugin(accuracy_metrics(experience=True, stream=True), loggers=[text_logger()]),
        ewc_lambda=0.4,
        plugins=plugins,
    )
    for train_task in benchmark.train_stream:
        strategy.train(train_task, verbose_optimizer=True)
        strategy.eval(benchmark.test_stream)
    return strategy


def eval_plugin(plugins):
    train = Digits(True, RandomCrop(8, padding=1))
    benchmark = nc_benchmark(train, Digits(False), 5, task_labels=False, seed=1234)
    model = simple_mlp()
    evaluator = EvaluationPlugin(
        accuracy_metrics(minibatch=True, epoch=True, epoch_running=True, experience=True, stream=True),
        loss_metrics(minibatch=True, epoch=True, epoch_running=True, experience=True, stream=True),
        class_accuracy_metrics(epoch=True, stream=True, classes=list(range(benchmark.n_classes))),
        forgetting_metrics(experience=True, stream=True),
        bwt_metrics(experience=True, stream=True),
        forward_transfer_metrics(experience=True, stream=True),
        timing_metrics(epoch=True, experience=True, stream=True),
        loggers=[text_logger(), csv_logger := CSVLogger()],
        collect_all=True,
    )
    strategy = Naive(
        model=model,
        optimizer=SGD(model.parameters(), lr=0.02, momentum=0.9),
        criterion=CrossEntropyLoss(),
        train_mb_size=50,
        train_epochs=1,
        eval_mb_size=100,
        evaluator=evaluator,
        eval_every=1,
        plugins=plugins,
    )
    for experience in benchmark.train_stream:
        strategy.train(experience, eval_streams=[benchmark.test_stream])
        strategy.eval(benchmark.test_stream)
    csv_logger.close()
    return strategy


def all_mnist_permuted(plugins):
    generator = torch.Generator().manual_seed(1)
    orders = [torch.randperm(64, generator=generator) for _ in range(3)]
    parts = [
        [
            as_classification_dataset(
                Digits(train, Compose([Lambda(lambda x, order=order: x.flatten()[order].reshape(1, 8, 8))]))
            )
            for order in orders
        ]
        for train in (True, False)
    ]
    benchmark = nc_benchmark(*parts, 3, task_labels=False, one_dataset_per_exp=True, shuffle=False,
                             class_ids_from_zero_in_each_exp=True)  # fmt: skip
    return _all_mnist(benchmark, plugins)


def all_mnist_split(plugins):
    return _all_mnist(split_mnist(), plugins)


def _all_mnist(benchmark, plugins):
    model = simple_mlp()
    strategy = Naive(
        model=model,
        optimizer=SGD(model.parameters(), lr=0.02, momentum=0.9),
        criterion=CrossEntropyLoss(),
        train_mb_size=32,
        train_epochs=2,
        eval_mb_size=32,
        evaluator=EvaluationPlugin(accuracy_metrics(stream=True), loggers=[text_logger()]),
        plugins=plugins,
    )
    for train_task in benchmark.train_stream:
        strategy.train(train_task)
        strategy.eval(benchmark.test_stream)
    return strategy


def getting_started(plugins):
    benchmark = class_incremental_benchmark(
        {name: as_classification_dataset(Digits(name == "train")) for name in ("train", "test")},
        num_experiences=5,
        seed=1234,
    )
    model = simple_mlp()
    strategy = Naive(
        model=model,
        optimizer=SGD(model.parameters(), lr=0.02, momentum=0.9),
        criterion=CrossEntropyLoss(),
        train_mb_size=32,
        train_epochs=2,
        eval_mb_size=100,
        evaluator=EvaluationPlugin(accuracy_metrics(stream=True), loggers=[text_logger()]),
        plugins=plugins,
    )
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
    return strategy


def dataloader(plugins):
    class MyCumulativeStrategy(Cumulative):
        def make_train_dataloader(self, shuffle=True, **kwargs):
            self.dataloader = TaskBalancedDataLoader(self.adapted_dataset, batch_size=self.train_mb_size)

    benchmark = split_mnist()
    model = simple_mlp()
    strategy = MyCumulativeStrategy(
        model=model,
        optimizer=SGD(model.parameters(), lr=0.02, momentum=0.9, weight_decay=0.001),
        criterion=CrossEntropyLoss(),
        train_epochs=2,
        train_mb_size=32,
        evaluator=EvaluationPlugin(accuracy_metrics(stream=True), loggers=[text_logger()]),
        plugins=plugins,
    )
    for step in benchmark.train_stream:
        strategy.train(step)
        strategy.eval(step)
    strategy.eval(benchmark.test_stream)
    return strategy


def checkpointing(plugins):
    RNGManager.set_random_seeds(1234)
    benchmark = split_mnist()
    file = io.BytesIO()
    for _ in range(2):  # the script is run twice: the second time it finds the checkpoint after three experiences
        model = simple_mlp()
        strategy = Naive(
            model=model,
            optimizer=SGD(model.parameters(), lr=0.02, momentum=0.9),
            criterion=CrossEntropyLoss(),
            train_mb_size=32,
            train_epochs=2,
            evaluator=EvaluationPlugin(accuracy_metrics(stream=True), loggers=[InteractiveLogger()]),
            plugins=plugins,
        )
        if file.tell():
            file.seek(0)
            strategy, first = maybe_load_checkpoint(strategy, file)
            assert first == 3
        for experience in benchmark.train_stream[strategy.clock.train_exp_counter :][:3]:
            strategy.train(experience)
            strategy.eval(benchmark.test_stream)
            file.seek(0)
            file.truncate()
            save_checkpoint(strategy, file)
    return strategy


def confusion_matrix(plugins):
    benchmark = nc_benchmark(Digits(True, RandomCrop(8, padding=1)), Digits(False), 5, task_labels=False, seed=1234)
    model = simple_mlp()
    strategy = Naive(
        model=model,
        optimizer=SGD(model.parameters(), lr=0.02, momentum=0.9),
        criterion=CrossEntropyLoss(),
        train_mb_size=32,
        train_epochs=2,
        evaluator=EvaluationPlugin(
            accuracy_metrics(epoch=True, experience=True, stream=True),
            confusion_matrix_metrics(num_classes=10, save_image=False, normalize="all", stream=True),
            loggers=text_logger(),
        ),
        plugins=[ReplayPlugin(50), *plugins],
    )
    for experience in benchmark.train_stream:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)
    return strategy


SCRIPTS = (
    naive,
    multihead,
    optimizer_param_groups,
    eval_plugin,
    all_mnist_permuted,
    all_mnist_split,
    getting_started,
    dataloader,
    checkpointing,
    confusion_matrix,
)


# ------------------------------------------------------------------------------------------------------------- tests


class Watch(SupervisedPlugin):
    """Notes the first layer after the first experience."""

    first = None

    def after_training_exp(self, strategy, **kwargs):
        if self.first is None:
            data = strategy.experience.dataset.eval()
            self.x = torch.stack([data[i][0] for i in range(len(data))]).flatten(1)
            self.first = self.outputs(strategy)

    def outputs(self, strategy):
        with torch.no_grad():
            return strategy.model.features[0](self.x)


def run(script, plugins):
    """How far the first layer's outputs for the first experience move later, and the accuracy on the test stream."""
    torch.manual_seed(0)
    strategy = script([*plugins, Watch()])
    watch = next(plugin for plugin in strategy.plugins if isinstance(plugin, Watch))
    moved = float((watch.outputs(strategy) - watch.first).norm() / watch.first.norm())
    accuracy = [
        value for name, value in strategy.evaluator.get_last_metrics().items() if "Top1_Acc_Stream/eval" in name
    ]
    return strategy, moved, accuracy[-1]


@pytest.mark.filterwarnings("ignore:Call to deprecated function update:DeprecationWarning")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_projection_protects_in_a_script_that_knows_nothing_of_it(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, free, _ = run(script, [])
    _, guarded, _ = run(script, [GPMPlugin(threshold=0.999)])
    assert guarded < 0.2 * free
    assert guarded < 0.02
    merged, _, accuracy = run(script, [GPMPlugin(threshold=0.9), BecameMergePlugin()])
    merge = next(plugin for plugin in merged.plugins if isinstance(plugin, BecameMergePlugin))
    assert len(merge.merges) == merge.t - 1 >= 2
    assert all(0 < record.coefficient <= 1 for record in merge.merges)
    assert accuracy >= 0.1  # guessing: some of these scripts learn one class after the other, without replay

"""Measure the cost of a run outside its training steps: fetching batches, Avalanche, evaluation and validation.

    python experiments/speed/pipeline.py [--quick] [--data FOLDER]

One thread, batches of 64. Training is compared with a plain loop over the same tensors. Ratios of CPU time are medians
over interleaved repeats.
"""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import process_time

import torch
from avalanche.benchmarks.scenarios.deprecated.generic_benchmark_creation import (
    create_generic_benchmark_from_tensor_lists,
)
from avalanche.logging import BaseLogger
from avalanche.models.utils import avalanche_model_adaptation
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive
from avalanche.training.templates import SupervisedTemplate
from rows import Row
from torch import nn
from torch.nn import functional as F

from became_avalanche import LeNet, MultiHeadMLP, PlateauPlugin, split_digits, train
from became_avalanche.benchmarks.cifar import NORMALISATION
from became_avalanche.benchmarks.tensors import benchmark_of, crop_and_flip, normalise
from became_avalanche.runs import trace

EPOCHS = {"digits": 20, "LeNet": 1}


def rows(quick: bool, data: Path = Path("data")) -> list[Row]:
    """Return all measurements of this file."""
    torch.set_num_threads(1)
    repeats = 3 if quick else 7
    return [digits(repeats), *(images(augment, repeats) for augment in (None, crop_and_flip)), *passes(quick, data)]


# ---------------------------------------------------------------------------------------------------------- training


def digits(repeats: int) -> Row:
    """Measure a task of split-digits, also as an ordinary Avalanche benchmark and with batches fetched beforehand."""
    stream = split_digits()
    tensor = stream.train_stream[0].dataset.sample_index.tensors[0]
    x, y = tensor.images, tensor.targets
    ordinary = create_generic_benchmark_from_tensor_lists([(x, y)], [(x, y)], task_labels=[0])
    ours, theirs, free = ratios(
        [
            plain(MultiHeadMLP(), stream, x, y, tensor.transform, None, EPOCHS["digits"]),
            avalanche(MultiHeadMLP(), stream, EPOCHS["digits"]),
            avalanche(MultiHeadMLP(), ordinary, EPOCHS["digits"]),
            avalanche(MultiHeadMLP(), stream, EPOCHS["digits"], FreeBatches),
        ],
        repeats,
    )
    note = f"{theirs:.2f} as an ordinary benchmark; {free:.2f} with batches at no cost: Avalanche's own work"
    return Row("epoch of split-digits / plain loop", ours, "<= 1.5", ours <= 1.5, note)


def images(augment: Callable[[torch.Tensor], torch.Tensor] | None, repeats: int, n: int = 640) -> Row:
    """Measure LeNet on random images, with or without augmentation."""
    x, y = torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8), torch.arange(n) % 10
    transform = normalise(**NORMALISATION["gpm"])
    stream = benchmark_of([(x, y)], [], [(x, y)], [transform], augment)
    loops = [
        plain(LeNet(), stream, x, y, transform, augment, EPOCHS["LeNet"]),
        avalanche(LeNet(), stream, EPOCHS["LeNet"]),
    ]
    (ours,) = ratios(loops, repeats)
    what = f"epoch of LeNet{' with crops and flips' if augment else ''} / plain loop"
    return Row(what, ours, "<= 1.1", ours <= 1.1, f"{repeats} repeats, random images")


def plain(model, stream, x, y, transform, augment, epochs):
    """Return a function that trains with a plain loop, without Avalanche."""
    avalanche_model_adaptation(model, stream.train_stream[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    labels = torch.zeros(64, dtype=torch.long)

    def training():
        model.train()
        for _ in range(epochs):
            for chosen in torch.randperm(len(y)).split(64):
                batch = x[chosen] if augment is None else augment(x[chosen])
                optimizer.zero_grad()
                F.cross_entropy(model(transform(batch), labels[: len(chosen)]), y[chosen]).backward()
                optimizer.step()

    return training


class FreeBatches(Naive):
    """A strategy that fetches its batches only once, so that they cost nothing later."""

    def make_train_dataloader(self, **kwargs):
        """Fetch all batches of the experience at the first call."""
        if not hasattr(self, "batches"):
            super().make_train_dataloader(**kwargs)
            self.batches = list(self.dataloader)
        self.dataloader = [list(batch) for batch in self.batches]


def avalanche(model, stream, epochs, strategy_class=Naive):
    """Return a function that trains with an Avalanche strategy."""
    strategy = strategy_class(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        criterion=nn.CrossEntropyLoss(),
        evaluator=EvaluationPlugin(loggers=[BaseLogger()]),
        train_mb_size=64,
        train_epochs=epochs,
    )
    return lambda: strategy.train(stream.train_stream[0])


def ratios(loops, repeats: int) -> list[float]:
    """Return the CPU time of every loop except the first, divided by the time of the first."""
    seconds = [[timed(loop) for loop in loops] for _ in range(repeats + 1)][1:]
    return [median(own[k] / own[0] for own in seconds) for k in range(1, len(loops))]


def timed(loop) -> float:
    """Return the CPU seconds of a call."""
    start = process_time()
    loop()
    return process_time() - start


# ------------------------------------------------------------------------------------------------------------ passes


def passes(quick: bool, data: Path) -> list[Row]:
    """Return the share of evaluation and validation in a run."""
    with clocks() as seconds:
        total = timed(lambda: train("split-digits", "gpm", n_tasks=2 if quick else None))
    found = [share("split-digits, gpm", sum(seconds.values()) / total, "a whole run")]
    if not quick and (data / "cifar-100-python").is_dir():
        epochs, usual, tasks = 2, 15, 10
        with clocks() as seconds:
            total = timed(
                lambda: train("10-split-cifar100-cpu", "gpm", n_tasks=1, max_epochs=epochs, dataset_root=data)
            )
        # all tasks seen so far are evaluated after each of the ten tasks: (10 + 1) / 2 tasks on average
        evaluation = seconds["evaluation"] * (tasks + 1) / 2 + seconds["first epoch"]
        outside = seconds["validation"] / epochs * usual + evaluation
        training = (total - sum(seconds.values())) / epochs * usual
        note = f"from {epochs} epochs of one task, for {tasks} tasks of {usual} epochs"
        found.append(share("10-split-cifar100-cpu, gpm", outside / (training + outside), note))
    return found


def share(run: str, value: float, note: str) -> Row:
    """Return the row for a share of a run."""
    return Row(f"evaluation and validation / run, {run}", value, "<= 0.05", value <= 0.05, note)


@contextmanager
def clocks() -> Iterator[dict[str, float]]:
    """Measure CPU seconds of evaluation, of validation, and of testing after the first epoch, inside the context."""
    seconds = {"evaluation": 0.0, "validation": 0.0, "first epoch": 0.0}
    places = [
        (SupervisedTemplate, "eval", "evaluation"),
        (trace, "_accuracy", "first epoch"),
        (PlateauPlugin, "loss", "validation"),
    ]
    originals = [getattr(owner, name) for owner, name, _ in places]

    def with_clock(function, part):
        def call(*args, **kwargs):
            start = process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[part] += process_time() - start

        return call

    for (owner, name, part), original in zip(places, originals, strict=True):
        setattr(owner, name, with_clock(original, part))
    try:
        yield seconds
    finally:
        for (owner, name, _), original in zip(places, originals, strict=True):
            setattr(owner, name, original)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=Path("data"))
    arguments = parser.parse_args()
    for row in rows(arguments.quick, arguments.data):
        print(row)

"""Compare an epoch of AlexNet and of LeNet with the modules of the package and with PyTorch's own modules.

    python experiments/speed/networks.py [--quick] [--data FOLDER]

"Before" is the network with ``nn.Dropout``, ``nn.LocalResponseNorm`` and contiguous weights, in a process with the
default allocator. Two processes with one thread each take turns to train on the same images. CPU time is measured.
"""

import argparse
import multiprocessing
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import process_time

import torch
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive
from rows import Row
from torch import nn

from became_avalanche import AlexNet, LeNet, keep_freed_memory, split_cifar100
from became_avalanche.benchmarks.cifar import NORMALISATION
from became_avalanche.benchmarks.tensors import benchmark_of, normalise
from became_avalanche.models.dropout import Dropout
from became_avalanche.models.lrn import LocalResponseNorm

GOALS = {"AlexNet": 0.6, "LeNet": 0.45}
IMAGES = 640


def rows(quick: bool, data: Path = Path("data")) -> list[Row]:
    """Return the CPU time of an epoch divided by the time "before", for each network."""
    return [row(network, goal, 3 if quick else 7, data) for network, goal in GOALS.items()]


def row(network: str, goal: float, repeats: int, data: Path) -> Row:
    """Return the median ratio over epochs that two processes train in turns, after one epoch each to warm up."""
    ways = [Training(network, before, data) for before in (True, False)]
    seconds = [[way.epoch() for way in ways] for _ in range(repeats + 1)][1:]
    for way in ways:
        way.end()
    ratio = median(now / before for before, now in seconds)
    before, now = (1e3 * median(own) * 64 / IMAGES for own in zip(*seconds, strict=True))
    note = f"{before:.0f} ms before and {now:.0f} ms now for a batch of 64; {repeats} repeats, {images(data)[1]}"
    return Row(f"epoch of {network} / before", ratio, f"<= {goal}", ratio <= goal, note)


class Training:
    """A separate process that trains an epoch on request."""

    def __init__(self, network: str, before: bool, data: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, network, before, data), daemon=True)
        self.process.start()

    def epoch(self) -> float:
        """Train an epoch and return its CPU seconds."""
        self.connection.send("epoch")
        return self.connection.recv()

    def end(self) -> None:
        """End the process."""
        self.connection.send("end")
        self.process.join()


def serve(connection: Connection, network: str, before: bool, data: Path) -> None:
    """Train an epoch for each message "epoch", until another message arrives."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = {"AlexNet": AlexNet, "LeNet": LeNet}[network]()
    if before:
        with_pytorch_modules(model)
    else:
        keep_freed_memory()
    x, y = images(data)[0]
    stream = benchmark_of([(x, y)], [], [(x, y)], [normalise(**NORMALISATION["gpm"])])
    strategy = Naive(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        criterion=nn.CrossEntropyLoss(),
        evaluator=EvaluationPlugin(loggers=[BaseLogger()]),
        train_mb_size=64,
        train_epochs=1,
    )
    while connection.recv() == "epoch":
        start = process_time()
        strategy.train(stream.train_stream[0])
        connection.send(process_time() - start)


def with_pytorch_modules(model: nn.Module) -> None:
    """Replace the modules of the package by PyTorch's, and make the weights contiguous."""
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if isinstance(child, Dropout):
                setattr(parent, name, nn.Dropout(child.p))
            elif isinstance(child, LocalResponseNorm):
                setattr(parent, name, nn.LocalResponseNorm(child.size, child.alpha, 0.75, child.k))
    model.to(memory_format=torch.contiguous_format)


def images(data: Path) -> tuple[tuple[torch.Tensor, torch.Tensor], str]:
    """Return images and labels of the first task of 10-Split CIFAR-100, or random ones, and a description."""
    if (data / "cifar-100-python").is_dir():
        tensor = split_cifar100(dataset_root=data).train_stream[0].dataset.sample_index.tensors[0]
        return (tensor.images[:IMAGES], tensor.targets[:IMAGES]), "images of CIFAR-100"
    x = torch.randint(256, (IMAGES, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return (x, torch.arange(IMAGES) % 10), "random images"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--data", type=Path, default=Path("data"))
    arguments = parser.parse_args()
    for row in rows(arguments.quick, arguments.data):
        print(row)

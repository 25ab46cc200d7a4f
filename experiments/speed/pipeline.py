"""Training on an Avalanche stream of images against a plain loop over the same tensors: one thread, batches of 64.

    python experiments/speed/pipeline.py

Prints the time of a training of five epochs divided by that of the plain loop in the same repeat, as the median over
interleaved repeats: for the streams here, and for an ordinary Avalanche benchmark of the same images, which are floats
already.
"""

import argparse
from statistics import median
from time import perf_counter

import torch
from avalanche.benchmarks.scenarios.deprecated.generic_benchmark_creation import (
    create_generic_benchmark_from_tensor_lists,
)
from avalanche.logging import BaseLogger
from avalanche.models.utils import avalanche_model_adaptation
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive
from torch import nn
from torch.nn import functional as F

from became_avalanche import AlexNet, LeNet, MultiHeadNetwork
from became_avalanche.benchmarks.cifar import NORMALISATION
from became_avalanche.benchmarks.tensors import benchmark_of, crop_and_flip, normalise

EPOCHS = 5

NETWORKS = {
    "one layer": lambda: MultiHeadNetwork(nn.Sequential(nn.Flatten(), nn.Linear(3072, 100), nn.ReLU()), 100),
    "LeNet": LeNet,
    "AlexNet": AlexNet,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randint(256, (arguments.samples, 3, 32, 32), dtype=torch.uint8)
    y = torch.arange(len(x)) % 10
    transform = normalise(**NORMALISATION["gpm"])
    ordinary = create_generic_benchmark_from_tensor_lists([(transform(x), y)], [(transform(x), y)], task_labels=[0])
    print(f"{'network':10} {'augmentation':14} {'this stream':>12} {'ordinary benchmark':>20}")
    for name, network in NETWORKS.items():
        for augment in (None, crop_and_flip):
            stream = benchmark_of([(x, y)], [], [(x, y)], [transform], augment)
            loops = [plain(network(), stream, x, y, transform, augment), avalanche(network(), stream)]
            if augment is None:
                loops.append(avalanche(network(), ordinary))
            seconds = [[timed(loop) for loop in loops] for _ in range(arguments.repeats + 1)][1:]
            ratios = [f"{median(own[k] / own[0] for own in seconds):.2f}" for k in range(1, len(loops))]
            ours, theirs = (*ratios, "–")[:2]
            print(f"{name:10} {'crop and flip' if augment else 'none':14} {ours:>12} {theirs:>20}")


def plain(model, stream, x, y, transform, augment):
    """A training as one would write it without Avalanche."""
    avalanche_model_adaptation(model, stream.train_stream[0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def training():
        model.train()
        for _ in range(EPOCHS):
            for rows in torch.randperm(len(y)).split(64):
                images = x[rows] if augment is None else augment(x[rows])
                optimizer.zero_grad()
                F.cross_entropy(model(transform(images), 0), y[rows]).backward()
                optimizer.step()

    return training


def avalanche(model, stream):
    """The training of a strategy."""
    strategy = Naive(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        criterion=nn.CrossEntropyLoss(),
        evaluator=EvaluationPlugin(loggers=[BaseLogger()]),
        train_mb_size=64,
        train_epochs=EPOCHS,
    )
    return lambda: strategy.train(stream.train_stream[0])


def timed(loop) -> float:
    start = perf_counter()
    loop()
    return perf_counter() - start


if __name__ == "__main__":
    main()

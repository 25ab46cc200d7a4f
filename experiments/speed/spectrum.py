"""Measure what limits the memory update of NSCL: decompositions of a covariance, and the cut in its spectrum.

    python experiments/speed/spectrum.py [--data FOLDER]

Prints the CPU seconds of several decompositions of the covariance of a layer with 2304 inputs. Also prints, for two
layers of the pre-activation ResNet18, before training and after 12 steps, the share of eigenvalues that NSCL assumes to
be zero: those below ten times the smallest or 1e-6 of the largest.
"""

import argparse
from pathlib import Path
from time import process_time

import rows as speed
import scipy.linalg
import torch
from memory_update import inputs_of
from rows import strategy_of

from became_avalanche import PreActResNet18
from became_avalanche.plugins.nscl import FLOOR
from became_avalanche.subspace.inputs import InputMatrix, add_inputs


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="folder with cifar-100-python; random images without it")
    speed.DATA = parser.parse_args().data
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = PreActResNet18()
    print(f"{speed.kind_of_images()}; share of eigenvalues that count as zero")
    for steps in (0, 12):
        if steps:
            train(model, steps)
        for samples, dimension in ((80, 1152), (320, 2304)):
            gram = covariance(model, samples, dimension)
            values = torch.linalg.eigvalsh(gram)
            null = values <= 10 * max(float(values[0]), FLOOR * float(values[-1]))
            print(f"  {dimension} inputs, after {steps:2} steps: {100 * float(null.double().mean()):.0f} %")
    half = {"subset_by_index": [0, len(gram) // 2], "driver": "evr"}
    for name, decompose in (
        ("Cholesky factor", lambda: torch.linalg.cholesky(gram)),
        ("eigenvalues", lambda: torch.linalg.eigvalsh(gram)),
        ("eigenvalues and half of the eigenvectors (evr of scipy)", lambda: scipy.linalg.eigh(gram.numpy(), **half)),
        ("eigenvalues and eigenvectors", lambda: torch.linalg.eigh(gram)),
        ("singular value decomposition", lambda: torch.linalg.svd(gram)),
    ):
        start = process_time()
        decompose()
        print(f"{name}: {process_time() - start:.2f} s")


def train(model: PreActResNet18, steps: int) -> None:
    """Train a few steps on the first task."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    pause = speed.Pause(steps, lambda strategy: None)
    strategy_of(model, optimizer, [pause], 32).train(speed.images().train_stream[0])


def covariance(model: PreActResNet18, samples: int, dimension: int) -> torch.Tensor:
    """Return the covariance of the inputs of the first layer that has ``dimension`` inputs."""
    layers = inputs_of(model, 0, samples).values()
    layer, x = next((own, x) for own, x in layers if own.weight[0].numel() == dimension)
    matrix = InputMatrix()
    add_inputs(matrix, layer, x)
    return matrix._gram[0]


if __name__ == "__main__":
    main()

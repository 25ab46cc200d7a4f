"""Compare a training step of AlexNet with and without ``torch.compile``, which needs a C++ compiler."""

from shutil import which
from time import perf_counter

import torch
from rows import Row, at_most, cpu_times, ratio
from torch.nn import functional as F

from became_avalanche import AlexNet


def rows(quick: bool) -> list[Row]:
    """Return the ratio of compiled to plain steps; no row if ``quick`` or without a compiler."""
    if quick or which("g++") is None:
        return []
    torch.manual_seed(0)
    network = torch.nn.Sequential(AlexNet().features, torch.nn.Linear(2048, 10))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    x, y = torch.randn(64, 3, 32, 32), torch.randint(10, (64,))
    compiled = torch.compile(network)

    def step(forward) -> None:
        optimizer.zero_grad()
        F.cross_entropy(forward(x), y).backward()
        optimizer.step()

    start = perf_counter()
    step(compiled)
    first = perf_counter() - start
    seconds = cpu_times({"plain": lambda: step(network), "compiled": lambda: step(compiled)}, 15)
    note = f"random images; the first step takes {first:.0f} s. From 0.95 on it would be worth an option"
    return [at_most(0.95, "compiled / plain step, AlexNet, batch 64", ratio(seconds, "compiled", "plain"), note)]

"""Measure the speed-up of single parts of the networks, and profile training and validation on split-digits.

    python experiments/speed/parts.py

One thread, random images. Milliseconds are medians of CPU time over interleaved repeats. The shares come from cProfile,
which overestimates the cost of small functions.
"""

import cProfile
import pstats
import warnings
from collections.abc import Callable
from statistics import median

import torch
from pipeline import EPOCHS, avalanche
from rows import cpu_times
from torch import nn

from became_avalanche import (
    AlexNet,
    MultiHeadMLP,
    PlateauPlugin,
    ReducedResNet18,
    keep_freed_memory,
    split_digits,
    train,
)
from became_avalanche.models.dropout import Dropout
from became_avalanche.models.lrn import LocalResponseNorm


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    alexnet = step(AlexNet().features, (64, 3, 32, 32))
    given_back = milliseconds({"step": alexnet}, 15)[0]
    keep_freed_memory()
    compare("step of AlexNet, memory kept / given back", milliseconds({"step": alexnet}, 15)[0], given_back)

    first = (64, 64, 29, 29)
    dropouts = {"here": step(Dropout(0.2), first), "PyTorch": step(nn.Dropout(0.2), first)}
    compare("dropout of AlexNet's first layer, here / PyTorch", *milliseconds(dropouts, 15))

    layers = ((64, 20, 32, 32), (64, 50, 16, 16))
    ours = [step(LocalResponseNorm(4, alpha=0.001 / 9), size) for size in layers]
    theirs = [step(nn.LocalResponseNorm(4, alpha=0.001 / 9), size) for size in layers]
    norms = {"here": lambda: [run() for run in ours], "PyTorch": lambda: [run() for run in theirs]}
    compare("both normalisations of LeNet, here / PyTorch", *milliseconds(norms, 15))

    steps = {}
    for order in (torch.channels_last, torch.contiguous_format):
        steps[order] = step(ReducedResNet18(32).features.to(memory_format=order), (64, 3, 32, 32))
    compare("step of ReducedResNet18, channels-last / contiguous", *milliseconds(steps, 7))

    profiler = cProfile.Profile()
    training = avalanche(MultiHeadMLP(), split_digits(), EPOCHS["digits"])
    training()
    profiler.runcall(training)
    print_shares("training of split-digits", profiler)

    profiler, loss = cProfile.Profile(), PlateauPlugin.loss
    PlateauPlugin.loss = lambda *args: profiler.runcall(loss, *args)
    train("split-digits", "gpm", n_tasks=2)
    print_shares("validation of split-digits", profiler)


def step(module: nn.Module, size: tuple[int, ...]) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass of a module."""
    x = torch.randn(size).to(memory_format=torch.channels_last)
    x.requires_grad_(not list(module.parameters()))
    return lambda: module(x).square().sum().backward()


def milliseconds(work: dict[object, Callable[[], object]], repeats: int) -> list[float]:
    """Return the median CPU time of each function in milliseconds."""
    return [1e3 * median(seconds) for seconds in cpu_times(work, repeats).values()]


def compare(what: str, ours: float, theirs: float) -> None:
    print(f"{what}: {ours:.1f} / {theirs:.1f} ms = {ours / theirs:.2f}", flush=True)


def print_shares(what: str, profiler: cProfile.Profile) -> None:
    """Print the most expensive functions, including the functions that they call."""
    stats = pstats.Stats(profiler)
    print(f"{what}, {stats.total_tt:.2f} s:")
    functions = sorted(stats.stats.items(), key=lambda own: -own[1][3])
    for (file, _, name), (_, calls, _, seconds, _) in functions[:60]:
        place = "/".join(file.split("/")[-2:])
        print(f"  {100 * seconds / stats.total_tt:3.0f} %  {calls:6} calls  {name}  {place}")


if __name__ == "__main__":
    main()

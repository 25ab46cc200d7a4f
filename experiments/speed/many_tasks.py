"""Measure the cost per task over 50 synthetic tasks: GPM with BECAME, an MLP with 256 inputs and two layers of 256."""

from statistics import median
from time import process_time

import torch
from rows import Row, at_most, strategy_of

from became_avalanche import BecameMergePlugin, GPMPlugin, MultiHeadNetwork
from became_avalanche.benchmarks.tensors import benchmark_of

TASKS = 50


def rows(quick: bool) -> list[Row]:
    """Return the cost of the last ten tasks divided by that of the first ten tasks after the ranks have settled."""
    seconds, ranks = measured(2 if quick else 5)
    settled = next(task for task in range(TASKS) if ranks[task] == ranks[-1]) + 1
    early, late = seconds[settled : settled + 10], seconds[-10:]
    note = f"ranks settle at {ranks[-1]} after {settled} tasks; {median(late):.2f} s of CPU time per task"
    what = "cost of tasks 41 to 50 / of the first ten after ranks have settled, 50 synthetic tasks"
    return [at_most(1.1, what, median(late) / median(early), note)]


def measured(epochs: int) -> tuple[list[float], list[tuple[int, ...]]]:
    """Return the CPU seconds of each task, and the ranks after it."""
    torch.manual_seed(0)
    tasks = [(torch.randint(256, (256, 256), dtype=torch.uint8), torch.arange(256) % 4) for _ in range(TASKS)]
    stream = benchmark_of(tasks, [], tasks, [lambda x: x.float() / 128 - 1] * TASKS, None)
    layers = [torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()]
    model, gpm = MultiHeadNetwork(torch.nn.Sequential(*layers), 256), GPMPlugin(0.95, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    strategy = strategy_of(model, optimizer, [gpm, BecameMergePlugin()], 32, train_epochs=epochs)
    seconds, ranks = [], []
    for experience in stream.train_stream:
        start = process_time()
        strategy.train(experience)
        seconds.append(process_time() - start)
        ranks.append(tuple(gpm.ranks().values()))
    return seconds, ranks

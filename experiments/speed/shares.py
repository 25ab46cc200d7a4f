"""Profile training steps: shares of CPU time from PyTorch's profiler, one thread.

    python experiments/speed/shares.py [--docs]

Images and protected directions are random. The numbers of directions are those of the table in docs/speed.md, which
were measured on CIFAR-100. Writes shares.json next to this file and its table into docs/speed.md. ``--docs`` measures
nothing and only writes the table.
"""

import argparse
import json
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time

import torch
from avalanche.training.plugins import SupervisedPlugin
from avalanche.training.supervised import Naive
from projection import OPTIMIZERS
from rows import cpu_times, images, ratio, strategy_of, write_between
from torch.profiler import ProfilerActivity, profile

from became_avalanche import (
    AlexNet,
    BecameMergePlugin,
    GPMPlugin,
    PreActResNet18,
    ReducedResNet18,
    TRGPPlugin,
    keep_freed_memory,
)

RESULTS = Path(__file__).with_name("shares.json")
GROUPS = {
    "convolutions": ("convolution",),
    "products of layers": ("aten::mm", "aten::addmm", "aten::linear"),
    "products of the projection": ("aten::bmm", "aten::baddbmm"),
    "normalisation": ("batch_norm",),
    "dropout": ("aten::random_", "aten::lt_"),
    "pooling": ("max_pool",),
    "optimizer": ("Optimizer", "aten::_foreach", "aten::add_"),
}
"""Parts of a step, identified by parts of the names of operations. In these networks only the projection multiplies
batches of matrices (``bmm``)."""
STEPS = (
    ("AlexNet", AlexNet, 64, "SGD", "10 tasks", 3),
    ("AlexNet", AlexNet, 64, "SGD with momentum and weight decay", "10 tasks", 3),
    ("AlexNet", AlexNet, 64, "Adam", "10 tasks", 3),
    ("reduced ResNet18", partial(ReducedResNet18, 32), 10, "SGD", "1 task", 3),
    ("reduced ResNet18", partial(ReducedResNet18, 32), 10, "SGD", "10 tasks", 3),
    ("pre-activation ResNet18", PreActResNet18, 32, "Adam", "1 task", 1),
)
"""Projected steps: network, batch, optimizer, tasks in memory, and repeats."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--docs", action="store_true", help="only write the table of shares.json into docs/speed.md")
    if not parser.parse_args().docs:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        keep_freed_memory()
        lines = []
        for line in measured():
            lines.append(line)
            RESULTS.write_text(json.dumps(lines, indent=1, ensure_ascii=False) + "\n")
    write_between("shares", table(json.loads(RESULTS.read_text())))


def measured():
    """One line of the table after the other."""
    peak = best_speed()
    yield {"what": "AlexNet, batch 64, plain SGD, not projected", **step_shares(AlexNet, (), 64, "SGD")}
    for network, make, batch, optimizer, tasks, repeats in STEPS:
        what = f"{network}, batch {batch}, {optimizer}, after {tasks}"
        yield {"what": what, **step_shares(make, ranks_of(what), batch, optimizer, repeats), "peak": peak}
    yield {"what": "TRGP, AlexNet, batch 64, two trusted tasks", **step_shares(AlexNet, None, 64, "SGD")}
    yield {"what": "a batch of the Fisher information, AlexNet, batch 64", **fisher_shares()}


def ranks_of(step: str) -> tuple[int, ...]:
    """Return the ranks that table.py found for a step on CIFAR-100."""
    rows = json.loads(RESULTS.with_name("measured.json").read_text())["projection"]
    note = next(row["note"] for row in rows if row["what"] == f"projected / plain step, {step}")
    return tuple(int(rank) for rank in note.split("ranks ")[1].split(", "))


def best_speed(n: int = 1536) -> float:
    """Return the GFLOP/s of the product of two large square matrices."""
    x = torch.randn(n, n)
    return max(2e-9 * n**3 / seconds for seconds in cpu_times({"product": lambda: x @ x}, 5)["product"])


class CallInLastExperience(SupervisedPlugin):
    """Trains one batch per experience, and calls a function in the last experience."""

    def __init__(self, last: int, call: Callable[[Naive], None]) -> None:
        super().__init__()
        self.last, self.call = last, call

    def before_training_epoch(self, strategy: Naive, **kwargs: object) -> None:
        strategy.dataloader = [next(iter(strategy.dataloader))]
        if strategy.experience.current_experience == self.last:
            self.call(strategy)


def step_shares(make, ranks, batch: int, optimizer: str, repeats: int = 3) -> dict:
    """Return the shares of a step, and its time divided by that of a plain step.

    :param ranks: numbers of random protected directions; empty for no projection, None for TRGP.
    """
    torch.manual_seed(0)
    model, result = make(), {}
    plugin = TRGPPlugin(trust_threshold=0) if ranks is None else GPMPlugin()

    def measure(strategy: Naive) -> None:
        plugins = strategy.plugins
        without = [own for own in plugins if own is not plugin]
        if ranks is not None:
            strategy.optimizer = OPTIMIZERS[optimizer](model.parameters())

        def step(own: list) -> None:
            strategy.plugins = own
            if ranks is None and own is without:
                plugin._activate(strategy.model, None)
            strategy.training_epoch()

        chosen = plugins if ranks is None or ranks else without
        seconds = cpu_times({"plain": lambda: step(without), "projected": lambda: step(chosen)}, 2 * repeats)
        result.update(shares(lambda: step(chosen), repeats), ratio=ratio(seconds, "projected", "plain"))
        by_batch = OPTIMIZERS[optimizer].func is torch.optim.SGD and any(own.in_backward for own in projected())
        if ranks and not by_batch:  # projection in the backward pass needs another number of operations
            operations = sum(4 * guard.parameters[0].shape[0] * guard.project.factor.numel() for guard in projected())
            result["speed"] = 1e-9 * operations / (result["seconds"] * result["products of the projection"] or 1)
        strategy.plugins = plugins

    def projected() -> list:
        """Return the guards that multiply matrices in each step."""
        return [guard for guard in plugin._guards if guard._layout]

    last = 2 if ranks is None else 1
    strategy = strategy_of(
        model, torch.optim.SGD(model.parameters(), lr=0.01), [plugin, CallInLastExperience(last, measure)], batch
    )
    for task, experience in enumerate(images().train_stream[: last + 1]):
        if task == 1 and ranks:
            for memory, rank in zip(plugin.memory.values(), ranks, strict=True):
                d = memory["basis"].shape[-2]
                memory["basis"] = torch.linalg.qr(torch.randn(1, d, min(rank, d))).Q
        strategy.train(experience)
    return result


def fisher_shares() -> dict:
    """Return the shares of four batches of the Fisher information, and their time divided by four training steps."""
    torch.manual_seed(0)
    model, result, merge = AlexNet(), {}, BecameMergePlugin()

    def measure(strategy: Naive) -> None:
        strategy.dataloader *= 4
        strategy.experience.dataset = strategy.experience.dataset.subset(range(4 * 64))
        names = dict(model.named_parameters())
        work = {"step": strategy.training_epoch, "fisher": lambda: merge.estimate_fisher(strategy, names, 0)}
        result.update(shares(work["fisher"], 5), ratio=ratio(cpu_times(work, 15), "fisher", "step"))

    strategy = strategy_of(model, torch.optim.SGD(model.parameters(), lr=0.01), [CallInLastExperience(0, measure)], 64)
    strategy.train(images().train_stream[0])
    return result


def shares(run: Callable[[], None], repeats: int) -> dict:
    """Return the CPU seconds of a call, and the shares of its parts."""
    run()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        start = process_time()
        for _ in range(repeats):
            run()
        seconds = (process_time() - start) / repeats
    parts = dict.fromkeys([*GROUPS, "rest"], 0.0)
    for event in profiler.key_averages():
        group = next((own for own, names in GROUPS.items() if any(name in event.key for name in names)), "rest")
        parts[group] += event.self_cpu_time_total
    total = sum(parts.values())
    return {"seconds": seconds, **{name: own / total for name, own in parts.items()}}


def table(lines: list[dict]) -> str:
    """Return the lines as a Markdown table."""
    parts = [*GROUPS, "rest"]
    head = ["step", "time, plain = 1", *parts, "projection, GFLOP/s", "large product, GFLOP/s"]
    rows = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for line in lines:
        percent = [f"{100 * line[part]:.0f} %" for part in parts]
        speeds = [f"{line[key]:.0f}" if line.get(key) else "" for key in ("speed", "peak")]
        rows.append("| " + " | ".join([line["what"], f"{line['ratio']:.2f}", *percent, *speeds]) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()

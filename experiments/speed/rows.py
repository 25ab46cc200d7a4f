"""Shared helpers of the speed measurements: rows of the table, images, and timing."""

from collections.abc import Callable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import process_time

import torch
from avalanche.benchmarks.scenarios import GenericCLScenario
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.supervised import Naive

from became_avalanche import split_cifar100
from became_avalanche.benchmarks.tensors import benchmark_of


@dataclass
class Row:
    """One measurement and its goal."""

    what: str
    """Name of the measurement."""
    value: float
    """Measured value, usually a ratio of CPU times."""
    goal: str
    """The goal as text, such as ``≤ 1.05``."""
    met: bool
    """Whether the value meets the goal."""
    note: str
    """How the value was measured, or what limits it."""


DOCS = Path(__file__).parents[2] / "docs"
DATA: Path | None = None
"""Folder with ``cifar-100-python``. If None, images are random."""


def at_most(limit: float, what: str, value: float, note: str) -> Row:
    """Return a row whose value should be at most ``limit``."""
    return Row(what, value, f"≤ {limit:g}", value <= limit, note)


def at_least(limit: float, what: str, value: float, note: str) -> Row:
    """Return a row whose value should be at least ``limit``."""
    return Row(what, value, f"≥ {limit:g}", value >= limit, note)


def write_between(name: str, text: str, page: str = "speed.md") -> None:
    """Write ``text`` between the comments ``name`` and ``end of name`` of a page in docs."""
    path, start, end = DOCS / page, f"<!-- {name} -->", f"<!-- end of {name} -->"
    old = path.read_text()
    path.write_text(f"{old[: old.index(start)]}{start}\n{text}\n{old[old.index(end) :]}")


def images(n_tasks: int = 10) -> GenericCLScenario:
    """Return 10-Split CIFAR-100, or the same number of tasks with random images of the same shape."""
    if DATA is not None:
        return split_cifar100(n_tasks, dataset_root=DATA)
    generator = torch.Generator().manual_seed(0)
    tasks = [
        (torch.randint(256, (1000, 3, 32, 32), dtype=torch.uint8, generator=generator), torch.arange(1000) % 10)
        for _ in range(n_tasks)
    ]
    return benchmark_of(tasks, [], tasks, [lambda x: x.float() / 128 - 1] * n_tasks, None)


def kind_of_images() -> str:
    return "random images" if DATA is None else "CIFAR-100"


def strategy_of(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, plugins: list[SupervisedPlugin], batch: int, **options
) -> Naive:
    """Return a strategy that prints nothing."""
    evaluator = EvaluationPlugin(loggers=[BaseLogger()])
    return Naive(model=model, optimizer=optimizer, plugins=plugins, evaluator=evaluator, train_mb_size=batch, **options)


def cpu_times(
    work: Mapping[str, Callable[[], object]], repeats: int, *, warm_up: bool = True
) -> dict[str, list[float]]:
    """Return the CPU seconds of each function in interleaved repeats. A first round to warm up does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    for repeat in range(repeats + warm_up):
        for name, run in work.items():
            start = process_time()
            run()
            if repeat or not warm_up:
                seconds[name].append(process_time() - start)
    return seconds


def ratio(seconds: Mapping[str, list[float]], of: str, to: str) -> float:
    """Return the median over repeats of the time of ``of`` divided by the time of ``to``."""
    return median(own / other for own, other in zip(seconds[of], seconds[to], strict=True))


class Pause(SupervisedPlugin):
    """Trains only the first few batches of each experience, and calls a function before the first batch."""

    def __init__(self, batches: int, call: Callable[[Naive], None]) -> None:
        super().__init__()
        self.batches, self.call = batches, call

    def before_training_epoch(self, strategy: Naive, **kwargs: object) -> None:
        self.call(strategy)
        loader = strategy.dataloader
        strategy.dataloader = [batch for batch, _ in zip(loader, range(self.batches), strict=False)]


@contextmanager
def untouched(strategy: Naive):
    """Undo all training steps that are made inside the context."""
    optimizer, plugins, loader = strategy.optimizer, strategy.plugins, strategy.dataloader
    weights = {name: tensor.clone() for name, tensor in strategy.model.state_dict().items()}
    yield
    strategy.model.load_state_dict(weights)
    strategy.optimizer, strategy.plugins, strategy.dataloader = optimizer, plugins, loader

"""Compare a projected with a plain training step, on tasks of CIFAR-100 and with several optimizers.

Both steps run in turns in one strategy, with the plugin in its list and without it. Each earlier task was trained on a
few batches, and its inputs were added to the memory with the thresholds of the GPM paper.
"""

from collections.abc import Callable, Iterator
from functools import partial

import rows as speed
import torch
from avalanche.training.supervised import Naive
from rows import Pause, Row, at_most, cpu_times, images, ratio, strategy_of, untouched

from became_avalanche import AlexNet, GPMPlugin, GradientProjectionPlugin, NSCLPlugin, PreActResNet18, ReducedResNet18

OPTIMIZERS = {
    "SGD": partial(torch.optim.SGD, lr=0.01),
    "SGD with momentum and weight decay": partial(torch.optim.SGD, lr=0.01, momentum=0.9, weight_decay=5e-4),
    "Adam": partial(torch.optim.Adam, lr=1e-4),
}
GOALS = {"SGD": 1.05, "SGD with momentum and weight decay": 1.15, "Adam": 1.15}


def rows(quick: bool) -> Iterator[Row]:
    """Yield the ratio of projected to plain steps for each network, optimizer and number of tasks."""
    tasks, repeats = ((1,), 3) if quick else ((1, 5, 10), 15)
    yield from measured("AlexNet", AlexNet, GPMPlugin(), 64, tasks, tuple(OPTIMIZERS), repeats)
    for batch in (10, 64):
        network = "reduced ResNet18"
        yield from measured(network, partial(ReducedResNet18, 32), GPMPlugin(), batch, tasks, ("SGD",), repeats)
    if not quick:
        network = "pre-activation ResNet18"
        plugin = NSCLPlugin(n_samples=125)
        yield from measured(network, PreActResNet18, plugin, 32, (1,), ("Adam",), 3)


def measured(
    network: str,
    make: Callable[[], torch.nn.Module],
    plugin: GradientProjectionPlugin,
    batch: int,
    tasks: tuple[int, ...],
    optimizers: tuple[str, ...],
    repeats: int,
) -> list[Row]:
    """Train the tasks one after the other, and measure steps when the memory holds one of ``tasks`` tasks."""
    torch.manual_seed(0)
    result: list[Row] = []

    def measure(strategy: Naive) -> None:
        if plugin.experiences not in tasks:
            return
        batches = [next(iter(strategy.dataloader))]
        with_plugin = strategy.plugins
        without = [own for own in with_plugin if own is not plugin]
        ranks = ", ".join(str(rank) for rank in plugin.ranks().values())
        for name in optimizers:
            with untouched(strategy):
                strategy.optimizer = OPTIMIZERS[name](strategy.model.parameters())
                strategy.dataloader = batches
                work = {"plain": lambda: steps(strategy, without), "projected": lambda: steps(strategy, with_plugin)}
                seconds = cpu_times(work, repeats)
            tasks_so_far = f"{plugin.experiences} task" + "s" * (plugin.experiences > 1)
            what = f"projected / plain step, {network}, batch {batch}, {name}, after {tasks_so_far}"
            method = type(plugin).__name__.removesuffix("Plugin")
            note = f"{method}; {speed.kind_of_images()}; ranks {ranks}"
            result.append(at_most(GOALS[name], what, ratio(seconds, "projected", "plain"), note))

    model = make()
    pause = Pause(10, measure)
    strategy = strategy_of(model, torch.optim.SGD(model.parameters(), lr=0.01), [plugin, pause], batch)
    stream = list(images().train_stream)
    for experience in [*stream, stream[0]][
        : max(tasks) + 1
    ]:  # the stream has ten tasks, so the step after ten tasks uses the first again
        if plugin.experiences == max(tasks):
            pause.batches = 1
        strategy.train(experience)
    return result


def steps(strategy: Naive, plugins: list[object]) -> None:
    """Train an epoch with these plugins."""
    strategy.plugins = plugins
    strategy.training_epoch()

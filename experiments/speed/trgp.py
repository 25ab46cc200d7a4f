"""Compare a step of TRGP, with scaled weights and projection, with a plain step: AlexNet in its third task."""

import torch
from avalanche.training.supervised import Naive
from projection import steps
from rows import Pause, Row, at_most, cpu_times, images, kind_of_images, ratio, strategy_of, untouched

from became_avalanche import AlexNet, TRGPPlugin


def rows(quick: bool) -> list[Row]:
    """Return the ratio of a step of TRGP to a plain step."""
    torch.manual_seed(0)
    result: list[Row] = []
    plugin = TRGPPlugin(trust_threshold=0)  # all layers trust both earlier tasks

    def measure(strategy: Naive) -> None:
        if plugin.experiences < 2:
            return
        batches = [next(iter(strategy.dataloader))]
        with_plugin = strategy.plugins
        without = [own for own in with_plugin if own is not plugin]

        def plain() -> None:
            plugin._activate(strategy.model, None)
            steps(strategy, without)

        with untouched(strategy):
            strategy.dataloader = batches
            work = {"plain": plain, "scaled": lambda: steps(strategy, with_plugin)}
            seconds = cpu_times(work, 3 if quick else 15)
        trusted = {name: len(scales) for name, scales in plugin._current.items()}
        note = f"{kind_of_images()}; {min(trusted.values())} trusted tasks in each of {len(trusted)} layers, projected"
        what = "TRGP / plain step, two trusted tasks, AlexNet, batch 64"
        result.append(at_most(1.25, what, ratio(seconds, "scaled", "plain"), note))

    model = AlexNet()
    pause = Pause(10, measure)
    strategy = strategy_of(model, torch.optim.SGD(model.parameters(), lr=0.01), [plugin, pause], 64)
    for experience in images().train_stream[:3]:
        strategy.train(experience)
    return result

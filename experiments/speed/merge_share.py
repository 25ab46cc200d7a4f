"""Measure the cost of BECAME without its second stage: two estimates of the Fisher information and the merge."""

from time import process_time
from unittest.mock import patch

import torch
from avalanche.training.plugins import SupervisedPlugin
from avalanche.training.supervised import Naive
from rows import Row, at_most, images, kind_of_images, strategy_of

from became_avalanche import AlexNet, BecameMergePlugin, GPMPlugin
from became_avalanche.plugins import merge as plugins_merge
from became_avalanche.strategy import state


class Epochs(SupervisedPlugin):
    """Records the CPU time of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def before_training_epoch(self, strategy: Naive, **kwargs: object) -> None:
        self._start = process_time()

    def after_training_epoch(self, strategy: Naive, **kwargs: object) -> None:
        self.seconds.append(process_time() - self._start)


def rows(quick: bool) -> list[Row]:
    """Return that cost in percent of a stage of ten epochs."""
    torch.manual_seed(0)
    model, merge, epochs = AlexNet(), BecameMergePlugin(), Epochs()
    plugins = [GPMPlugin(), merge, epochs]
    strategy = strategy_of(model, torch.optim.SGD(model.parameters(), lr=0.01), plugins, 64)
    first, second = images().train_stream[:2]
    with patch.object(plugins_merge, "perf_counter", process_time), patch.object(state, "perf_counter", process_time):
        strategy.train(first)
        before = merge.seconds["fisher"] + merge.seconds["merge"]
        strategy.train(second)
    added = merge.seconds["fisher"] + merge.seconds["merge"] - before
    stage = 10 * epochs.seconds[-1]
    note = f"{kind_of_images()}, {len(second.dataset)} samples; CPU time of one run"
    return [
        at_most(5, "BECAME beside its second training, % of a stage of 10 epochs, AlexNet", 100 * added / stage, note)
    ]

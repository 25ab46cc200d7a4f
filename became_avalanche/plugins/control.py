"""The control that trains each task twice without BECAME."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from avalanche.training.templates import SupervisedTemplate

from became_avalanche.strategy.stages import StagedPlugin


class EqualTrainingPlugin(StagedPlugin):
    """Trains each task twice, as BECAME does, but with projection in both stages and without a merge.

    From the second experience on, a second stage restarts optimizer, learning rate schedule and early stopping, as
    under BECAME. The projection plugins stay active in it. A gain of BECAME over a method with this plugin is therefore
    not due to longer training.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from became_avalanche import EqualTrainingPlugin, GPMPlugin, MultiHeadMLP, split_digits
    >>> model, plugins = MultiHeadMLP(), [GPMPlugin(), EqualTrainingPlugin()]
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> strategy = Naive(model=model, optimizer=optimizer, train_mb_size=64, evaluator=None, plugins=plugins)
    >>> _ = strategy.train(split_digits().train_stream[:2])
    >>> plugins[1].t  # tasks learned
    2
    """

    def run_stages(self, strategy: SupervisedTemplate, run: Callable[[int], None], **kwargs: Any) -> None:
        run(1)
        if self.t > 0:
            run(2)

"""The control for a method that trains twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from avalanche.training.templates import SupervisedTemplate

from became_avalanche.strategy.stages import StagedPlugin


class EqualTrainingPlugin(StagedPlugin):
    """Gives a method the training time of BECAME: everything equal except what BECAME adds.

    From the second experience on there is a second stage with the same restart of optimizer, schedule and stopping,
    but with the projection plugins at work in it as in the first, and without a merge. What BECAME gains over a method
    with this plugin is not training time.
    """

    def run_stages(self, strategy: SupervisedTemplate, run: Callable[[int], None], **kwargs: Any) -> None:
        run(1)
        if self.t > 0:
            run(2)

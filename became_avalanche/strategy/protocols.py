"""Base classes through which a plugin takes part in staged training.

These are abstract base classes rather than structural protocols. A plugin opts in by inheriting from one, and Python
refuses to create it if the method is missing or misspelt. A structural check would silently ignore such a plugin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from avalanche.training.templates import SupervisedTemplate
from torch import nn


class StageAware(ABC):
    """A plugin that is notified when a stage of the training starts."""

    @abstractmethod
    def on_stage_start(self, strategy: SupervisedTemplate, stage: int) -> None:
        """Reset the plugin for a new stage. Optimizer, schedules, early stopping and clock have already been reset.

        A ``StagedPlugin`` calls this at the start of each stage, including the first one. If the strategy has no
        ``StagedPlugin``, it is never called, and only ``before_training_exp`` marks the start of a training.

        :param strategy: the strategy.
        :param stage: number of the stage, counted from 1 in each experience.
        """


class OwnsParameters(ABC):
    """A plugin that trains its own parameters in addition to those of the model.

    They are saved, restored and merged together with the weights of the model.
    """

    @abstractmethod
    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are currently trained, by names such as ``TRGP:features.0.weight.1``.

        Each name contains a colon, which distinguishes it from names of the model's parameters. No two plugins may use
        the same name.
        """


class Suspendable(ABC):
    """A plugin that constrains the training and can be suspended, as in the free stage of BECAME."""

    @abstractmethod
    def suspended(self) -> AbstractContextManager[None]:
        """Return a context in which the plugin does not constrain the training."""


class RestoresBest(ABC):
    """A plugin that restores the best weights at the end of a stage, and can be told to keep the last ones instead."""

    @abstractmethod
    def keeping_last(self) -> AbstractContextManager[None]:
        """Return a context in which a stage ends with the weights of its last step."""

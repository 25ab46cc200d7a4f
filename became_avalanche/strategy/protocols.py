"""What a plugin may tell the staged training about itself.

These are abstract base classes rather than structural protocols. A plugin opts in by inheriting from one, and Python
refuses to construct it if the method is missing or misspelt. A structural check would silently ignore such a plugin.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager

from avalanche.training.templates import SupervisedTemplate
from torch import nn


class StageAware(ABC):
    """A plugin that wants to know when a stage of the training starts."""

    @abstractmethod
    def on_stage_start(self, strategy: SupervisedTemplate, stage: int) -> None:
        """Start a training anew. Optimizer, schedules, early stopping and clock have already been restarted.

        Only plugins that train in stages (``StagedPlugin``) call this, also for the first stage. Without such a plugin
        in the list, ``before_training_exp`` is the only start of a training.

        :param strategy: the strategy.
        :param stage: number of the stage, counted from 1 in each experience.
        """


class OwnsParameters(ABC):
    """A plugin that trains parameters of its own beside those of the model.

    They are saved, restored and merged together with the weights of the model.
    """

    @abstractmethod
    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters in training now, by names such as ``TRGP:features.0.weight.1``, with a colon.

        The colon tells them from those of a model. Other plugins must not use the same names.
        """


class Suspendable(ABC):
    """A plugin that constrains the training and can be told to let go for a while, as for the free stage of BECAME."""

    @abstractmethod
    def suspended(self) -> AbstractContextManager[None]:
        """A context in which the plugin constrains nothing."""


class RestoresBest(ABC):
    """A plugin that goes back to the best weights at the end of a stage, and can be told to stay at the last ones."""

    @abstractmethod
    def keeping_last(self) -> AbstractContextManager[None]:
        """A context in which a stage ends with the weights of its last step."""

"""Plugins that count each experience as a new task."""

from __future__ import annotations

import warnings
from typing import Any, ClassVar
from weakref import ref

from avalanche.training.plugins import FromScratchTrainingPlugin, GDumbPlugin
from avalanche.training.supervised import SCR, ICaRL
from avalanche.training.templates import SupervisedTemplate

from became_avalanche.strategy.heads import refuse_lbfgs_with_growing_heads
from became_avalanche.strategy.passes import experiences_in_training, refuse_empty, refuse_online
from became_avalanche.strategy.state import StatefulPlugin


class TaskPlugin(StatefulPlugin):
    """A plugin for which each experience is a new task.

    To train one task in several calls of ``train``, pass ``task_continues=True`` to all calls except the last:

        strategy.train(experience, task_continues=True)
        strategy.train(experience)
    """

    needs_loss: ClassVar[bool] = False
    """Whether the plugin computes the strategy's loss in its own passes over the data."""

    def __init__(self) -> None:
        super().__init__()
        self._trained: list[tuple[Any, str, int]] = []
        self._in_training: list[tuple[Any, str, int]] = []
        self._broken_off: list[tuple[Any, str, int]] = []
        self._continues = self._began = False
        self._eval_input: tuple[Any, int] | None = None
        self._warned_of_inputs = False

    def reset(self) -> None:
        """Forget everything, as if newly created, for a run with another model."""
        super().reset()
        self._trained, self._in_training, self._broken_off = [], [], []
        self._continues = self._began = False

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned."""
        super().load_state_dict(state)
        self._began = True

    def before_training(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().before_training(strategy, **kwargs)
        self._broken_off += self._in_training
        self._in_training = []

    def before_train_dataset_adaptation(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        refuse_online(strategy, self)
        refuse_empty(strategy, self)
        refuse_lbfgs_with_growing_heads(strategy)
        self._check_strategy(strategy)
        self._trained += self._in_training
        self._in_training = [_identity(experience) for experience in experiences_in_training(strategy)]
        earlier = strategy.clock.train_exp_counter
        if earlier > 0 and not self._began and self.is_new():
            warnings.warn(
                f"{type(self).__name__} was added after {earlier} experiences: what the model has learned before is "
                "not protected",
                stacklevel=2,
            )
        if self is next(plugin for plugin in strategy.plugins if isinstance(plugin, TaskPlugin)):
            self._warn_of_unusual_orders()
        self._broken_off = []
        self._began, self._continues = True, continues(kwargs)

    def after_training(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().after_training(strategy, **kwargs)
        self._trained += self._in_training
        self._in_training = []

    def before_eval_iteration(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        x = strategy.mbatch[0]
        self._eval_input = (x, getattr(x, "_version", 0))

    def after_eval_forward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        before, self._eval_input = self._eval_input, None
        if before is None or self._warned_of_inputs:
            return
        x, version = before
        if strategy.mbatch[0] is not x or getattr(x, "_version", 0) != version:
            self._warned_of_inputs = True
            warnings.warn(
                f"a plugin has changed the inputs of an evaluation batch: {type(self).__name__} computes what it "
                "remembers from the unchanged inputs of the dataset; change them in transforms of the dataset or in "
                "the model instead",
                stacklevel=2,
            )

    def _warn_of_unusual_orders(self) -> None:
        for identity in self._in_training:
            if identity in self._trained and not self._continues:
                warnings.warn(
                    f"{_name(identity)} is trained again and counts as a new task; to train one task in several calls, "
                    "pass task_continues=True to all calls of train() except the last",
                    stacklevel=3,
                )
        for identity in self._broken_off:
            if identity not in self._in_training:
                warnings.warn(
                    f"the training of {_name(identity)} was interrupted: this task is not in the memory and is not "
                    "protected",
                    stacklevel=3,
                )

    def _check_strategy(self, strategy: SupervisedTemplate) -> None:
        """Raise a ValueError if this plugin cannot work with this strategy."""
        own, host = type(self).__name__, type(strategy).__name__
        if strategy.optimizer is None:
            raise ValueError(f"{own} needs an optimizer, and {host} has none: remove the plugin")
        if self.needs_loss and isinstance(strategy, ICaRL | SCR):
            raise ValueError(
                f"{own} needs the loss of each batch, and the loss of {host} depends on more than the batch: remove "
                "the plugin, or use one that needs no loss, such as GPMPlugin"
            )
        for plugin in strategy.plugins:
            if isinstance(plugin, GDumbPlugin | FromScratchTrainingPlugin):
                raise ValueError(
                    f"{own} keeps what earlier tasks have learned, but {type(plugin).__name__} starts each task with "
                    "fresh weights: remove one of them"
                )

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_trained": [], "_in_training": [], "_broken_off": []}


def continues(options: dict[str, Any]) -> bool:
    """Whether ``train`` was called with ``task_continues=True``: the next call trains the same task."""
    return bool(options.get("task_continues", False))


def _identity(experience: Any) -> tuple[Any, str, int]:
    """Return a key that identifies an experience. A stream creates a new object for it at each access."""
    stream = experience._origin_stream
    benchmark = getattr(stream, "benchmark", None)
    source = ref(experience.dataset if benchmark is None else benchmark)
    return source, getattr(stream, "name", "train"), experience.current_experience


def _name(identity: tuple[Any, str, int]) -> str:
    return f"experience {identity[2]} of the {identity[1]} stream"

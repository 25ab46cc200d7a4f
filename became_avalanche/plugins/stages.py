"""Training one experience in several stages, each of which starts as a plain Avalanche training would."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from copy import deepcopy
from typing import Any

from avalanche.evaluation.metric_results import MetricValue
from avalanche.training.plugins import EarlyStoppingPlugin, LRSchedulerPlugin, SupervisedPlugin
from avalanche.training.templates import SupervisedTemplate
from avalanche.training.templates.base_sgd import PeriodicEval

from became_avalanche.plugins.passes import refuse_online


class StagedPlugin(SupervisedPlugin, ABC):
    """Runs an experience in stages, by standing in for the strategy's ``_train_exp`` for one call.

    All other plugins see one experience: their ``after_training_exp`` runs once, after the last stage, whatever the
    order in the list. A plugin of any kind that defines ``on_stage_start(strategy, stage)`` is called at the start of
    each stage, when everything else has been restarted.
    """

    @abstractmethod
    def run_stages(self, strategy: SupervisedTemplate, run: Callable[[int], None], **kwargs: Any) -> None:
        """Train the experience: ``run(1)``, ``run(2)``, ... train it once each, from the weights as they are."""

    def before_training(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        staged = [type(plugin).__name__ for plugin in strategy.plugins if isinstance(plugin, StagedPlugin)]
        if len(staged) > 1:
            raise ValueError(f"an experience can be staged by one plugin only; got {' and '.join(staged)}: keep one")
        if not hasattr(strategy, "_train_exp"):
            raise TypeError(
                f"{type(self).__name__} cannot train {type(strategy).__name__} in stages: it has no _train_exp as the "
                "strategies of avalanche-lib 0.6 have"
            )

    def before_train_dataset_adaptation(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        refuse_online(strategy, self)

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        vars(strategy).pop("_train_exp", None)  # left over if another plugin failed right after this callback
        train_exp = strategy._train_exp

        def train_in_stages(experience: Any, eval_streams: Any = None, **kwargs: Any) -> None:
            vars(strategy).pop("_train_exp", None)  # one shot: neither nested, nor pickled, nor left behind
            controls = _Controls(strategy)

            def run(stage: int) -> None:
                if stage > 1:
                    controls.restart()
                publish(self, strategy, "Stage", stage)
                for plugin in strategy.plugins:
                    if hasattr(plugin, "on_stage_start"):
                        plugin.on_stage_start(strategy, stage)
                train_exp(experience, [], **kwargs)
                strategy._stop_training = False  # a stop in the last epoch would skip whatever comes next

            self.run_stages(strategy, run, **kwargs)

        strategy._train_exp = train_in_stages


class _Controls:
    """What steers the training of an experience, as it was before the first stage."""

    def __init__(self, strategy: SupervisedTemplate) -> None:
        self.strategy = strategy
        self.schedulers = [plugin for plugin in strategy.plugins if isinstance(plugin, LRSchedulerPlugin)]
        self.schedules = deepcopy([plugin.scheduler.state_dict() for plugin in self.schedulers])
        self.groups = deepcopy([_options(group) for group in strategy.optimizer.param_groups])

    def restart(self) -> None:
        """Put optimizer, schedules, stopping and clock back to where they were, at the weights as they are now."""
        strategy = self.strategy
        strategy.make_optimizer(reset_optimizer_state=True)
        for group, options in zip(strategy.optimizer.param_groups, self.groups, strict=True):
            group.update(deepcopy(options))
        for plugin, schedule in zip(self.schedulers, self.schedules, strict=True):
            plugin.scheduler.load_state_dict(deepcopy(schedule))
            plugin.rolling_metric.reset()
        for plugin in strategy.plugins:
            if isinstance(plugin, LRSchedulerPlugin | EarlyStoppingPlugin):
                plugin.before_training_exp(strategy)
        strategy.clock.before_training_exp(strategy)
        strategy.model.train()
        for plugin in strategy.plugins:
            if isinstance(plugin, PeriodicEval):
                plugin.before_training(strategy)  # early stopping compares with the last evaluation


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def publish(origin: object, strategy: SupervisedTemplate, name: str, value: float) -> None:
    """Send a value of the current training experience to all loggers."""
    clock = strategy.clock
    full_name = f"{name}/train_phase/train_stream/Exp{clock.train_exp_counter:03d}"
    strategy.evaluator.publish_metric_value(MetricValue(origin, full_name, value, clock.train_iterations))

"""Training one experience in several stages, each of which starts as a plain Avalanche training would."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any, ClassVar

from avalanche.evaluation.metric_results import MetricValue
from avalanche.training.plugins import EarlyStoppingPlugin, LRSchedulerPlugin
from avalanche.training.templates import SupervisedTemplate
from avalanche.training.templates.base_sgd import PeriodicEval

from became_avalanche.strategy.protocols import StageAware, Suspendable
from became_avalanche.strategy.tasks import TaskPlugin, continues


class StagedPlugin(TaskPlugin, ABC):
    """Trains each experience in stages: it replaces the strategy's ``_train_exp`` for one call.

    All other plugins see one experience. Their ``after_training_exp`` runs once, after the last stage, whatever the
    order of the list. Plugins that are ``StageAware`` are called at the start of each stage, when everything else has
    been restarted.
    """

    STATE: ClassVar[tuple[str, ...]] = ("t",)

    def __init__(self) -> None:
        super().__init__()
        self.t = 0
        """Tasks learned."""
        self._task_is_open = False
        self._stage = 1

    def reset(self) -> None:
        super().reset()
        self._task_is_open = False

    def stages(self, strategy: SupervisedTemplate) -> bool:
        """Whether this plugin stages the training, or leaves it to another one in the list."""
        return True

    def on_task_start(self, strategy: SupervisedTemplate) -> None:
        """Called when the training of a task begins, before its first stage; by default nothing happens."""

    @abstractmethod
    def run_stages(self, strategy: SupervisedTemplate, run: Callable[[int], None], **kwargs: Any) -> None:
        """Train the experience: ``run(1)``, ``run(2)``, ... train it once each, from the weights as they are."""

    def before_training(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().before_training(strategy, **kwargs)
        staged = [p for p in strategy.plugins if isinstance(p, StagedPlugin) and p.stages(strategy)]
        if len(staged) > 1:
            names = " and ".join(type(plugin).__name__ for plugin in staged)
            raise ValueError(f"only one plugin can train an experience in stages; got {names}: keep one of them")
        if not hasattr(strategy, "_train_exp"):
            raise TypeError(
                f"{type(self).__name__} cannot train {type(strategy).__name__} in stages: it has no _train_exp as the "
                "strategies of avalanche-lib 0.6 have"
            )

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if not self.stages(strategy):
            return
        vars(strategy).pop("_train_exp", None)  # left over if another plugin failed right after this callback
        train_exp = strategy._train_exp

        def train_in_stages(experience: Any, eval_streams: Any = None, **kwargs: Any) -> None:
            vars(strategy).pop("_train_exp", None)  # one shot: neither nested, nor pickled, nor left behind
            controls = _Controls(strategy)

            def run(stage: int) -> None:
                if stage > 1:
                    controls.restart()
                self._stage = stage
                for plugin in strategy.plugins:
                    if isinstance(plugin, StageAware):
                        plugin.on_stage_start(strategy, stage)
                if stage > 1:
                    controls.evaluate()
                train_exp(experience, [], **kwargs)
                strategy._stop_training = False  # a stop in the last epoch would skip whatever comes next

            if not self._task_is_open:
                self.on_task_start(strategy)
            self._task_is_open = continues(kwargs)
            if self._task_is_open:
                run(1)
            else:
                self.run_stages(strategy, run, **kwargs)
                self.t += 1

        strategy._train_exp = train_in_stages

    def after_training_epoch(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        """Tell the loggers the stage of each epoch, since epochs are counted anew in each stage."""
        if self.stages(strategy):
            publish(self, strategy, "Stage", self._stage)


class _Controls:
    """Optimizer options, schedules and stopping as they were before the first stage."""

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

    def evaluate(self) -> None:
        """The evaluation that Avalanche starts a training with: early stopping compares with the last one."""
        for plugin in self.strategy.plugins:
            if isinstance(plugin, PeriodicEval):
                plugin.before_training(self.strategy)


@contextmanager
def projections_suspended(strategy: SupervisedTemplate) -> Iterator[None]:
    """A context in which no plugin that is ``Suspendable`` constrains the training."""
    with ExitStack() as suspensions:
        for plugin in strategy.plugins:
            if isinstance(plugin, Suspendable):
                suspensions.enter_context(plugin.suspended())
        yield


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def publish(origin: object, strategy: SupervisedTemplate, name: str, value: float) -> None:
    """Send a value of the current training experience to all loggers."""
    clock = strategy.clock
    full_name = f"{name}/train_phase/train_stream/Exp{clock.train_exp_counter:03d}"
    strategy.evaluator.publish_metric_value(MetricValue(origin, full_name, value, clock.train_iterations))


def finish_merge(strategy: SupervisedTemplate) -> None:
    """Put the rest of the strategy in order after the weights have been merged."""
    strategy.make_optimizer(reset_optimizer_state=True)  # its state belongs to the last stage
    for plugin in strategy.plugins:
        if isinstance(plugin, PeriodicEval):
            # the evaluation in the last epoch saw the last stage, not the merge
            plugin.do_final = plugin.eval_every > -1

"""Train one experience in several stages, each of which starts like an ordinary Avalanche training."""

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
    """Trains each experience in stages, by replacing the strategy's ``_train_exp`` for one call.

    All other plugins see a single experience. Their ``after_training_exp`` runs once, after the last stage, for any
    order of the plugins. Plugins that are ``StageAware`` are notified at the start of each stage, after the optimizer,
    schedules, early stopping and clock have been reset.
    """

    STATE: ClassVar[tuple[str, ...]] = ("t",)

    def __init__(self) -> None:
        super().__init__()
        self.t = 0
        """Number of tasks learned."""
        self._task_is_open = False
        self._stage = 1
        self._rate_factor = 1.0

    def reset(self) -> None:
        super().reset()
        self._task_is_open = False

    def stages(self, strategy: SupervisedTemplate) -> bool:
        """Whether this plugin trains in stages. If False, it leaves this to another plugin of the strategy."""
        return True

    def on_task_start(self, strategy: SupervisedTemplate) -> None:
        """Called before the first stage of a task. Does nothing by default."""

    @abstractmethod
    def run_stages(self, strategy: SupervisedTemplate, run: Callable[[int], None], **kwargs: Any) -> None:
        """Train the experience. Each call of ``run(1)``, ``run(2)``, ... trains one stage from the current weights."""

    def before_training(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().before_training(strategy, **kwargs)
        staged = [p for p in strategy.plugins if isinstance(p, StagedPlugin) and p.stages(strategy)]
        if len(staged) > 1:
            names = " and ".join(type(plugin).__name__ for plugin in staged)
            raise ValueError(f"only one plugin can train an experience in stages; got {names}: keep only one of them")
        if not hasattr(strategy, "_train_exp"):
            raise TypeError(
                f"{type(self).__name__} cannot train {type(strategy).__name__} in stages: it has no method _train_exp, "
                "which the strategies of avalanche-lib 0.6 have"
            )

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if not self.stages(strategy):
            return
        vars(strategy).pop("_train_exp", None)  # still there if another plugin failed right after this callback
        train_exp = strategy._train_exp

        def train_in_stages(experience: Any, eval_streams: Any = None, **kwargs: Any) -> None:
            vars(strategy).pop("_train_exp", None)  # used once, so that it is never nested, pickled or left behind
            controls = _Controls(strategy)

            def run(stage: int) -> None:
                if stage > 1:
                    controls.restart()
                self._stage = stage
                with _scaled_rates(strategy, self._rate_factor):
                    for plugin in strategy.plugins:
                        if isinstance(plugin, StageAware):
                            plugin.on_stage_start(strategy, stage)
                    if stage > 1:
                        controls.evaluate()
                    train_exp(experience, [], **kwargs)
                strategy._stop_training = False  # otherwise a stop in the last epoch would skip the next stage

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
        """Log the stage of each epoch, because the count of epochs restarts in each stage."""
        if self.stages(strategy):
            publish(self, strategy, "Stage", self._stage)


class _Controls:
    """The optimizer's options and the schedules from before the first stage, to restart from them."""

    def __init__(self, strategy: SupervisedTemplate) -> None:
        self.strategy = strategy
        self.schedulers = [plugin for plugin in strategy.plugins if isinstance(plugin, LRSchedulerPlugin)]
        self.schedules = deepcopy([plugin.scheduler.state_dict() for plugin in self.schedulers])
        self.groups = deepcopy([_options(group) for group in strategy.optimizer.param_groups])

    def restart(self) -> None:
        """Reset optimizer, schedules, early stopping and clock. The weights stay as they are."""
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
        """Evaluate, as Avalanche does at the start of a training: early stopping compares with the last evaluation."""
        for plugin in self.strategy.plugins:
            if isinstance(plugin, PeriodicEval):
                plugin.before_training(self.strategy)


@contextmanager
def _scaled_rates(strategy: SupervisedTemplate, factor: float) -> Iterator[None]:
    """Multiply all learning rates by ``factor`` until the context ends."""

    def scale(by: float) -> None:
        if factor != 1:
            for group in strategy.optimizer.param_groups:
                group["lr"] = group["lr"] * by

    scale(factor)
    try:
        yield
    finally:
        scale(1 / factor)


@contextmanager
def projections_suspended(strategy: SupervisedTemplate) -> Iterator[None]:
    """Suspend all plugins that are ``Suspendable`` until the context ends."""
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
    """Reset the optimizer after a merge and request a final evaluation."""
    strategy.make_optimizer(reset_optimizer_state=True)  # its state belongs to the last stage
    for plugin in strategy.plugins:
        if isinstance(plugin, PeriodicEval):
            # the evaluation after the last epoch was of the last stage, not of the merged model
            plugin.do_final = plugin.eval_every > -1

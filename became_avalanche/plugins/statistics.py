"""What the running statistics of normalisation layers do after the first experience."""

from __future__ import annotations

from typing import Any, Literal

import torch
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor, nn

from became_avalanche.strategy.tasks import TaskPlugin, continues

Statistics = dict[str, Tensor]
"""Running means, variances and counters, by the name of the buffer."""


class RunningStatistics(TaskPlugin):
    """Keeps the running statistics of batch and instance normalisation from drifting away from old tasks.

    Gradient projection protects weights. Running means and variances are no weights: every forward pass in training
    moves them towards the inputs of the current task, and the outputs of old tasks move with them. Put this plugin into
    the list, beside a projection plugin or without one:

    - ``"freeze"``: after the first experience the statistics stay, and layers normalise with them in training, too.
    - ``"task"``: each task has its own statistics, which are used for batches with its task label. A task starts with
      those of the task before.
    """

    STATE = ("experiences", "statistics")

    def __init__(self, mode: Literal["freeze", "task"] = "freeze") -> None:
        """Init.

        :param mode: "freeze" or "task".
        """
        super().__init__()
        if mode not in ("freeze", "task"):
            raise ValueError(f"mode must be 'freeze' or 'task'; got {mode!r}")
        self.mode = mode
        self.experiences = 0
        self.statistics: dict[int, Statistics] = {}
        """Task label -> the statistics of that task, with ``mode="task"``."""
        self._served: int | None = None

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if self.mode == "task":
            self._keep(strategy.model)
            self._served = _only_label(strategy.experience.task_labels)
            self.statistics.setdefault(self._served, statistics_of(strategy.model))

    def before_training_epoch(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if self.mode == "freeze" and self.experiences > 0:
            for module in _layers(strategy.model).values():
                module.eval()

    def before_forward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if self.mode == "task":
            self._serve(strategy)

    before_eval_forward = before_forward

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self.experiences += not continues(kwargs)

    def after_training(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().after_training(strategy, **kwargs)
        self._keep(strategy.model)

    def reset(self) -> None:
        """Forget everything, as if newly made: for a run with another model."""
        super().reset()
        self._served = None

    def _serve(self, strategy: SupervisedTemplate) -> None:
        """Let the model normalise with the statistics of the task of the current batch."""
        label = _only_label(strategy.mb_task_id.unique().tolist())
        if label == self._served or label not in self.statistics:
            return
        self._keep(strategy.model)
        self._served = label
        with torch.no_grad():
            buffers = dict(strategy.model.named_buffers())
            for name, values in self.statistics[label].items():
                buffers[name].copy_(values)

    def _keep(self, model: nn.Module) -> None:
        if self._served is not None:
            self.statistics[self._served] = statistics_of(model)


def statistics_of(model: nn.Module) -> Statistics:
    """Copies of the running statistics of all normalisation layers."""
    return {
        f"{name}.{buffer}".removeprefix("."): values.clone()
        for name, module in _layers(model).items()
        for buffer, values in module.named_buffers(recurse=False)
    }


def drift_of(before: Statistics, after: Statistics) -> dict[str, float]:
    """How far running means have moved, in standard deviations, or variances, in powers of e: the larger of both."""
    result = {}
    for name, mean in before.items():
        layer, _, kind = name.rpartition(".")
        prefix = f"{layer}." if layer else ""
        if kind == "running_mean" and name in after:
            variance, new = before[f"{prefix}running_var"].double(), after[f"{prefix}running_var"].double()
            tiny = torch.finfo(mean.dtype).tiny
            shift = (after[name] - mean).double().square().mean() / variance.mean().clamp(min=tiny)
            stretch = (new.clamp(min=tiny) / variance.clamp(min=tiny)).log().square().mean()
            result[layer] = float(torch.maximum(shift, stretch).sqrt())
    return result


def _layers(model: nn.Module) -> dict[str, nn.Module]:
    """The layers that normalise with running statistics, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
    }


def _only_label(labels: Any) -> int:
    labels = sorted(set(labels))
    if len(labels) != 1:
        raise ValueError(
            "RunningStatistics(mode='task') gives each task statistics of its own, so an experience or batch needs one "
            f"task label; got {labels or 'none'}; use mode='freeze'"
        )
    return int(labels[0])

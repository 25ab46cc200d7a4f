"""Keeps running statistics of normalisation layers from drifting away from old tasks, and measures the drift."""

from __future__ import annotations

from typing import Any, Literal

import torch
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor, nn

from became_avalanche.strategy.tasks import TaskPlugin, continues

Statistics = dict[str, Tensor]
"""Running means, variances and batch counters, by buffer name."""


class RunningStatistics(TaskPlugin):
    """Keeps the running statistics of batch and instance normalisation from drifting away from old tasks.

    Gradient projection protects weights, but running means and variances are not weights. Every forward pass in
    training moves them towards the inputs of the current task, which changes the outputs of old tasks. This plugin
    prevents that, with or without a projection plugin in the list:

    - ``"freeze"``: the statistics stay as they are after the first experience. Layers normalise with them in training,
      too.
    - ``"task"``: each task has separate statistics, which are used for batches with its task label. A task starts with
      the statistics of the previous task.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from became_avalanche import MultiHeadNetwork, RunningStatistics, split_digits
    >>> features = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 20), torch.nn.BatchNorm1d(20))
    >>> model = MultiHeadNetwork(features, 20)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> plugins = [RunningStatistics("freeze")]
    >>> strategy = Naive(model=model, optimizer=optimizer, train_mb_size=64, evaluator=None, plugins=plugins)
    >>> for experience in split_digits().train_stream[:2]:
    ...     _ = strategy.train(experience)
    ...     print(int(features[2].num_batches_tracked))  # batches in the statistics
    4
    4
    """

    STATE = ("experiences", "statistics")

    def __init__(self, mode: Literal["freeze", "task"] = "freeze") -> None:
        """Init.

        :param mode: "freeze" keeps the statistics of the first experience; "task" has separate ones for each task.
        """
        super().__init__()
        if mode not in ("freeze", "task"):
            raise ValueError(f"mode must be one of: 'freeze', 'task'; got {mode!r}")
        self.mode = mode
        self.experiences = 0
        self.statistics: dict[int, Statistics] = {}
        """Task label -> the statistics of that task, with ``mode="task"``."""
        self._active: int | None = None

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if self.mode == "task":
            label = _only_label(strategy.experience.task_labels)
            self.statistics.setdefault(label, statistics_of(strategy.model))  # a new task starts from the current ones
            self._activate(strategy.model, label)

    def before_training_epoch(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if self.mode == "freeze" and self.experiences > 0:
            for module in _normalisation_layers(strategy.model).values():
                module.eval()

    def before_forward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if self.mode == "task":
            self._activate(strategy.model, _only_label(strategy.mb_task_id.unique().tolist()))

    before_eval_forward = before_forward

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self.experiences += not continues(kwargs)

    def after_training(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().after_training(strategy, **kwargs)
        self._store(strategy.model)

    def reset(self) -> None:
        """Reset the plugin to its initial state, for a run with another model."""
        super().reset()
        self._active = None

    def _activate(self, model: nn.Module, label: int) -> None:
        """Copy the statistics of a task into the model."""
        if label == self._active or label not in self.statistics:
            return
        self._store(model)
        self._active = label
        with torch.no_grad():
            buffers = dict(model.named_buffers())
            for name, values in self.statistics[label].items():
                buffers[name].copy_(values)

    def _store(self, model: nn.Module) -> None:
        """Store the current statistics of the model as those of the active task."""
        if self._active is not None:
            self.statistics[self._active] = statistics_of(model)


def statistics_of(model: nn.Module) -> Statistics:
    """Return copies of the running statistics of all normalisation layers."""
    return {
        f"{name}.{buffer}".removeprefix("."): values.clone()
        for name, module in _normalisation_layers(model).items()
        for buffer, values in module.named_buffers(recurse=False)
    }


def drift_of(before: Statistics, after: Statistics) -> dict[str, float]:
    """Return how far the running statistics of each layer have moved.

    It is the larger of two root mean squares over channels: the change of the mean in standard deviations, and the
    change of the logarithm of the variance.
    """
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


def other_buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the floating-point buffers outside normalisation layers and parametrizations, by name."""
    known = _normalisation_layers(model)
    return {
        name: buffer.clone()
        for name, buffer in model.named_buffers()
        if buffer.is_floating_point() and name.rpartition(".")[0] not in known and "parametrizations" not in name
    }


def relative_change(before: Tensor, after: Tensor) -> float:
    """Return ``‖after − before‖ / ‖before‖``; 0 if the shapes differ, as for buffers that grow with the classes."""
    if before.shape != after.shape:
        return 0.0
    norm = float(before.double().norm())
    moved = float((after.double() - before.double()).norm())
    return moved / norm if norm else (1.0 if moved else 0.0)


def _normalisation_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers that normalise with running statistics, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats
    }


def _only_label(labels: Any) -> int:
    """Return the one task label in ``labels``, or raise a ValueError."""
    labels = sorted(set(labels))
    if len(labels) != 1:
        raise ValueError(
            "RunningStatistics(mode='task') keeps separate statistics for each task, so each experience and batch "
            f"needs one task label; got {labels or 'none'}: use mode='freeze' instead"
        )
    return int(labels[0])

"""Measurements during training: loss, learning rate and time of each epoch, and accuracy after the first epoch."""

from __future__ import annotations

from time import perf_counter
from typing import Any

import torch
from avalanche.training.plugins import SupervisedPlugin
from avalanche.training.templates import SupervisedTemplate

from became_avalanche.plugins.plateau import PlateauPlugin
from became_avalanche.results.record import StageRecord
from became_avalanche.strategy.passes import data_pass
from became_avalanche.strategy.protocols import StageAware


class Trace(SupervisedPlugin, StageAware):
    """Records loss, learning rate and time of each epoch of each stage, and the test accuracy after the first epoch."""

    def __init__(self, plateau: PlateauPlugin | None, first_epoch_data: Any, report: Any) -> None:
        super().__init__()
        self.plateau, self.first_epoch_data, self.report = plateau, first_epoch_data, report
        self.stages: list[dict[str, Any]] = []
        self.first_epoch_accuracy: float | None = None

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self.stages, self.first_epoch_accuracy = [], None
        self._start_stage()

    def on_stage_start(self, strategy: SupervisedTemplate, stage: int) -> None:
        """Start the record of a further stage of the same task."""
        if stage > 1:
            self.report("stage", stage - 1, self.stages[-1])
            self._start_stage()

    def _start_stage(self) -> None:
        self.stages.append({"epochs": 0, **{name: [] for name in StageRecord.model_fields if name != "epochs"}})

    def before_training_epoch(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._start, self._total, self._samples = perf_counter(), 0.0, 0
        self._rate = strategy.optimizer.param_groups[0]["lr"]

    def after_training_iteration(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        size = len(strategy.mb_y)
        self._total = self._total + size * strategy.loss.detach()  # stays on the device
        self._samples += size

    def after_training_epoch(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        stage = self.stages[-1]
        stage["epochs"] += 1
        stage["training_loss"].append(finite(float(self._total) / max(1, self._samples)))
        if self.plateau is not None:
            stage["validation_loss"].append(finite(self.plateau.last_loss))
        stage["learning_rate"].append(self._rate)
        stage["seconds"].append(round(perf_counter() - self._start, 4))
        if len(self.stages) == 1 and stage["epochs"] == 1 and self.first_epoch_data is not None:
            self.first_epoch_accuracy = _accuracy(strategy, self.first_epoch_data(strategy.experience))
        self.report("epoch", len(self.stages), stage)


@torch.no_grad()
def _accuracy(strategy: SupervisedTemplate, dataset: Any) -> float:
    right = samples = 0
    with data_pass(strategy, dataset, strategy.eval_mb_size) as batches:
        for size in batches:
            right += int((strategy.mb_output.argmax(-1) == strategy.mb_y).sum())
            samples += size
    return right / samples


def finite(value: float | None) -> float | None:
    """Return the value, or None if it is not a finite number."""
    return None if value is None or value != value or value in (float("inf"), float("-inf")) else value

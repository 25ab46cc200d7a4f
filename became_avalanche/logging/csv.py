"""Avalanche's CSV logger for training in stages."""

from __future__ import annotations

from typing import Any

from avalanche.evaluation.metric_results import MetricValue
from avalanche.logging import CSVLogger
from avalanche.training.templates import SupervisedTemplate


class StageCSVLogger(CSVLogger):
    """Avalanche's ``CSVLogger`` with the stage of each epoch, and a row for the merged model.

    Avalanche's own logger numbers the epochs of both stages alike, so that they cannot be told apart. Here
    ``training_results.csv`` has a column ``stage``: 1, 2, or ``merged`` for the model after the merge. The row of the
    merged model has validation values only. It is written if the strategy evaluates during training (``eval_every``).

    >>> from pathlib import Path
    >>> from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
    >>> from avalanche.training.plugins import EvaluationPlugin
    >>> from became_avalanche import StageCSVLogger
    >>> logger = StageCSVLogger("logs")
    >>> metrics = accuracy_metrics(epoch=True, experience=True) + loss_metrics(epoch=True, experience=True)
    >>> evaluator = EvaluationPlugin(metrics, loggers=[logger])  # for the strategy
    >>> Path("logs/training_results.csv").read_text().strip()
    'training_exp,stage,epoch,training_accuracy,val_accuracy,training_loss,val_loss'
    >>> logger.close()
    """

    def __init__(self, log_folder: str | None = None) -> None:
        """Init.

        :param log_folder: where to write ``training_results.csv`` and ``eval_results.csv``; ``csvlogs`` if None.
        """
        super().__init__(log_folder)
        self._stage, self._merged = 1, False
        self.training_file.seek(0)
        self.training_file.truncate()
        self._row("training_exp", "stage", "epoch", "training_accuracy", "val_accuracy", "training_loss", "val_loss")

    def log_single_metric(self, name: str, value: Any, x_plot: int) -> None:
        """Remember the current stage, and whether there was a merge."""
        if name.startswith("Stage/"):
            self._stage = value
        self._merged = self._merged or name.startswith("Lambda/")

    def print_train_metrics(
        self, training_exp: Any, epoch: Any, train_acc: Any, val_acc: Any, train_loss: Any, val_loss: Any
    ) -> None:
        """Write the row of an epoch."""
        numbers = map(self._val_to_str, (train_acc, val_acc, train_loss, val_loss))
        self._row(training_exp, self._stage, epoch, *numbers)

    def before_training_exp(
        self, strategy: SupervisedTemplate, metric_values: list[MetricValue], **kwargs: Any
    ) -> None:
        super().before_training_exp(strategy, metric_values, **kwargs)
        self._stage, self._merged = 1, False

    def after_eval_exp(self, strategy: SupervisedTemplate, metric_values: list[MetricValue], **kwargs: Any) -> None:
        super().after_eval_exp(strategy, metric_values, **kwargs)
        if self.in_train_phase and self._merged:
            accuracy, loss = map(self._val_to_str, (self.val_acc, self.val_loss))
            self._row(self.training_exp_id, "merged", "", "", accuracy, "", loss)
            self._merged = False

    def _row(self, *cells: object) -> None:
        print(*cells, sep=",", file=self.training_file, flush=True)

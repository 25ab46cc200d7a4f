"""The accuracy matrix and the paper's metrics, as an Avalanche metric."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import Any
from weakref import ref

import numpy as np
from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metric_results import MetricValue
from avalanche.evaluation.metrics import Accuracy
from avalanche.training.templates import SupervisedTemplate
from numpy.typing import NDArray
from torch import nn

from became_avalanche.files import look_up
from became_avalanche.results.metrics import METRICS
from became_avalanche.results.record import Matrix
from became_avalanche.strategy.owner import unwrapped
from became_avalanche.strategy.passes import experiences_in_training

OF_MATRIX = {name: metric.of_matrix for name, metric in METRICS.items() if metric.of_matrix is not None}
"""The metrics that are computed from the accuracy matrix alone."""


class AccuracyMatrix(PluginMetric):
    """The accuracy matrix of one stream, with the paper's metrics: ACC, BWT, AAA and forgetting.

    ``A[t, i]`` is the accuracy on task ``i`` after training on task ``t``. ``METRICS`` has the definitions of the
    metrics. All tasks have the same weight, and only tasks trained so far count. Avalanche's ``Top1_Acc_Stream``
    averages over samples instead, and also counts tasks that were never trained.

    The metrics are sent to all loggers after each evaluation of the stream that covers all tasks trained so far, as
    fractions like Avalanche's accuracies. A metric is nan as long as it is undefined: BWT after a single task, and any
    metric that needs an accuracy that was not measured. The matrix belongs to one model and is reset when another model
    is trained or evaluated.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from avalanche.training.plugins import EvaluationPlugin
    >>> from became_avalanche import AccuracyMatrix, MultiHeadMLP, split_digits
    >>> matrix, model, benchmark = AccuracyMatrix(), MultiHeadMLP(), split_digits()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> strategy = Naive(model=model, optimizer=optimizer, train_mb_size=64, evaluator=EvaluationPlugin(matrix))
    >>> for experience in benchmark.train_stream[:2]:
    ...     _ = strategy.train(experience)
    ...     _ = strategy.eval(benchmark.test_stream[:2])
    >>> matrix.result().shape
    (2, 2)
    >>> bool(matrix.acc == matrix.result()[1].mean())
    True
    """

    def __init__(self, stream: str = "test", metrics: Sequence[str] = ("acc", "bwt", "aaa", "forgetting")) -> None:
        """Init.

        :param stream: name of the stream to follow.
        :param metrics: names of the metrics to log: those of ``METRICS`` that need only the accuracy matrix.
        """
        super().__init__()
        self.stream, self.metrics = stream, tuple(metrics)
        for name in metrics:
            look_up("metric of the accuracy matrix", name, OF_MATRIX)
        self.reset()

    def reset(self) -> None:
        """Forget all accuracies."""
        self._seen: list[int] = []
        self._values: dict[tuple[int, int], float] = {}
        self._evaluated: dict[int, Accuracy] = {}
        self._model: ref[nn.Module] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the tasks trained so far and all accuracies, as plain values."""
        return {"seen": list(self._seen), "values": [[t, i, value] for (t, i), value in self._values.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned."""
        self.reset()
        self._seen = list(state["seen"])
        self._values = {(t, i): value for t, i, value in state["values"]}

    def result(self) -> NDArray[np.float64]:
        """Return the matrix, with a row per trained task and a column per task of the stream; nan if not measured."""
        columns = max((i for _, i in self._values), default=-1) + 1
        return np.array([[self._values.get((t, i), nan) for i in range(columns)] for t in self._seen])

    @property
    def acc(self) -> float:
        """Mean accuracy over the trained tasks, after the last of them; nan if one of them was not evaluated."""
        return self.value("acc")

    @property
    def bwt(self) -> float:
        """Mean change in accuracy of the earlier tasks since each was learned."""
        return self.value("bwt")

    def value(self, name: str) -> float:
        """Return a metric over the tasks trained so far, or nan if it is undefined or an accuracy is missing.

        :param name: name of a metric of ``METRICS`` that needs only the accuracy matrix, such as "aaa".
        """
        seen: Matrix = [[self._values.get((t, i)) for i in self._seen] for t in self._seen]
        value = look_up("metric of the accuracy matrix", name, OF_MATRIX)(seen)
        return nan if value is None else value

    def before_training(self, strategy: SupervisedTemplate) -> None:
        self._follow(strategy.model)

    def before_training_exp(self, strategy: SupervisedTemplate) -> None:
        self._follow(strategy.model)
        for experience in experiences_in_training(strategy):
            t = experience.current_experience
            if t in self._seen:
                self._seen.remove(t)
            self._seen.append(t)

    def before_eval(self, strategy: SupervisedTemplate) -> None:
        self._follow(strategy.model)
        self._evaluated = {}

    def after_eval_iteration(self, strategy: SupervisedTemplate) -> None:
        if strategy.experience.origin_stream.name == self.stream:
            accuracy = self._evaluated.setdefault(strategy.experience.current_experience, Accuracy())
            accuracy.update(strategy.mb_output, strategy.mb_y)

    def after_eval(self, strategy: SupervisedTemplate) -> list[MetricValue]:
        if not self._seen or not self._evaluated:
            return []
        for i, accuracy in self._evaluated.items():
            self._values[self._seen[-1], i] = accuracy.result()
        if not self._evaluated.keys() >= set(self._seen):
            return []
        x = strategy.clock.train_iterations
        return [
            MetricValue(self, f"{METRICS[name].title}/eval_phase/{self.stream}_stream", self.value(name), x)
            for name in self.metrics
        ]

    def _follow(self, model: nn.Module) -> None:
        """Reset the matrix if this is another model than before. After loading or copying, any model is accepted."""
        model = unwrapped(model)
        if self._model is not None and self._model() is not model:
            self.reset()
        self._model = ref(model)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None}

    def __str__(self) -> str:
        return f"AccuracyMatrix/{self.stream}_stream"

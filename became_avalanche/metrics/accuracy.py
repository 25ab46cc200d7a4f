"""The accuracy matrix, and what the paper reads off it."""

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
"""The metrics that need the accuracy matrix alone."""


class AccuracyMatrix(PluginMetric):
    """The accuracy matrix of one stream, and what the paper reads off it: ACC, BWT, AAA and forgetting.

    ``A[t, i]`` is the accuracy on task ``i`` after training on task ``t``. ``METRICS`` has the definitions. Every task
    weighs the same, and only tasks seen count; Avalanche's ``Top1_Acc_Stream`` weighs samples and counts unseen tasks
    too. The metrics go to all loggers after each evaluation of the stream that covers all tasks seen, as fractions like
    Avalanche's accuracies. One that is not defined yet is nan: BWT of a single task, and where a task was not evaluated
    right after its training. The matrix is that of one model: it starts anew when another model is trained.
    """

    def __init__(self, stream: str = "test", metrics: Sequence[str] = ("acc", "bwt", "aaa", "forgetting")) -> None:
        """Init.

        :param stream: name of the stream to follow.
        :param metrics: names of the metrics of ``METRICS`` to log: those that need the accuracy matrix alone.
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
        """The tasks seen and all accuracies, as plain values."""
        return {"seen": list(self._seen), "values": [[t, i, value] for (t, i), value in self._values.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that ``state_dict`` returned."""
        self.reset()
        self._seen = list(state["seen"])
        self._values = {(t, i): value for t, i, value in state["values"]}

    def result(self) -> NDArray[np.float64]:
        """The matrix: a row per task seen, a column per task of the stream, nan where nothing was measured."""
        columns = max((i for _, i in self._values), default=-1) + 1
        return np.array([[self._values.get((t, i), nan) for i in range(columns)] for t in self._seen])

    @property
    def acc(self) -> float:
        """Mean accuracy over the tasks seen, after the last of them; nan if one of them was not evaluated."""
        return self.value("acc")

    @property
    def bwt(self) -> float:
        """Mean change in accuracy of the earlier tasks since each was learned."""
        return self.value("bwt")

    def value(self, name: str) -> float:
        """A metric of ``METRICS`` over the tasks seen so far; nan if it is not defined or something was not measured.

        :param name: of a metric that needs the accuracy matrix alone, such as "aaa".
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
        """Start anew if this is another model than before. After loading, and in a copy, any model will do."""
        model = unwrapped(model)
        if self._model is not None and self._model() is not model:
            self.reset()
        self._model = ref(model)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_model": None}

    def __str__(self) -> str:
        return f"AccuracyMatrix/{self.stream}_stream"

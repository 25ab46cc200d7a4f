"""The accuracy matrix, and what the paper reads off it."""

from __future__ import annotations

from math import nan
from typing import Any

import numpy as np
from avalanche.evaluation import PluginMetric
from avalanche.evaluation.metric_results import MetricValue
from avalanche.evaluation.metrics import Accuracy
from avalanche.training.templates import SupervisedTemplate
from numpy.typing import NDArray

from became_avalanche.strategy.passes import experiences_in_training


class AccuracyMatrix(PluginMetric):
    """ACC and BWT of one stream, by the definitions of the paper.

    With ``A[t, i]`` the accuracy on task ``i`` after training on task ``t``, and ``T`` tasks seen,

        ACC = 1/T Σ_i A[T, i],        BWT = 1/(T−1) Σ_{i<T} (A[T, i] − A[i, i]).

    Every task weighs the same, and only tasks seen count; Avalanche's ``Top1_Acc_Stream`` weighs samples and counts
    unseen tasks too. ACC and BWT go to all loggers after each evaluation of the stream that covers all tasks seen, as
    fractions like Avalanche's accuracies. BWT is nan for a single task, and where a task was not evaluated right after
    its training.
    """

    def __init__(self, stream: str = "test") -> None:
        """Init.

        :param stream: name of the stream to follow.
        """
        super().__init__()
        self.stream = stream
        self.reset()

    def reset(self) -> None:
        """Forget all accuracies."""
        self._seen: list[int] = []
        self._values: dict[tuple[int, int], float] = {}
        self._evaluated: dict[int, Accuracy] = {}

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
        return float(np.mean([self._last(i) for i in self._seen])) if self._seen else nan

    @property
    def bwt(self) -> float:
        """Mean change in accuracy of the earlier tasks since each was learned."""
        changes = [self._last(i) - self._values.get((i, i), nan) for i in self._seen[:-1]]
        return float(np.mean(changes)) if changes else nan

    def _last(self, i: int) -> float:
        return self._values.get((self._seen[-1], i), nan)

    def before_training_exp(self, strategy: SupervisedTemplate) -> None:
        for experience in experiences_in_training(strategy):
            t = experience.current_experience
            if t in self._seen:
                self._seen.remove(t)
            self._seen.append(t)

    def before_eval(self, strategy: SupervisedTemplate) -> None:
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
            MetricValue(self, f"{name}/eval_phase/{self.stream}_stream", value, x)
            for name, value in (("ACC", self.acc), ("BWT", self.bwt))
        ]

    def __str__(self) -> str:
        return f"AccuracyMatrix/{self.stream}_stream"

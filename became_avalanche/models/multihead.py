"""What all networks here have in common."""

from __future__ import annotations

from typing import Any

from avalanche.models import IncrementalClassifier, MultiHeadClassifier, MultiTaskModule
from torch import Tensor, nn


class MultiHeadNetwork(MultiTaskModule):
    """Features that all tasks share, and one head per task, which Avalanche adds as tasks come."""

    def __init__(self, features: nn.Module, width: int, head_bias: bool = True) -> None:
        """Init.

        :param features: inputs to features.
        :param width: number of features.
        :param head_bias: whether the heads have biases.
        """
        super().__init__()
        self.features = features
        self.classifier = MultiHeadClassifier(width) if head_bias else HeadsWithoutBias(width)

    def forward(self, x: Tensor, task_labels: Tensor) -> Tensor:
        """Logits of the head of each sample's task."""
        logits: Tensor = self.classifier(self.features(x), task_labels)
        return logits


class HeadsWithoutBias(MultiHeadClassifier):
    """Avalanche's heads, which always have a bias, with that bias fixed at zero."""

    def __init__(self, in_features: int) -> None:
        """Init.

        :param in_features: number of features.
        """
        super().__init__(in_features)
        self._fix_biases()

    def adaptation(self, experience: Any) -> None:
        """Add the head of a new task, and units for new classes."""
        super().adaptation(experience)
        self._fix_biases()

    def _fix_biases(self) -> None:
        for head in self.classifiers.values():
            assert isinstance(head, IncrementalClassifier)
            nn.init.zeros_(head.classifier.bias.requires_grad_(False))

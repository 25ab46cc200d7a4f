"""What all networks here have in common."""

from __future__ import annotations

from avalanche.models import MultiHeadClassifier, MultiTaskModule
from torch import Tensor, nn


class MultiHeadNetwork(MultiTaskModule):
    """Features that all tasks share, and one head per task, which Avalanche adds as tasks come."""

    def __init__(self, features: nn.Module, width: int) -> None:
        """Init.

        :param features: inputs to features.
        :param width: number of features.
        """
        super().__init__()
        self.features = features
        self.classifier = MultiHeadClassifier(width)

    def forward(self, x: Tensor, task_labels: Tensor) -> Tensor:
        """Logits of the head of each sample's task."""
        logits: Tensor = self.classifier(self.features(x), task_labels)
        return logits

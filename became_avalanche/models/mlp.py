"""A small network for small images."""

from __future__ import annotations

from avalanche.models import MultiHeadClassifier, MultiTaskModule
from torch import Tensor, nn


class MultiHeadMLP(MultiTaskModule):
    """Two hidden layers without biases, as the networks of the gradient projection papers, and one head per task."""

    def __init__(self, input_size: int = 64, hidden_size: int = 100) -> None:
        """Init.

        :param input_size: number of values in an input, whatever its shape.
        :param hidden_size: units in each hidden layer.
        """
        super().__init__()
        self.features = nn.Sequential(
            nn.Flatten(),
            nn.Linear(input_size, hidden_size, bias=False),
            nn.ReLU(),
            nn.Linear(hidden_size, hidden_size, bias=False),
            nn.ReLU(),
        )
        self.classifier = MultiHeadClassifier(hidden_size)

    def forward(self, x: Tensor, task_labels: Tensor) -> Tensor:
        """Logits of the head of each sample's task."""
        logits: Tensor = self.classifier(self.features(x), task_labels)
        return logits

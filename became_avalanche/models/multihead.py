"""The base class of the networks with one head per task."""

from __future__ import annotations

from typing import Any

from avalanche.models import IncrementalClassifier, MultiHeadClassifier, MultiTaskModule
from torch import Tensor, nn


class MultiHeadNetwork(MultiTaskModule):
    """Features that all tasks share, and one head per task. Avalanche adds a head when a new task starts.

    >>> import torch
    >>> from became_avalanche import MultiHeadNetwork
    >>> features = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 20), torch.nn.ReLU())
    >>> model = MultiHeadNetwork(features, width=20)
    >>> model(torch.zeros(3, 8, 8), task_labels=torch.zeros(3, dtype=torch.long)).shape  # a new head has two outputs
    torch.Size([3, 2])
    """

    def __init__(self, features: nn.Module, width: int, head_bias: bool = True) -> None:
        """Init.

        :param features: module that maps inputs to features.
        :param width: number of features.
        :param head_bias: whether the heads have biases.
        """
        super().__init__()
        self.features = features
        self.classifier = MultiHeadClassifier(width) if head_bias else HeadsWithoutBias(width)

    def forward(self, x: Tensor, task_labels: Tensor) -> Tensor:
        """Return the logits of each sample, from the head of its task."""
        logits: Tensor = self.classifier(self.features(x), task_labels)
        return logits


class HeadsWithoutBias(MultiHeadClassifier):
    """Avalanche's heads with biases fixed at zero, since Avalanche has no heads without a bias.

    >>> from became_avalanche import HeadsWithoutBias
    >>> bias = HeadsWithoutBias(5).classifiers["0"].classifier.bias
    >>> bias.tolist(), bias.requires_grad
    ([0.0, 0.0], False)
    """

    def __init__(self, in_features: int) -> None:
        """Init.

        :param in_features: number of features.
        """
        super().__init__(in_features)
        self._fix_biases()

    def adaptation(self, experience: Any) -> None:
        """Add a head for a new task and outputs for new classes."""
        super().adaptation(experience)
        self._fix_biases()

    def _fix_biases(self) -> None:
        for head in self.classifiers.values():
            assert isinstance(head, IncrementalClassifier)
            nn.init.zeros_(head.classifier.bias.requires_grad_(False))

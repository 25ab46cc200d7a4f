"""The base class of the networks with one head per task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from avalanche.models import MultiHeadClassifier, MultiTaskModule
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

    def __init__(self, features: nn.Module, width: int, head_bias: bool = True, kaiming_heads: bool = False) -> None:
        """Init.

        :param features: module that maps inputs to features.
        :param width: number of features.
        :param head_bias: whether the heads have biases.
        :param kaiming_heads: whether the weights of the heads are drawn by Kaiming's rule for ReLU. By default PyTorch
            draws them, √6 times smaller.
        """
        super().__init__()
        self.features = features
        self.classifier = Heads(width, head_bias, kaiming_heads)

    def forward(self, x: Tensor, task_labels: Tensor) -> Tensor:
        """Return the logits of each sample, from the head of its task."""
        logits: Tensor = self.classifier(self.features(x), task_labels)
        return logits


class Heads(MultiHeadClassifier):
    """Avalanche's heads, with two options that the published networks need.

    Avalanche has no heads without a bias. Here such heads have biases that stay zero.

    >>> from became_avalanche import Heads
    >>> bias = Heads(5, bias=False).classifiers["0"].classifier.bias
    >>> bias.tolist(), bias.requires_grad
    ([0.0, 0.0], False)
    """

    def __init__(self, in_features: int, bias: bool = True, kaiming: bool = False) -> None:
        """Init.

        :param in_features: number of features.
        :param bias: whether the heads have biases.
        :param kaiming: whether the weights are drawn by Kaiming's rule for ReLU, instead of PyTorch's default.
        """
        super().__init__(in_features)
        self.bias, self.kaiming = bias, kaiming
        self._initialise({})

    def adaptation(self, experience: Any) -> None:
        """Add a head for a new task and outputs for new classes."""
        outputs = {task: len(head.classifier.weight) for task, head in self.classifiers.items()}
        super().adaptation(experience)
        self._initialise(outputs)

    def _initialise(self, outputs: Mapping[str, int]) -> None:
        """Draw the weights of new outputs. ``outputs`` has the number of old outputs of each head."""
        for task, head in self.classifiers.items():
            layer = head.classifier
            assert isinstance(layer, nn.Linear)
            with torch.no_grad():
                new = layer.weight[outputs.get(task, 0) :]
                if self.kaiming and len(new):
                    nn.init.kaiming_uniform_(new, nonlinearity="relu")
            if not self.bias:
                nn.init.zeros_(layer.bias.requires_grad_(False))

"""A small network for small images."""

from __future__ import annotations

from avalanche.models import IncrementalClassifier
from torch import Tensor, nn

from became_avalanche.models.multihead import MultiHeadNetwork


class MultiHeadMLP(MultiHeadNetwork):
    """Two hidden layers without biases, as the networks of the gradient projection papers, and one head per task."""

    def __init__(self, input_size: int = 64, hidden_size: int = 100, head_bias: bool = True) -> None:
        """Init.

        :param input_size: number of values in an input, whatever its shape.
        :param hidden_size: units in each hidden layer.
        :param head_bias: whether the heads have biases.
        """
        super().__init__(_features(input_size, hidden_size), hidden_size, head_bias)


class SingleHeadMLP(nn.Module):
    """The same hidden layers with one head for all tasks, which grows with the classes or is fixed."""

    def __init__(self, n_classes: int | None = None, input_size: int = 64, hidden_size: int = 100) -> None:
        """Init.

        :param n_classes: number of outputs; None for a head that grows as classes come.
        :param input_size: number of values in an input, whatever its shape.
        :param hidden_size: units in each hidden layer.
        """
        super().__init__()
        self.features = _features(input_size, hidden_size)
        self.classifier = IncrementalClassifier(hidden_size) if n_classes is None else nn.Linear(hidden_size, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of all classes."""
        logits: Tensor = self.classifier(self.features(x))
        return logits


def _features(input_size: int, hidden_size: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(input_size, hidden_size, bias=False),
        nn.ReLU(),
        nn.Linear(hidden_size, hidden_size, bias=False),
        nn.ReLU(),
    )

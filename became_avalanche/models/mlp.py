"""Small networks for small images."""

from __future__ import annotations

from avalanche.models import IncrementalClassifier
from torch import Tensor, nn

from became_avalanche.models.multihead import MultiHeadNetwork


class MultiHeadMLP(MultiHeadNetwork):
    """Two hidden layers without biases, like the networks of the gradient projection papers, and one head per task.

    >>> import torch
    >>> from avalanche.models.utils import avalanche_model_adaptation
    >>> from became_avalanche import MultiHeadMLP, split_digits
    >>> model = MultiHeadMLP()
    >>> for experience in split_digits().train_stream:
    ...     avalanche_model_adaptation(model, experience)  # strategies call this: it adds the head of the task
    >>> model(torch.zeros(3, 1, 8, 8), task_labels=torch.tensor([0, 4, 4])).shape
    torch.Size([3, 2])
    """

    def __init__(self, input_size: int = 64, hidden_size: int = 100, head_bias: bool = True) -> None:
        """Init.

        :param input_size: number of values in an input, which may have any shape.
        :param hidden_size: units in each hidden layer.
        :param head_bias: whether the heads have biases.
        """
        super().__init__(_features(input_size, hidden_size), hidden_size, head_bias)


class SingleHeadMLP(nn.Module):
    """The hidden layers of ``MultiHeadMLP`` with one head for all tasks, which grows with the classes or is fixed.

    >>> import torch
    >>> from became_avalanche import SingleHeadMLP
    >>> SingleHeadMLP(n_classes=10)(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 10])
    """

    def __init__(self, n_classes: int | None = None, input_size: int = 64, hidden_size: int = 100) -> None:
        """Init.

        :param n_classes: number of outputs; None for a head that grows when new classes appear.
        :param input_size: number of values in an input, which may have any shape.
        :param hidden_size: units in each hidden layer.
        """
        super().__init__()
        self.features = _features(input_size, hidden_size)
        self.classifier = IncrementalClassifier(hidden_size) if n_classes is None else nn.Linear(hidden_size, n_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of all classes."""
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

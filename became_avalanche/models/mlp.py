"""A small network for small images."""

from __future__ import annotations

from torch import nn

from became_avalanche.models.multihead import MultiHeadNetwork


class MultiHeadMLP(MultiHeadNetwork):
    """Two hidden layers without biases, as the networks of the gradient projection papers, and one head per task."""

    def __init__(self, input_size: int = 64, hidden_size: int = 100, head_bias: bool = True) -> None:
        """Init.

        :param input_size: number of values in an input, whatever its shape.
        :param hidden_size: units in each hidden layer.
        :param head_bias: whether the heads have biases.
        """
        features = nn.Sequential(
            nn.Flatten(),
            nn.Linear(input_size, hidden_size, bias=False),
            nn.ReLU(),
            nn.Linear(hidden_size, hidden_size, bias=False),
            nn.ReLU(),
        )
        super().__init__(features, hidden_size, head_bias)

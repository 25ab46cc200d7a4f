"""The LeNet of the gradient projection papers, for the superclasses of CIFAR-100."""

from __future__ import annotations

import torch
from torch import nn

from became_avalanche.models.lrn import LocalResponseNorm
from became_avalanche.models.multihead import MultiHeadNetwork


class LeNet(MultiHeadNetwork):
    """Two convolutions and two fully connected layers without biases, for 32 x 32 images, and one head per task.

    >>> import torch
    >>> from became_avalanche import LeNet
    >>> LeNet().features(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 500])
    """

    def __init__(self, head_bias: bool = True, kaiming_heads: bool = False) -> None:
        """Init.

        :param head_bias: whether the heads have biases. In the papers they have none.
        :param kaiming_heads: whether the weights of the heads are drawn like those of the features, by Kaiming's rule.
            In the published code they are. By default PyTorch draws them, √6 times smaller.
        """

        def convolution(inputs: int, outputs: int) -> list[nn.Module]:
            normalised = LocalResponseNorm(4, alpha=0.001 / 9)
            weights = nn.Conv2d(inputs, outputs, 5, padding=2, bias=False)
            return [weights, nn.ReLU(), normalised, nn.MaxPool2d(3, stride=2, padding=1)]

        features = nn.Sequential(
            *convolution(3, 20),
            *convolution(20, 50),
            nn.Flatten(),
            nn.Linear(3200, 800, bias=False),
            nn.ReLU(),
            nn.Linear(800, 500, bias=False),
            nn.ReLU(),
        )
        for layer in features:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        super().__init__(features.to(memory_format=torch.channels_last), 500, head_bias, kaiming_heads)

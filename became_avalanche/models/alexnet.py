"""The AlexNet of the gradient projection papers, for CIFAR-100."""

from __future__ import annotations

import torch
from torch import nn

from became_avalanche.models.dropout import Dropout
from became_avalanche.models.multihead import MultiHeadNetwork


class AlexNet(MultiHeadNetwork):
    """Three convolutions and two fully connected layers without biases, for 32 x 32 images, and one head per task.

    As in the published code, batch normalisation has no running statistics by default: even at evaluation, a batch is
    normalised with its own statistics, so a prediction depends on the other samples in the batch.

    >>> import torch
    >>> from became_avalanche import AlexNet
    >>> AlexNet().features(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 2048])
    """

    def __init__(self, running_statistics: bool = False, head_bias: bool = True) -> None:
        """Init.

        :param running_statistics: keep running statistics and use them at evaluation, as PyTorch does by default.
            Samples are then independent of each other at evaluation, as per-sample Fisher estimators require.
        :param head_bias: whether the heads have biases. In the papers they have none.
        """

        def convolution(inputs: int, outputs: int, kernel: int, dropout: float) -> list[nn.Module]:
            norm = nn.BatchNorm2d(outputs, track_running_stats=running_statistics)
            weights = nn.Conv2d(inputs, outputs, kernel, bias=False)
            # in the papers, ReLU comes before dropout; after pooling it gives the same with a quarter of the values
            return [weights, norm, Dropout(dropout), nn.MaxPool2d(2), nn.ReLU()]

        def fully_connected(inputs: int, outputs: int) -> list[nn.Module]:
            norm = nn.BatchNorm1d(outputs, track_running_stats=running_statistics)
            return [nn.Linear(inputs, outputs, bias=False), norm, nn.ReLU(), Dropout(0.5)]

        features = nn.Sequential(
            *convolution(3, 64, kernel=4, dropout=0.2),
            *convolution(64, 128, kernel=3, dropout=0.2),
            *convolution(128, 256, kernel=2, dropout=0.5),
            nn.Flatten(),
            *fully_connected(1024, 2048),
            *fully_connected(2048, 2048),
        )
        super().__init__(features.to(memory_format=torch.channels_last), 2048, head_bias)

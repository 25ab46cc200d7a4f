"""The network of the gradient projection papers for CIFAR-100."""

from __future__ import annotations

import torch
from torch import nn

from became_avalanche.models.dropout import Dropout
from became_avalanche.models.multihead import MultiHeadNetwork


class AlexNet(MultiHeadNetwork):
    """Three convolutions and two fully connected layers without biases for images of 32 x 32, and one head per task.

    In the published codes batch normalisation has no running statistics: at evaluation, too, a batch is normalised by
    its own, so predictions depend on what else is in the batch.
    """

    def __init__(self, running_statistics: bool = False, head_bias: bool = True) -> None:
        """Init.

        :param running_statistics: keep them and use them at evaluation, as PyTorch does by default. Samples are then
            independent of each other at evaluation, as estimators of the Fisher information per sample need it.
        :param head_bias: whether the heads have biases; the papers' have none.
        """

        def convolution(inputs: int, outputs: int, kernel: int, dropout: float) -> list[nn.Module]:
            norm = nn.BatchNorm2d(outputs, track_running_stats=running_statistics)
            weights = nn.Conv2d(inputs, outputs, kernel, bias=False)
            # the papers' ReLU comes before dropout; after pooling it gives the same on a quarter of the values
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

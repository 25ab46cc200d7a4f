"""The reduced ResNet18 of the gradient projection papers, for miniImageNet and 5-Datasets."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torchvision.models.resnet import BasicBlock

from became_avalanche.models.multihead import MultiHeadNetwork

SMALLEST = 9
"""Smallest image size that leaves 2 x 2 values for the last pooling."""


class ReducedResNet18(MultiHeadNetwork):
    """ResNet18 with about a tenth of its weights: 17 convolutions 3 x 3, three 1 x 1 shortcuts, and one head per task.

    As in the published code, batch normalisation has no running statistics: even at evaluation, a batch is normalised
    with its own statistics, so a prediction depends on the other samples in the batch.

    >>> import torch
    >>> from became_avalanche import ReducedResNet18
    >>> ReducedResNet18(image_size=32).features(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 640])
    """

    def __init__(self, image_size: int = 84, width: int = 20, head_bias: bool = True) -> None:
        """Init.

        :param image_size: height and width of the images: 84 for miniImageNet, 32 for CIFAR. The first convolution
            has stride 2 for images larger than 32.
        :param width: number of channels of the first layer. It doubles three times.
        :param head_bias: whether the heads have biases. In the papers they have none.
        """
        if image_size < SMALLEST:
            raise ValueError(
                f"image_size must be at least {SMALLEST}, or too little is left for the last pooling; got {image_size}"
            )
        if width < 1:
            raise ValueError(f"width must be at least 1; got {width}")
        stem_stride = 2 if image_size > 32 else 1
        features = nn.Sequential()
        features.add_module("conv1", nn.Conv2d(3, width, 3, stem_stride, padding=1, bias=False))
        features.add_module("bn1", _norm(width))
        features.add_module("relu", nn.ReLU())
        features.add_module("layer1", _two_blocks(width, width))
        features.add_module("layer2", _two_blocks(width, 2 * width))
        features.add_module("layer3", _two_blocks(2 * width, 4 * width))
        features.add_module("layer4", _two_blocks(4 * width, 8 * width))
        features.add_module("pool", nn.AvgPool2d(2))
        features.add_module("flatten", nn.Flatten())
        side = -(-image_size // (8 * stem_stride)) // 2  # strides round up, the pooling rounds down
        super().__init__(features.to(memory_format=torch.channels_last), 8 * width * side**2, head_bias)


_norm = partial(nn.BatchNorm2d, track_running_stats=False)


def _two_blocks(channels: int, wider: int) -> nn.Sequential:
    """Return two residual blocks. If they widen their input, the first halves the image and has a 1 x 1 shortcut."""
    stride, shortcut = 1, None
    if wider > channels:
        stride, shortcut = 2, nn.Sequential(nn.Conv2d(channels, wider, 1, stride=2, bias=False), _norm(wider))
    first = BasicBlock(channels, wider, stride, shortcut, norm_layer=_norm)
    return nn.Sequential(first, BasicBlock(wider, wider, norm_layer=_norm))

"""The PreActResNet18 of Adam-NSCL."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from became_avalanche.models.multihead import MultiHeadNetwork


class PreActResNet18(MultiHeadNetwork):
    """ResNet18 at full width with normalisation before the convolutions, and one head per task.

    Batch normalisation has running statistics.

    >>> import torch
    >>> from became_avalanche import PreActResNet18
    >>> PreActResNet18().features(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 512])
    """

    def __init__(self) -> None:
        features = nn.Sequential(
            nn.Conv2d(3, 64, 3, padding=1, bias=False),
            *(_Block(64, 64), _Block(64, 64)),
            *(_Block(64, 128, stride=2), _Block(128, 128)),
            *(_Block(128, 256, stride=2), _Block(256, 256)),
            *(_Block(256, 512, stride=2), _Block(512, 512)),
            nn.BatchNorm2d(512),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        super().__init__(features, 512)


class _Block(nn.Module):
    """Two convolutions, each after normalisation and ReLU. With stride 2, the shortcut starts after the first ReLU."""

    def __init__(self, channels: int, wider: int, stride: int = 1) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv1 = nn.Conv2d(channels, wider, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(wider)
        self.conv2 = nn.Conv2d(wider, wider, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(channels, wider, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.bn1(x))
        shortcut = x if self.shortcut is None else self.shortcut(active)
        result: Tensor = shortcut + self.conv2(F.relu(self.bn2(self.conv1(active))))
        return result

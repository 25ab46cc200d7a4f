"""The network of the gradient projection papers for the superclasses of CIFAR-100."""

from __future__ import annotations

from avalanche.models import MultiHeadClassifier, MultiTaskModule
from torch import Tensor, nn


class LeNet(MultiTaskModule):
    """Two convolutions and two fully connected layers without biases for images of 32 x 32, and one head per task."""

    def __init__(self) -> None:
        super().__init__()

        def convolution(inputs: int, outputs: int) -> list[nn.Module]:
            normalised = nn.LocalResponseNorm(4, alpha=0.001 / 9, beta=0.75, k=1)
            weights = nn.Conv2d(inputs, outputs, 5, padding=2, bias=False)
            return [weights, nn.ReLU(), normalised, nn.MaxPool2d(3, stride=2, padding=1)]

        self.features = nn.Sequential(
            *convolution(3, 20),
            *convolution(20, 50),
            nn.Flatten(),
            nn.Linear(3200, 800, bias=False),
            nn.ReLU(),
            nn.Linear(800, 500, bias=False),
            nn.ReLU(),
        )
        for layer in self.features:
            if isinstance(layer, nn.Conv2d | nn.Linear):
                nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
        self.classifier = MultiHeadClassifier(500)

    def forward(self, x: Tensor, task_labels: Tensor) -> Tensor:
        """Logits of the head of each sample's task."""
        logits: Tensor = self.classifier(self.features(x), task_labels)
        return logits

"""The heads that Avalanche adds to a model or makes larger."""

from __future__ import annotations

from avalanche.models import IncrementalClassifier, MultiHeadClassifier
from torch import nn

from became_avalanche.subspace.layers import is_below


def task_heads(model: nn.Module) -> dict[str, nn.Module]:
    """The heads of the model that Avalanche makes grow with the tasks, by name."""
    heads: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadClassifier | IncrementalClassifier) and not is_below(name, heads):
            heads[name] = module
    return heads

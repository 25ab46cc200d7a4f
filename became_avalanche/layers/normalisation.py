"""Normalisation layers, with a scale and a shift per channel."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

NORMALISATION = (_NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


def couples_samples(module: nn.Module) -> bool:
    """Whether ``module`` normalises with the statistics of the batch."""
    return isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)


def has_closed_form(module: nn.Module) -> bool:
    """Whether ``per_sample`` can compute the gradients of the module's parameters."""
    return isinstance(module, _BatchNorm) and type(module).forward is _BatchNorm.forward


def per_sample(module: nn.Module, name: str, x: Tensor, gradient: Tensor) -> Tensor:
    """Return the per-sample gradients of a batch normalisation that uses running statistics."""
    assert isinstance(module, _BatchNorm)
    if name == "weight":
        gradient = gradient * F.batch_norm(x, module.running_mean, module.running_var, eps=module.eps)
    return gradient.flatten(2).sum(-1) if gradient.dim() > 2 else gradient

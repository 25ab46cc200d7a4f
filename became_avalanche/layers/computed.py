"""Weights that are computed from other parameters (``torch.nn.utils.parametrize``), as under weight normalisation."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from became_avalanche.layers.layer import Layer


def originals(layer: Layer) -> list[nn.Parameter]:
    """The parameters from which the weight of ``layer`` is computed, the one of its own shape first.

    None if the weight cannot be set to any value through them. Then nothing can be promised: whatever projection has
    made of the weight, the parameters cannot follow. Under weight normalisation they can, under spectral normalisation
    they cannot.
    """
    rule = layer.rule
    if not isinstance(rule, ParametrizationList):
        return []
    parameters = list(rule.parameters())
    same_shape = [parameter for parameter in parameters if parameter.shape == layer.weight.shape]
    if not same_shape or not all(parameter.requires_grad for parameter in parameters):
        return []
    if not _can_be_undone(rule, layer.weight.detach()):
        return []
    first = same_shape[-1]
    return [first, *(parameter for parameter in parameters if parameter is not first)]


@torch.no_grad()
def _can_be_undone(rule: ParametrizationList, weight: Tensor) -> bool:
    """Whether ``rule`` computes any wanted weight from what its ``right_inverse`` makes of it."""
    rule = deepcopy(rule).eval()
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(weight)
    wanted = weight + 0.1 * weight.abs().mean() * noise
    try:
        rule.right_inverse(wanted.clone())
        return torch.allclose(rule(), wanted, rtol=1e-4, atol=1e-4 * float(weight.abs().mean()))
    except (RuntimeError, ValueError, NotImplementedError):
        return False

"""Weights that are computed from other parameters (``torch.nn.utils.parametrize``), for example by weight norm."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from became_avalanche.layers.layer import Layer


def originals(layer: Layer) -> list[nn.Parameter]:
    """Return the parameters from which the weight of ``layer`` is computed, the one with the weight's shape first.

    Return an empty list if the weight cannot be protected: only some of these parameters train, or they cannot produce
    every weight, so that there may be none that give the projected weight. Weight normalisation can produce every
    weight, spectral normalisation cannot.
    """
    rule = layer.rule
    if not isinstance(rule, ParametrizationList):
        return []
    parameters = list(rule.parameters())
    same_shape = [parameter for parameter in parameters if parameter.shape == layer.weight.shape]
    if not same_shape or len({parameter.requires_grad for parameter in parameters}) > 1:
        return []
    if not _is_invertible(rule, layer.weight.detach()):
        return []
    first = same_shape[-1]
    return [first, *(parameter for parameter in parameters if parameter is not first)]


@torch.no_grad()
def _is_invertible(rule: ParametrizationList, weight: Tensor) -> bool:
    """Whether ``right_inverse`` finds parameters that give a wanted weight, tested on one near ``weight``."""
    rule = deepcopy(rule).eval()
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)).to(weight)
    wanted = weight + 0.1 * weight.abs().mean() * noise
    try:
        rule.right_inverse(wanted.clone())
        return torch.allclose(rule(), wanted, rtol=1e-4, atol=1e-4 * float(weight.abs().mean()))
    except (RuntimeError, ValueError, NotImplementedError):
        return False

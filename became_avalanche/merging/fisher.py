"""Diagonal Fisher information."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor


def batched_fisher(losses: Iterable[tuple[Tensor, int]], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The ``batched`` estimator: mean over batches of ``B g²``, with ``g`` the gradient of the batch's mean loss.

    It works with every model, also where the samples of a batch are coupled (normalisation with batch statistics).

    :param losses: the mean negative log-likelihood of each batch, and the number of samples in it; consumed lazily.
    :param parameters: the parameters by name. One that a loss does not depend on has no gradient there.
    """
    fisher = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    batches = 0
    for loss, size in losses:
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for diagonal, gradient in zip(fisher.values(), gradients, strict=True):
            if gradient is not None:
                diagonal.addcmul_(gradient, gradient, value=size)  # diagonal of Eq. 19
        batches += 1
    if batches == 0:
        raise ValueError("the Fisher information of no data is not defined: the experience has no samples")
    return {name: diagonal / batches for name, diagonal in fisher.items()}


def accumulate(precision: Mapping[str, Tensor], fisher: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``Λ_t = Λ_{t-1} + F_t`` (Eq. 18). A parameter is keyed by name: new ones start at zero, grown ones are padded."""
    return {name: fit(precision.get(name), diagonal) + diagonal for name, diagonal in fisher.items()} | {
        name: old for name, old in precision.items() if name not in fisher
    }


def fit(old: Tensor | None, like: Tensor) -> Tensor:
    """``old`` in the shape of ``like``: zeros where it has nothing to say (a new parameter, new units of a head)."""
    result = torch.zeros_like(like)
    if old is not None:
        result[tuple(slice(size) for size in old.shape)] = old.to(like)
    return result

"""Diagonal Fisher information: six estimators of it, and its sum over tasks.

Names follow van de Ven, "On the Computation of the Fisher Information in Continual Learning" (ICLR blog track 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from became_avalanche.merging.persample import recorded_calls, refuse_unrecorded, squared_gradients

NO_DATA = "the Fisher information of no data is not defined: the experience has no samples"


class Batch(NamedTuple):
    """A forward pass."""

    loss: Tensor
    """Mean over the batch, as in training."""
    logits: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Fisher:
    """An estimator of the diagonal of the Fisher information.

    - ``batched``: mean over batches of ``B g²``, with ``g`` the gradient of the batch's mean loss. It works with every
      model, also where the samples of a batch are coupled (normalisation with batch statistics).
    - ``batched-sampled``: the same at labels drawn from the model. The gradients of single samples are then zero in the
      mean, so that for independent samples the expectation is that of ``exact``, and what is left of the loss's own
      gradient, which ``batched`` counts B times, does not count.
    - ``batched-argmax``: the same at the labels that the model finds most likely.
    - ``empirical``: mean over samples of ``g²``, with ``g`` the gradient of ``−log p(y|x)`` at the true label.
    - ``sampled``: the same at a label drawn from the model.
    - ``exact``: the expectation of that over all labels, as the model weighs them.
    """

    name: str = "batched"
    n_samples: int | None = None
    """Training samples to look at, drawn without replacement; None for all."""
    reduction: Literal["mean", "sum", "batches"] = "mean"
    """``mean`` and ``sum`` are over samples. The sum weighs tasks by their number of samples, as exact Bayes would.
    ``batches`` is for batched estimators: the mean over batches of ``g²``, each batch weighed by its size, that is
    ``Σ B g² / n``. Where all batches have the same size, it is ``mean`` divided by it, and λ is the same."""
    mode: Literal["eval", "train"] = "eval"
    """Mode of the model. In train mode dropout is on, and normalisation uses the statistics of the batch."""
    shuffle: bool = True
    """Whether batches are drawn at random, or made of the data in their order."""

    def __post_init__(self) -> None:
        if self.name not in ESTIMATORS:
            raise ValueError(f"unknown Fisher estimator {self.name!r}; choose one of: {', '.join(ESTIMATORS)}")
        if self.reduction not in ("mean", "sum", "batches"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'batches'; got {self.reduction!r}")
        if self.reduction == "batches" and not self.name.startswith("batched"):
            raise ValueError(f"reduction='batches' needs an estimator of batches, such as 'batched'; got {self.name!r}")
        if self.mode not in ("eval", "train"):
            raise ValueError(f"mode must be 'eval' or 'train'; got {self.mode!r}")
        if self.n_samples is not None and self.n_samples < 1:
            raise ValueError(f"n_samples must be at least 1, or None for all training samples; got {self.n_samples}")

    def __call__(
        self, batches: Iterable[Batch], model: nn.Module, parameters: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The diagonal, by parameter name.

        :param batches: forward passes of ``model``; consumed lazily.
        :param model: the model.
        :param parameters: parameters of the model by name. One that a loss does not depend on has no gradient there.
        """
        counted = _Counted(batches)
        fisher = ESTIMATORS[self.name](counted, model, parameters)
        weight = {"mean": 1, "sum": counted.samples, "batches": counted.batches / counted.samples}[self.reduction]
        return {name: weight * diagonal for name, diagonal in fisher.items()}


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
                gradient = gradient.to_dense()  # that of an Embedding(sparse=True) is not
                diagonal.addcmul_(gradient, gradient, value=size)  # diagonal of Eq. 19
        batches += 1
    if batches == 0:
        raise ValueError(NO_DATA)
    return {name: diagonal / batches for name, diagonal in fisher.items()}


def _per_sample(
    batches: Iterable[Batch],
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    likelihoods: Callable[[Tensor, Tensor], list[Tensor]],
) -> dict[str, Tensor]:
    """Mean over samples of the squared gradients of each of ``likelihoods(log p, labels)``, sums over the batch."""
    fisher = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    samples = 0
    with recorded_calls(model, parameters) as calls:
        for _, logits, labels in batches:
            losses = likelihoods(_log_p(logits, labels), labels)
            refuse_unrecorded(calls, losses[0], parameters)
            for loss in losses:
                for name, squares in squared_gradients(calls, loss, parameters).items():
                    fisher[name] += squares  # diagonal of Eq. 19
            samples += len(labels)
            calls.clear()
    if samples == 0:
        raise ValueError(NO_DATA)
    return {name: diagonal / samples for name, diagonal in fisher.items()}


def are_class_logits(logits: Tensor, labels: Tensor) -> bool:
    """Whether these are the logits of two or more classes for each sample, and one label for each sample."""
    is_matrix = logits.dim() == 2 and logits.shape[1] > 1
    return is_matrix and not labels.is_floating_point() and labels.shape == logits.shape[:1]


def _log_p(logits: Tensor, labels: Tensor) -> Tensor:
    """The logarithm of the probability of each class."""
    if not are_class_logits(logits, labels):
        raise ValueError(
            "this estimator of the Fisher information needs one row of class logits and one class label per sample, "
            f"but the model's outputs have the shape {tuple(logits.shape)} and the labels {tuple(labels.shape)} of "
            f"{labels.dtype}; use fisher='batched', which works with every loss"
        )
    return logits.log_softmax(-1)


def _true(log_p: Tensor, labels: Tensor) -> list[Tensor]:
    return [-log_p.gather(-1, labels.unsqueeze(-1)).sum()]


def _sampled(log_p: Tensor, labels: Tensor) -> list[Tensor]:
    return _true(log_p, torch.multinomial(log_p.detach().exp(), 1)[:, 0])


def _all(log_p: Tensor, labels: Tensor) -> list[Tensor]:
    root = (log_p.detach() / 2).exp()  # Σ_c p_c g(c)² = Σ_c (√p_c g(c))²
    return [-(weight * of_class).sum() for weight, of_class in zip(root.mT, log_p.mT, strict=True) if weight.any()]


def _argmax(log_p: Tensor, labels: Tensor) -> list[Tensor]:
    return _true(log_p, log_p.argmax(-1))


def _batched_at(
    batches: Iterable[Batch],
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    likelihoods: Callable[[Tensor, Tensor], list[Tensor]],
) -> dict[str, Tensor]:
    """The ``batched`` estimator at other labels than the true ones."""
    totals = ((likelihoods(_log_p(logits, labels), labels)[0], len(labels)) for _, logits, labels in batches)
    return batched_fisher(((total / size, size) for total, size in totals), parameters)


ESTIMATORS: dict[str, Callable[[Iterable[Batch], nn.Module, Mapping[str, Tensor]], dict[str, Tensor]]] = {
    "batched": lambda batches, model, parameters: batched_fisher(
        ((batch.loss, len(batch.labels)) for batch in batches), parameters
    ),
    "batched-sampled": partial(_batched_at, likelihoods=_sampled),
    "batched-argmax": partial(_batched_at, likelihoods=_argmax),
    "empirical": partial(_per_sample, likelihoods=_true),
    "sampled": partial(_per_sample, likelihoods=_sampled),
    "exact": partial(_per_sample, likelihoods=_all),
}


class _Counted:
    """Batches, with a count of those that went by and of their samples."""

    def __init__(self, source: Iterable[Batch]) -> None:
        self.source, self.batches, self.samples = source, 0, 0

    def __iter__(self) -> Iterator[Batch]:
        for batch in self.source:
            self.batches += 1
            self.samples += len(batch.labels)
            yield batch


def curvature_along(
    logits_at: Callable[[dict[str, Tensor]], Tensor], theta: Mapping[str, Tensor], delta: Mapping[str, Tensor]
) -> Tensor:
    """``Δᵀ F Δ`` of each sample with the whole Fisher information, of which the estimators are the diagonal.

        jᵀ (diag(p) − p pᵀ) j,    j = ∂ logits / ∂θ · Δ,

    the variance of j under the labels as the model weighs them. One pass in forward mode. It is for diagnosis: λ is a
    ratio of two diagonal terms, and only equally wrong terms make a right ratio.

    :param logits_at: logits of a batch as a function of the parameters by name.
    :param theta: the parameters.
    :param delta: Δ, for the same names.
    """
    tangent = {name: delta[name].to(parameter) for name, parameter in theta.items()}
    logits, j = torch.func.jvp(logits_at, (dict(theta),), (tangent,))[:2]
    p = logits.softmax(-1)
    mean = (p * j).sum(-1, keepdim=True)
    variance: Tensor = (p * (j - mean).square()).sum(-1)
    return variance


def accumulate(precision: Mapping[str, Tensor], fisher: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``Λ_t = Λ_{t-1} + F_t`` (Eq. 18), by parameter name. Where shapes differ, the smaller is padded with zeros."""
    total = dict(precision)
    for name, diagonal in fisher.items():
        old = precision.get(name, diagonal)
        both = diagonal.new_empty([max(sizes) for sizes in zip(old.shape, diagonal.shape, strict=True)])
        total[name] = zero_padded(precision.get(name), both) + zero_padded(diagonal, both)
    return total


def zero_padded(old: Tensor | None, like: Tensor) -> Tensor:
    """What ``old`` has of the shape of ``like``, and zeros elsewhere: for a head that has grown, or a new parameter."""
    result = torch.zeros_like(like)
    if old is not None:
        common = tuple(slice(min(sizes)) for sizes in zip(old.shape, like.shape, strict=True))
        result[common] = old[common].to(like)
    return result

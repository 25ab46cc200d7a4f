"""Diagonal Fisher information: six estimators, and the sum over tasks.

Names follow van de Ven, "On the Computation of the Fisher Information in Continual Learning" (ICLR blog track 2025).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from became_avalanche.merging.persample import recorded_calls, refuse_other_axes, refuse_unrecorded, squared_gradients

NO_DATA = "the Fisher information cannot be estimated: the experience has no samples"


class Batch(NamedTuple):
    """The result of a forward pass."""

    loss: Tensor
    """Mean loss over the batch, as in training."""
    logits: Tensor
    labels: Tensor


@dataclass(frozen=True)
class Fisher:
    """An estimator of the diagonal of the Fisher information matrix.

    - ``batched``: mean over batches of ``B g²``, with ``B`` the batch size and ``g`` the gradient of the batch's mean
      loss. Works with every model and loss, even if the samples of a batch are coupled (normalisation with batch
      statistics).
    - ``batched-sampled``: like ``batched``, with labels drawn from the model's predictions. Then per-sample gradients
      have mean zero. So, for independent samples, the expectation equals ``exact``, whereas ``batched`` also counts the
      square of the mean gradient, B times.
    - ``batched-argmax``: like ``batched``, with the most likely labels under the model's predictions.
    - ``empirical``: mean over samples of ``g²``, with ``g`` the gradient of ``−log p(y|x)`` at the true label.
    - ``sampled``: like ``empirical``, with labels drawn from the model's predictions.
    - ``exact``: like ``empirical``, with the expectation over all labels under the model's predictions.

    ``BecameMergePlugin(fisher=...)`` takes a name or an estimator. It can also be called directly:

    >>> import torch
    >>> from became_avalanche import Fisher
    >>> from became_avalanche.merging.fisher import Batch
    >>> model = torch.nn.Linear(2, 2, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)  # both classes have probability 1/2
    >>> def forward(x, y):
    ...     logits = model(x)
    ...     return Batch(torch.nn.functional.cross_entropy(logits, y), logits, y)
    >>> data = [(torch.tensor([[1.0, 2.0]]), torch.tensor([0]))]
    >>> fisher = Fisher("exact")((forward(x, y) for x, y in data), model, dict(model.named_parameters()))
    >>> fisher["weight"].round(decimals=3).tolist()  # p (1 - p) x²
    [[0.25, 1.0], [0.25, 1.0]]
    """

    name: str = "batched"
    """One of the names above."""
    n_samples: int | None = None
    """Number of training samples to use, drawn without replacement; None for all."""
    reduction: Literal["mean", "sum", "batches"] = "mean"
    """``mean`` and ``sum`` are over samples. A sum weights each task by its number of samples, as exact Bayesian
    inference would. ``batches`` is for batched estimators: the mean over batches of ``g²``, weighted by batch size,
    which is ``Σ B g² / n``. If all batches have the same size, this is ``mean`` divided by that size, so λ is the
    same."""
    mode: Literal["train", "eval"] | None = None
    """Mode of the model. In train mode dropout is on, and normalisation uses the statistics of the batch. None: train
    mode for batched estimators, because the loss whose curvature is estimated is the one in training; eval mode for the
    others, whose samples must not influence each other."""
    shuffle: bool = True
    """Whether batches are drawn at random. If not, they follow the order of the data."""

    def __post_init__(self) -> None:
        if self.name not in ESTIMATORS:
            raise ValueError(f"unknown Fisher estimator {self.name!r}; choose one of: {', '.join(ESTIMATORS)}")
        if self.reduction not in ("mean", "sum", "batches"):
            raise ValueError(f"reduction must be 'mean', 'sum' or 'batches'; got {self.reduction!r}")
        if self.reduction == "batches" and not self.name.startswith("batched"):
            raise ValueError(f"reduction='batches' needs a batched estimator, such as 'batched'; got {self.name!r}")
        if self.mode is None:
            object.__setattr__(self, "mode", "train" if self.name.startswith("batched") else "eval")
        if self.mode not in ("train", "eval"):
            raise ValueError(f"mode must be 'train', 'eval' or None; got {self.mode!r}")
        if self.n_samples is not None and self.n_samples < 1:
            raise ValueError(f"n_samples must be at least 1, or None for all training samples; got {self.n_samples}")

    def __call__(
        self, batches: Iterable[Batch], model: nn.Module, parameters: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Return the diagonal, by parameter name.

        :param batches: forward passes of ``model``, consumed one by one. Except for batched estimators, each pass must
            run only when it is asked for, as in a generator: the calls of modules are recorded meanwhile.
        :param model: the model.
        :param parameters: parameters of the model by name. If a loss does not depend on one, its gradient counts as 0.
        """
        counted = _Counted(batches)
        fisher = ESTIMATORS[self.name](counted, model, parameters)
        weight = {"mean": 1, "sum": counted.samples, "batches": counted.batches / counted.samples}[self.reduction]
        return {name: weight * diagonal for name, diagonal in fisher.items()}


def batched_fisher(losses: Iterable[tuple[Tensor, int]], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The ``batched`` estimator: mean over batches of ``B g²``, with ``g`` the gradient of the batch's mean loss.

    Works with every model, even if the samples of a batch are coupled (normalisation with batch statistics).

    :param losses: the mean negative log-likelihood of each batch, and the number of samples in it; consumed one by one.
    :param parameters: the parameters by name. If a loss does not depend on one, its gradient counts as 0.
    """
    fisher = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    batches = 0
    for loss, size in losses:
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        for diagonal, gradient in zip(fisher.values(), gradients, strict=True):
            if gradient is not None:
                gradient = gradient.to_dense()  # Embedding(sparse=True) has a sparse one
                diagonal.addcmul_(gradient, gradient, value=size)  # diagonal of Eq. 19
        batches += 1
    if batches == 0:
        raise ValueError(NO_DATA)
    return {name: diagonal / batches for name, diagonal in fisher.items()}


def _per_sample(
    batches: Iterable[Batch],
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    losses_at: Callable[[Tensor, Tensor], list[Tensor]],
) -> dict[str, Tensor]:
    """Mean over samples of squared per-sample gradients, added up over the losses ``losses_at(log p, labels)``.

    Each of these losses is a sum over the samples of a batch.
    """
    fisher = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
    samples = 0
    with recorded_calls(model, parameters) as calls:
        for _, logits, labels in batches:
            losses = losses_at(_log_p(logits, labels), labels)
            refuse_unrecorded(calls, losses[0], parameters)
            refuse_other_axes(calls, len(labels))
            for loss in losses:
                for name, squares in squared_gradients(calls, loss, parameters).items():
                    fisher[name] += squares  # diagonal of Eq. 19
            samples += len(labels)
            calls.clear()
    if samples == 0:
        raise ValueError(NO_DATA)
    return {name: diagonal / samples for name, diagonal in fisher.items()}


def are_class_logits(logits: Tensor, labels: Tensor) -> bool:
    """Whether each sample has the logits of two or more classes and one class label."""
    is_matrix = logits.dim() == 2 and logits.shape[1] > 1
    return is_matrix and not labels.is_floating_point() and labels.shape == logits.shape[:1]


def _log_p(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each class."""
    if not are_class_logits(logits, labels):
        raise ValueError(
            "this estimator of the Fisher information needs one row of class logits and one class label per sample, "
            f"but the model's outputs have the shape {tuple(logits.shape)} and the labels {tuple(labels.shape)} of "
            f"{labels.dtype}; use fisher='batched', which works with every loss"
        )
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < logits.shape[1]:
        raise ValueError(
            f"this estimator of the Fisher information needs class labels from 0 to {logits.shape[1] - 1}, but got "
            f"labels from {int(labels.min())} to {int(labels.max())}; use fisher='batched' if the loss ignores the "
            "others (ignore_index)"
        )
    return logits.log_softmax(-1)


def _at_true_labels(log_p: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the negative log-likelihood of the labels, as one sum over the batch."""
    return [-log_p.gather(-1, labels.unsqueeze(-1)).sum()]


def _at_sampled_labels(log_p: Tensor, labels: Tensor) -> list[Tensor]:
    return _at_true_labels(log_p, torch.multinomial(log_p.detach().exp(), 1)[:, 0])


def _at_all_labels(log_p: Tensor, labels: Tensor) -> list[Tensor]:
    """Return one loss per class, scaled so that the sum of squared gradients is the expectation over classes."""
    root = (log_p.detach() / 2).exp()  # Σ_c p_c g(c)² = Σ_c (√p_c g(c))²
    return [
        -(weight * log_p_of_class).sum()
        for weight, log_p_of_class in zip(root.mT, log_p.mT, strict=True)
        if weight.any()
    ]


def _at_argmax_labels(log_p: Tensor, labels: Tensor) -> list[Tensor]:
    return _at_true_labels(log_p, log_p.argmax(-1))


def _batched_at(
    batches: Iterable[Batch],
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    losses_at: Callable[[Tensor, Tensor], list[Tensor]],
) -> dict[str, Tensor]:
    """The ``batched`` estimator with labels other than the true ones."""
    totals = ((losses_at(_log_p(logits, labels), labels)[0], len(labels)) for _, logits, labels in batches)
    return batched_fisher(((total / size, size) for total, size in totals), parameters)


ESTIMATORS: dict[str, Callable[[Iterable[Batch], nn.Module, Mapping[str, Tensor]], dict[str, Tensor]]] = {
    "batched": lambda batches, model, parameters: batched_fisher(
        ((batch.loss, len(batch.labels)) for batch in batches), parameters
    ),
    "batched-sampled": partial(_batched_at, losses_at=_at_sampled_labels),
    "batched-argmax": partial(_batched_at, losses_at=_at_argmax_labels),
    "empirical": partial(_per_sample, losses_at=_at_true_labels),
    "sampled": partial(_per_sample, losses_at=_at_sampled_labels),
    "exact": partial(_per_sample, losses_at=_at_all_labels),
}


class _Counted:
    """Iterates over batches, and counts them and their samples."""

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
    """Return ``Δᵀ F Δ`` of each sample with the full Fisher matrix; the estimators above give only its diagonal.

    With the probabilities ``p`` of the labels under the model, it is

        jᵀ (diag(p) − p pᵀ) j,    j = ∂ logits / ∂θ · Δ,

    the variance of ``j`` over the labels. It takes one pass in forward mode. Use it for diagnosis only, not for λ: λ is
    a ratio of two terms, and errors of the diagonal cancel only if both terms have them.

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
    """Return ``Λ_t = Λ_{t-1} + F_t`` (Eq. 18), by parameter name. Where shapes differ, both are padded with zeros."""
    total = dict(precision)
    for name, diagonal in fisher.items():
        old = precision.get(name, diagonal)
        both = diagonal.new_empty([max(sizes) for sizes in zip(old.shape, diagonal.shape, strict=True)])
        total[name] = zero_padded(precision.get(name), both) + zero_padded(diagonal, both)
    return total


def zero_padded(old: Tensor | None, like: Tensor) -> Tensor:
    """Fit ``old`` to the shape of ``like`` by cropping and zero padding: for new parameters, and heads that grew."""
    result = torch.zeros_like(like)
    if old is not None:
        common = tuple(slice(min(sizes)) for sizes in zip(old.shape, like.shape, strict=True))
        result[common] = old[common].to(like)
    return result

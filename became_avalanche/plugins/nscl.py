"""Adam-NSCL: training in the null space of feature covariance (Wang et al., CVPR 2021)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor, nn

from became_avalanche.layers.model import map_layers
from became_avalanche.merging.fisher import are_class_logits, batched_fisher
from became_avalanche.plugins.covariance import CovariancePlugin
from became_avalanche.plugins.projection import ProjectionOptions, refuse_divergence, stored_like
from became_avalanche.strategy.heads import growing_heads
from became_avalanche.strategy.passes import data_pass
from became_avalanche.strategy.tasks import TaskPlugin, continues
from became_avalanche.subspace.basis import Projector, compact
from became_avalanche.subspace.inputs import InputMatrix

if TYPE_CHECKING:
    from typing_extensions import Unpack

FLOOR = 1e-7
"""Eigenvalues below this fraction of the largest are assumed to be zero: they are rounding errors."""


class NSCLPlugin(CovariancePlugin):
    """Adam-NSCL.

    ``C = A Aᵀ`` is the uncentred covariance of the inputs of all experiences so far. Its approximate null space is
    spanned by ``V₂``, the eigenvectors with eigenvalues up to ``a`` times the smallest one. Updates are projected into
    it: ``ΔW <- ΔW V₂ V₂ᵀ``. ``ΔW`` is the update of the optimizer under Adam, as published, and under any other
    optimizer except plain SGD. Under SGD the gradient is projected, which is equivalent.

    The parameters of normalisation layers are not projected. A penalty ``coefficient * Σ importance (θ − θ*)²`` keeps
    them near their old values, also while the projection is suspended. The importance is the mean of ``B g²`` over
    batches of size ``B``, where ``g`` is the gradient of the loss. For a classifier the loss is computed against the
    labels that the model predicts.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from became_avalanche import MultiHeadMLP, NSCLPlugin, split_digits
    >>> model, plugin = MultiHeadMLP(), NSCLPlugin(a=10)
    >>> optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    >>> strategy = Naive(model=model, optimizer=optimizer, train_mb_size=64, evaluator=None, plugins=[plugin])
    >>> _ = strategy.train(split_digits().train_stream[:2])
    >>> 0 < plugin.ranks()["features.1.weight"] < 64  # the other directions form the null space
    True
    """

    needs_loss = True
    freezes_normalisation = False
    STATE = (*CovariancePlugin.STATE, "normalisation")

    def __init__(
        self,
        a: float = 10,
        n_samples: int | None = None,
        *,
        coefficient: float = 100,
        reference: bool = False,
        **options: Unpack[ProjectionOptions],
    ) -> None:
        """Init.

        :param a: eigenvalues up to ``a`` times the smallest one count as zero, at least 1.
        :param n_samples: number of training samples per experience whose layer inputs enter the memory; None for all.
        :param coefficient: weight of the penalty on the parameters of normalisation layers.
        :param reference: follow the published code where it differs from its paper: the inputs are averaged over each
            batch first, updates are divided by the Frobenius norm of the projector, and eigenvalues have no floor.
        :param options: options of ``GradientProjectionPlugin``.
        """
        super().__init__(n_samples, **options)
        if not a >= 1:
            raise ValueError(f"a must be at least 1, because it multiplies the smallest eigenvalue; got {a}")
        if not coefficient >= 0:
            raise ValueError(f"coefficient must be at least 0; got {coefficient}")
        self.a = a
        self.coefficient = coefficient
        self.reference = reference
        self.normalisation: dict[str, dict[str, Tensor]] = {}
        """Importance and anchor ``θ*`` of each parameter of a normalisation layer, by parameter name."""
        self._penalties: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self._fully_null: list[str] = []

    def remembered(self) -> Collection[str]:
        """Return the names of the protected weights and of the normalisation parameters that have an importance."""
        return [*super().remembered(), *self.normalisation]

    def observe(self, strategy: SupervisedTemplate, num_workers: int) -> dict[str, InputMatrix]:
        """Return the inputs of each layer, or their means over batches with ``reference=True``."""
        if self.reference:
            return self.layer_inputs(strategy, strategy.train_mb_size, num_workers, batch_mean=True)
        return super().observe(strategy, num_workers)

    def protected(self, name: str) -> tuple[Tensor, Tensor | None]:
        eigenvalues, vectors = self.spectrum(name)
        return compact(vectors * ~self._is_null(eigenvalues, vectors)[..., : vectors.shape[-1]].unsqueeze(-2)), None

    def projector(self, name: str) -> Callable[[Tensor], Tensor]:
        basis, _ = self.protected(name)
        project = Projector.away_from(basis)
        if basis.shape[-1] == 0 and self.a < float("inf") and self.memory[name]["inputs"].any():
            self._fully_null.append(name)
        if not self.reference:
            return project
        eigenvalues, vectors = self.spectrum(name)
        norm = self._is_null(eigenvalues, vectors).sum(-1).sqrt().to(vectors)[..., None, None]  # ‖V₂ V₂ᵀ‖ of each group
        return lambda rows: project(rows) / norm

    def _is_null(self, eigenvalues: Tensor, vectors: Tensor) -> Tensor:
        """Return a mask of the eigenvalues that count as zero, padded to all d eigenvalues.

        If d is 1, as for each row of an embedding, there is no smaller eigenvalue to compare with. Then the eigenvalue
        counts as zero only if it is zero.
        """
        if vectors.shape[-2] == 1 and self.a < float("inf"):
            return F.pad(eigenvalues, (0, 1 - vectors.shape[-1])) == 0
        eigenvalues = F.pad(eigenvalues, (0, vectors.shape[-2] - vectors.shape[-1]))
        smallest, largest = eigenvalues[..., -1:], eigenvalues[..., :1]
        if not self.reference:
            smallest = torch.maximum(smallest, FLOOR * largest)
        return eigenvalues <= self.a * smallest if self.a < float("inf") else torch.ones_like(eigenvalues).bool()

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._fully_null = []
        super().before_training_exp(strategy, **kwargs)
        self._warn_of_full_null_spaces(strategy.model)
        self._load_penalties(strategy)

    def _warn_of_full_null_spaces(self, model: nn.Module) -> None:
        """Warn once about each weight whose null space is the full space, so that its updates are not projected."""
        trained = [name for name in self._fully_null if model.get_parameter(name).requires_grad]
        new = [name for name in trained if name not in self._warned]
        if new:
            self._warned.update(new)
            warnings.warn(
                f"{type(self).__name__} does not protect {', '.join(new)}: no eigenvalue of the covariance of the "
                f"inputs is above a = {self.a:g} times the smallest, so every direction counts as null space; choose a "
                "smaller a, or another method",
                stacklevel=3,
            )

    # ------------------------------------------------------------------------------------------------ normalisation

    def _load_penalties(self, strategy: SupervisedTemplate) -> None:
        """Collect the importance and the anchor of each normalisation parameter that trains."""
        parameters = dict(self._normalisation_parameters(strategy))
        for name in parameters.keys() & self.normalisation.keys():
            self.normalisation[name] = stored_like(self.normalisation[name], parameters[name])
        self._penalties = [
            (parameter, self.normalisation[name]["importance"], self.normalisation[name]["anchor"])
            for name, parameter in parameters.items()
            if name in self.normalisation
        ]

    def before_backward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        for parameter, importance, anchor in self._penalties:
            strategy.loss += self.coefficient * (importance * (parameter - anchor).square()).sum()

    def _normalisation_parameters(self, strategy: SupervisedTemplate) -> Iterator[tuple[str, nn.Parameter]]:
        parameters = dict(strategy.model.named_parameters())
        return ((name, parameters[name]) for name in self.layers.normalisation if parameters[name].requires_grad)

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if continues(kwargs):
            return
        parameters = dict(self._normalisation_parameters(strategy))
        with self.timed("memory"):
            importances = self._importances(strategy, parameters, kwargs.get("num_workers", 0))
        super().after_training_exp(strategy, **kwargs)
        for name, importance in importances.items():
            self._add_penalty(name, importance, parameters[name].detach().clone())

    def _importances(
        self, strategy: SupervisedTemplate, parameters: dict[str, nn.Parameter], num_workers: int
    ) -> dict[str, Tensor]:
        if not parameters:
            return {}
        dataset = strategy.experience.dataset
        with data_pass(strategy, dataset, strategy.train_mb_size, None, num_workers) as batches:
            importances = batched_fisher(((_loss_of_predictions(strategy), size) for size in batches), parameters)
        for name, importance in importances.items():
            refuse_divergence(f"the importance of {name}", importance)
        return importances

    def _add_penalty(self, name: str, importance: Tensor, anchor: Tensor) -> None:
        """Add the penalty of this task.

        Up to a constant, the penalties of all tasks add up to one penalty. Its importance is the sum of all
        importances, and its anchor is the mean of all anchors, weighted by importance.
        """
        if name in self.normalisation:
            old = self.normalisation[name]
            total = old["importance"] + importance
            share = (importance / total).nan_to_num(1.0)  # 0 / 0: without importance, any anchor will do
            anchor, importance = torch.lerp(old["anchor"], anchor, share), total
        self.normalisation[name] = {"importance": importance, "anchor": anchor}


def _loss_of_predictions(strategy: SupervisedTemplate) -> Tensor:
    """Return the loss of the current batch against the predicted labels, or the true ones if it is no classifier."""
    if are_class_logits(strategy.mb_output, strategy.mb_y):
        strategy.mbatch[1] = strategy.mb_output.argmax(-1)
    loss: Tensor = strategy.criterion()
    return loss


def nscl_groups(
    model: nn.Module,
    *,
    lr: float = 1e-4,
    head_lr: float = 1e-3,
    normalisation_lr: float = 5e-4,
    weight_decay: float = 5e-5,
) -> list[dict[str, Any]]:
    """Return the parameter groups of the Adam-NSCL recipe: backbone, heads and normalisation, without empty groups.

    :param model: a model with task heads of Avalanche.
    :param lr: learning rate of the backbone in the first experience; use ``LaterTaskLR`` for later experiences.
    :param head_lr: learning rate of the heads, which have no weight decay.
    :param normalisation_lr: learning rate of the normalisation layers.
    :param weight_decay: weight decay of backbone and normalisation.

    >>> import torch
    >>> from became_avalanche import MultiHeadMLP, nscl_groups
    >>> optimizer = torch.optim.Adam(nscl_groups(MultiHeadMLP(), lr=1e-4, head_lr=1e-3))
    >>> [group["lr"] for group in optimizer.param_groups]  # this network has no normalisation
    [0.0001, 0.001]
    """
    heads = [parameter for head in growing_heads(model).values() for parameter in head.parameters()]
    names = set(map_layers(model).normalisation)
    normalisation = [parameter for name, parameter in model.named_parameters() if name in names]
    outside = {id(parameter) for parameter in heads + normalisation}
    backbone = [parameter for parameter in model.parameters() if id(parameter) not in outside]
    groups = [
        {"params": backbone, "lr": lr, "weight_decay": weight_decay},
        {"params": heads, "lr": head_lr, "weight_decay": 0.0},
        {"params": normalisation, "lr": normalisation_lr, "weight_decay": weight_decay},
    ]
    return [group for group in groups if group["params"]]


class LaterTaskLR(TaskPlugin):
    """Sets the learning rate of one parameter group from the second experience on.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from became_avalanche import LaterTaskLR, MultiHeadMLP, nscl_groups, split_digits
    >>> model, plugin = MultiHeadMLP(), LaterTaskLR(5e-5)
    >>> optimizer = torch.optim.Adam(nscl_groups(model, lr=1e-4))
    >>> strategy = Naive(model=model, optimizer=optimizer, train_mb_size=64, evaluator=None, plugins=[plugin])
    >>> for experience in split_digits().train_stream[:2]:
    ...     _ = strategy.train(experience)
    ...     print(optimizer.param_groups[0]["lr"])
    0.0001
    5e-05
    """

    STATE = ("experiences",)

    def __init__(self, rate: float = 5e-5, group: int = 0) -> None:
        """Init.

        :param rate: the learning rate.
        :param group: index of the parameter group in the optimizer. In ``nscl_groups`` 0 is the backbone.
        """
        super().__init__()
        if not rate > 0:
            raise ValueError(f"rate must be above 0; got {rate}")
        self.rate = rate
        self.group = group
        self.experiences = 0

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if self.experiences > 0:
            strategy.optimizer.param_groups[self.group]["lr"] = self.rate

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self.experiences += not continues(kwargs)

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
"""Eigenvalues below this fraction of the largest are taken for zero: what differs below is rounding."""


class NSCLPlugin(CovariancePlugin):
    """Adam-NSCL.

    ``C = A Aᵀ`` is made of the inputs of all experiences so far. Eigenvectors with eigenvalues up to ``a`` times the
    smallest one, ``V₂``, are its approximate null space, and updates are projected into it: ``ΔW <- ΔW V₂ V₂ᵀ``. Under
    Adam, as published, and any other optimizer but plain SGD, that is the update of the optimizer.

    The parameters of normalisation layers stay free and are held by a penalty ``coefficient * Σ importance (θ − θ*)²``
    instead, which is at work when the projection is suspended, too. The importance is the mean over batches of
    ``B g²`` with ``g`` the gradient of the loss against the labels that the model predicts, where it is a classifier.
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

        :param a: how many times the smallest eigenvalue still counts as zero.
        :param n_samples: training samples of each experience whose layer inputs enter the memory; None for all.
        :param coefficient: strength of the penalty on the parameters of normalisation layers.
        :param reference: do as the published code does where it differs from its paper: the inputs are averaged over
            each batch first, updates are divided by the Frobenius norm of the projector, and eigenvalues have no
            floor.
        :param options: those of ``GradientProjectionPlugin``.
        """
        super().__init__(n_samples, **options)
        if not a >= 1:
            raise ValueError(f"a is a multiple of the smallest eigenvalue, so it must be at least 1; got {a}")
        if not coefficient >= 0:
            raise ValueError(f"coefficient must be at least 0; got {coefficient}")
        self.a = a
        self.coefficient = coefficient
        self.reference = reference
        self.normalisation: dict[str, dict[str, Tensor]] = {}
        """Importance and anchor of each parameter of a normalisation layer, by its name."""
        self._held: list[tuple[nn.Parameter, Tensor, Tensor]] = []
        self._all_null: list[str] = []

    def remembered(self) -> Collection[str]:
        """Protected weights, and the parameters of normalisation layers that have an importance."""
        return [*super().remembered(), *self.normalisation]

    def observe(self, strategy: SupervisedTemplate, num_workers: int) -> dict[str, InputMatrix]:
        """The inputs of each layer, or their means over batches."""
        if self.reference:
            return self.layer_inputs(strategy, strategy.train_mb_size, num_workers, batch_mean=True)
        return super().observe(strategy, num_workers)

    def protected(self, name: str) -> tuple[Tensor, Tensor | None]:
        eigenvalues, vectors = self.spectrum(name)
        return compact(vectors * ~self._null(eigenvalues, vectors)[..., : vectors.shape[-1]].unsqueeze(-2)), None

    def projector(self, name: str) -> Callable[[Tensor], Tensor]:
        basis, _ = self.protected(name)
        project = Projector.away_from(basis)
        if basis.shape[-1] == 0 and self.a < float("inf") and self.memory[name]["inputs"].any():
            self._all_null.append(name)
        if not self.reference:
            return project
        eigenvalues, vectors = self.spectrum(name)
        norm = self._null(eigenvalues, vectors).sum(-1).sqrt().to(vectors)[..., None, None]  # ‖V₂ V₂ᵀ‖ of each group
        return lambda rows: project(rows) / norm

    def _null(self, eigenvalues: Tensor, vectors: Tensor) -> Tensor:
        """Which eigenvalues, padded with zeros to all d of them, count as zero.

        A single input, as that of a row of an embedding, has no smaller one to be compared with: it counts as it is.
        """
        if vectors.shape[-2] == 1 and self.a < float("inf"):
            return F.pad(eigenvalues, (0, 1 - vectors.shape[-1])) == 0
        eigenvalues = F.pad(eigenvalues, (0, vectors.shape[-2] - vectors.shape[-1]))
        smallest, largest = eigenvalues[..., -1:], eigenvalues[..., :1]
        if not self.reference:
            smallest = torch.maximum(smallest, FLOOR * largest)
        return eigenvalues <= self.a * smallest if self.a < float("inf") else torch.ones_like(eigenvalues).bool()

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._all_null = []
        super().before_training_exp(strategy, **kwargs)
        self._warn_of_even_inputs(strategy.model)
        self._hold_normalisation(strategy)

    def _warn_of_even_inputs(self, model: nn.Module) -> None:
        """Say once of each weight that the projection leaves its updates as they are."""
        trained = [name for name in self._all_null if model.get_parameter(name).requires_grad]
        fresh = [name for name in trained if name not in self._warned]
        if fresh:
            self._warned.update(fresh)
            warnings.warn(
                f"{type(self).__name__} does not protect {', '.join(fresh)}: the inputs fill their space so evenly "
                f"that no eigenvalue is above a = {self.a:g} times the smallest, and every direction counts as null; "
                "choose a smaller a, or another method",
                stacklevel=3,
            )

    # ------------------------------------------------------------------------------------------------ normalisation

    def _hold_normalisation(self, strategy: SupervisedTemplate) -> None:
        parameters = dict(self._normalisation(strategy))
        for name in parameters.keys() & self.normalisation.keys():
            self.normalisation[name] = stored_like(self.normalisation[name], parameters[name])
        self._held = [
            (parameter, self.normalisation[name]["importance"], self.normalisation[name]["anchor"])
            for name, parameter in parameters.items()
            if name in self.normalisation
        ]

    def before_backward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        for parameter, importance, anchor in self._held:
            strategy.loss += self.coefficient * (importance * (parameter - anchor).square()).sum()

    def _normalisation(self, strategy: SupervisedTemplate) -> Iterator[tuple[str, nn.Parameter]]:
        parameters = dict(strategy.model.named_parameters())
        return ((name, parameters[name]) for name in self.layers.normalisation if parameters[name].requires_grad)

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if continues(kwargs):
            return
        parameters = dict(self._normalisation(strategy))
        with self.timed("memory"):
            importances = self._importances(strategy, parameters, kwargs.get("num_workers", 0))
        super().after_training_exp(strategy, **kwargs)
        for name, importance in importances.items():
            self._hold(name, importance, parameters[name].detach().clone())

    def _importances(
        self, strategy: SupervisedTemplate, parameters: dict[str, nn.Parameter], num_workers: int
    ) -> dict[str, Tensor]:
        if not parameters:
            return {}
        dataset = strategy.experience.dataset
        with data_pass(strategy, dataset, strategy.train_mb_size, None, num_workers) as batches:
            importances = batched_fisher(((_loss_of_predictions(strategy), size) for size in batches), parameters)
        for name, importance in importances.items():
            refuse_divergence(f"what was observed of {name}", importance)
        return importances

    def _hold(self, name: str, importance: Tensor, anchor: Tensor) -> None:
        """Add this task's term: the sum of all terms is one with the sum of importances at their mean anchor."""
        if name in self.normalisation:
            old = self.normalisation[name]
            total = old["importance"] + importance
            share = (importance / total).nan_to_num(1.0)  # where neither matters, the anchor does not either
            anchor, importance = torch.lerp(old["anchor"], anchor, share), total
        self.normalisation[name] = {"importance": importance, "anchor": anchor}


def _loss_of_predictions(strategy: SupervisedTemplate) -> Tensor:
    """The loss of the current batch against the labels that the model predicts; the true ones if it predicts none."""
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
    """The parameter groups of the Adam-NSCL recipe, for an optimizer: backbone, heads and normalisation, in this order.

    :param model: a model with task heads of Avalanche.
    :param lr: learning rate of the backbone in the first experience; see ``LaterTaskLR`` for the others.
    :param head_lr: learning rate of the heads, which have no weight decay.
    :param normalisation_lr: learning rate of the normalisation layers.
    :param weight_decay: weight decay of backbone and normalisation.
    """
    heads = [parameter for head in growing_heads(model).values() for parameter in head.parameters()]
    names = set(map_layers(model).normalisation)
    normalisation = [parameter for name, parameter in model.named_parameters() if name in names]
    apart = {id(parameter) for parameter in heads + normalisation}
    backbone = [parameter for parameter in model.parameters() if id(parameter) not in apart]
    groups = [
        {"params": backbone, "lr": lr, "weight_decay": weight_decay},
        {"params": heads, "lr": head_lr, "weight_decay": 0.0},
        {"params": normalisation, "lr": normalisation_lr, "weight_decay": weight_decay},
    ]
    return [group for group in groups if group["params"]]


class LaterTaskLR(TaskPlugin):
    """Sets the learning rate of one parameter group from the second experience on."""

    STATE = ("experiences",)

    def __init__(self, rate: float = 5e-5, group: int = 0) -> None:
        """Init.

        :param rate: the learning rate.
        :param group: index of the parameter group in the optimizer; 0 is the backbone in ``nscl_groups``.
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

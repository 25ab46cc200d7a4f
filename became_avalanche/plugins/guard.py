"""Projects the gradients or updates of one protected weight during an experience."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from avalanche.core import BaseSGDPlugin
from avalanche.evaluation import PluginMetric
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.templates import SupervisedTemplate
from avalanche.training.templates.base_sgd import BaseSGDTemplate
from avalanche.training.templates.update_type import SGDUpdate
from torch import Tensor, nn

from became_avalanche.layers.layer import Layer
from became_avalanche.subspace.backward import ProjectedBackward
from became_avalanche.subspace.basis import Projector


@dataclass(frozen=True)
class Step:
    """Properties of an optimizer step that decide how guards project."""

    linear: bool
    """Whether this is a step of plain SGD, which is linear in the weights and in the current gradients."""
    momentum: bool
    """Whether any parameter group uses momentum."""
    fresh: bool
    """Whether the optimizer has no state from earlier steps."""
    decays: dict[int, float]
    """Weight decay of each parameter, by ``id(parameter)``."""
    groups: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Parameter group of each parameter, by ``id(parameter)``."""
    final: bool = True
    """Whether the optimizer uses the gradients as they are now."""

    @staticmethod
    def of(strategy: SupervisedTemplate, plugin: SupervisedPlugin) -> Step:
        """Return the properties of the next step of the strategy's optimizer."""
        optimizer = strategy.optimizer
        groups = optimizer.param_groups
        final = gradients_are_final(strategy, plugin)
        return Step(
            linear=type(optimizer) is torch.optim.SGD and not any(group["maximize"] for group in groups) and final,
            momentum=any(group.get("momentum", 0) for group in groups),
            fresh=not optimizer.state,
            decays={id(p): group.get("weight_decay", 0) for group in groups for p in group["params"]},
            groups={id(p): group for group in groups for p in group["params"]},
            final=final,
        )


class Guard:
    """Protects one weight, together with its bias if the bias is protected too.

    A frozen parameter is a weight that is protected in all directions.

    Under SGD the guard projects the gradient. SGD is linear, also with momentum and Nesterov momentum, so updates are
    projected if all gradients are. SGD adds weight decay ``c W`` to the gradient, so the guard subtracts the protected
    part of it beforehand:

        (G + c W) P  =  [G P − c (W − W P)]  +  c W,

    where the bracket is the gradient that the guard leaves, and SGD adds the last term. The protected part ``W − W P``
    does not move if ``P`` removes each direction completely or not at all. If ``P`` scales directions and there is
    weight decay, the guard projects the update instead.

    Under any other optimizer the guard projects the update.

    For a computed weight (weight normalisation) the guard projects the update of the weight, and then sets the
    parameters behind it so that they give the projected weight.

    In a large Linear layer the backward pass itself returns the projected gradient, which is much cheaper. To do so,
    the layer computes through ``ProjectedBackward`` between ``enter_forward`` and ``leave_forward``.
    """

    def __init__(
        self,
        name: str,
        parameters: list[nn.Parameter],
        project: Callable[[Tensor], Tensor],
        layers: Sequence[Layer] = (),
        outputs: Tensor | None = None,
    ) -> None:
        """Init.

        :param name: name of the weight, for messages.
        :param parameters: the weight, and the bias if it is protected together with the weight.
        :param project: function that projects rows (groups, out, d).
        :param layers: the layers that use the weight; empty for a frozen parameter.
        :param outputs: boolean mask of the outputs to protect; None for all.
        """
        self.name, self.parameters, self.project, self._outputs = name, parameters, project, outputs
        self._layout = layers[0] if layers else None
        if layers and isinstance(project, Projector) and len(parameters) == 1:
            self._layout, factor = layers[0].in_memory_order(project.factor)
            self.project = project = replace(project, factor=factor)
        self._computed = layers[0] if layers and layers[0].rule is not None else None
        self._layers: list[Any] = [layer.module for layer in layers if layer.takes_rows and layer.rule is None]
        self._backward: ProjectedBackward | None = None
        if self._layers and isinstance(project, Projector) and outputs is None:
            backward = ProjectedBackward(project, ones=len(parameters) > 1)
            self._backward = backward if backward.may_pay(self._layers[0]) else None
        self._patched: list[nn.Module] = []
        self._start: list[Tensor] = []
        self._protected_part: list[Tensor] = []
        self._momentum_is_projected = True
        self._part_at_start: list[Tensor] = []
        try:
            self._projected([parameter.detach() for parameter in parameters])
        except RuntimeError as error:
            raise ValueError(
                f"the memory of {name} does not fit its weight of shape {tuple(parameters[0].shape)}: the number of "
                "inputs of the layer has changed, or the memory comes from another model or another bias=... option"
            ) from error

    # ------------------------------------------------------------------------------------------------- forward pass

    @property
    def in_backward(self) -> bool:
        """Whether the backward pass may return the projected gradient."""
        return self._backward is not None

    def enter_forward(self, step: Step) -> None:
        """Replace the forward of large Linear layers by one whose backward pass returns the projected gradient."""
        back = self._backward
        if back is None or not self._projects_gradient(step) or _has_hooks(self.parameters):
            return
        back.uses.clear()
        for layer in self._layers:
            if "forward" not in vars(layer):  # otherwise somebody else has replaced it
                layer.forward = partial(back.forward, layer)
                self._patched.append(layer)

    def leave_forward(self) -> None:
        """Restore the forward of all layers."""
        while self._patched:
            del self._patched.pop().forward

    # -------------------------------------------------------------------------------------------------------- update

    def before_update(self, step: Step) -> None:
        """Project the gradients, or store the weights if the update is to be projected."""
        self._start = []
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if not any(parameter.requires_grad for parameter in self.parameters) or (not gradients and step.final):
            return
        if self._computed is not None:
            self._start = [self._computed.weight.detach().clone()]
            return
        incomplete = len(gradients) < len(self.parameters)  # or a closure will compute them
        if incomplete or not self._projects_gradient(step) or any(gradient.is_sparse for gradient in gradients):
            self._momentum_is_projected = False
            self._start = [parameter.detach().clone() for parameter in self.parameters]
            return
        self._project_gradients(gradients)
        decay = step.decays.get(id(self.parameters[0]), 0)
        if decay:
            if not self._protected_part:
                weights = [parameter.detach() for parameter in self.parameters]
                kept = self._projected(weights)
                self._protected_part = [weight - part for weight, part in zip(weights, kept, strict=True)]
            for gradient, part in zip(gradients, self._protected_part, strict=True):
                gradient.sub_(part, alpha=decay)

    def after_update(self) -> None:
        """Project the update if ``before_update`` has stored the weights."""
        if self._start and self._computed is not None:
            (start,), self._start = self._start, []
            (update,) = self._projected([self._computed.weight.detach() - start])
            self._computed.set_weight(start + update)
        elif self._start:
            updates = [parameter - start for parameter, start in zip(self.parameters, self._start, strict=True)]
            for parameter, start, update in zip(self.parameters, self._start, self._projected(updates), strict=True):
                torch.add(start, update, out=parameter)
            self._start = []

    def note_free_update(self) -> None:
        """Note that the optimizer makes an unprojected step, which stays in its momentum."""
        self._momentum_is_projected = False

    def start_epoch(self) -> None:
        """Drop the cached protected part: the weights may have been replaced between epochs."""
        self._protected_part = []

    # --------------------------------------------------------------------------------------------------------- check

    @torch.no_grad()
    def note_start(self) -> None:
        """Store the protected part of the weights, for ``moved``."""
        if self._removes_entirely():
            self._part_at_start = self._protected_part_of(self._weights(self.parameters))

    @torch.no_grad()
    def moved(self, parameters: Sequence[Tensor]) -> float:
        """Return how far the protected part of the weights has moved since ``note_start``, relative to its norm.

        Projected updates do not move it. Return 0 if updates are only scaled down along some directions.

        :param parameters: the parameters of the model now. They are other objects than before if somebody has replaced
            them, and longer if a head has grown.
        """
        if not self._part_at_start:
            return 0.0
        weights = [
            now.to(before)[: len(before)] if now.dim() else now
            for now, before in zip(self._weights(parameters), self._part_at_start, strict=True)
        ]
        part = self._protected_part_of(weights)
        change = [now - before for now, before in zip(part, self._part_at_start, strict=True)]
        return _norm(change) / max(_norm(self._part_at_start), 1e-3 * _norm(weights), torch.finfo(torch.float32).tiny)

    def _removes_entirely(self) -> bool:
        """Whether each direction is removed entirely or not at all."""
        return self._layout is None or (isinstance(self.project, Projector) and self.project.idempotent)

    def _weights(self, parameters: Sequence[Tensor]) -> list[Tensor]:
        used = parameters if self._computed is None else [self._computed.weight]
        return [tensor.detach() for tensor in used]

    def _protected_part_of(self, weights: list[Tensor]) -> list[Tensor]:
        return [weight - kept for weight, kept in zip(weights, self._projected(weights), strict=True)]

    # ------------------------------------------------------------------------------------------------------- details

    def _project_gradients(self, gradients: list[Tensor]) -> None:
        back, layout = self._backward, self._layout
        if layout is None or self._outputs is not None:
            parts = self._projected(gradients)
        else:
            rows = layout.rows(gradients)
            if back is None or not back.uses:
                projected = self.project(rows)
            elif back.explains(rows[0]):
                back.uses.clear()
                return
            else:  # another term adds to this gradient; assume that it does so in later steps, too
                done = back.gradient().unsqueeze(0)
                projected = done + self.project(rows - done)
                self._backward = None
            if rows.data_ptr() == gradients[0].data_ptr():  # the rows are the gradient itself
                rows.copy_(projected)
                return
            parts = layout.from_rows(projected, gradients)
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part)

    def _projected(self, tensors: list[Tensor]) -> list[Tensor]:
        if self._layout is None:
            projected = [self.project(tensor) for tensor in tensors]
        else:
            projected = self._layout.from_rows(self.project(self._layout.rows(tensors)), tensors)
        if self._outputs is None:
            return projected
        where = [self._outputs.reshape(-1, *[1] * (tensor.dim() - 1)) for tensor in tensors]
        return [torch.where(*each) for each in zip(where, projected, tensors, strict=True)]

    def _projects_gradient(self, step: Step) -> bool:
        """Return whether projecting the gradients projects the update, too."""
        if step.fresh:
            self._momentum_is_projected = True
        if not step.linear or (step.momentum and not self._momentum_is_projected):
            return False
        first, *others = (step.groups.get(id(parameter), {}) for parameter in self.parameters)
        if any(_options(other) != _options(first) for other in others):  # another learning rate turns the update
            return False
        decays = {step.decays.get(id(parameter), 0) for parameter in self.parameters}
        idempotent = isinstance(self.project, Projector) and self.project.idempotent
        return decays == {0} or (len(decays) == 1 and idempotent)


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([tensor.double().norm() for tensor in tensors]).norm())


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _has_hooks(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether any of these parameters has hooks that see its gradient in the backward pass."""
    return any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters)


def gradients_are_final(strategy: SupervisedTemplate, plugin: SupervisedPlugin) -> bool:
    """Return whether the optimizer uses the gradients as ``plugin`` leaves them in its ``before_update``.

    It does not if a later plugin may change them, if hooks of the optimizer may change gradients or weights, or if the
    strategy overrides the optimizer step, for example to pass a closure that computes the gradients again.
    """
    if _has_step_hooks(strategy.optimizer):
        return False
    plugins: list[object] = list(strategy.plugins)
    later = [other for other in plugins[plugins.index(plugin) + 1 :] if not isinstance(other, EvaluationPlugin)]
    return _uses_avalanche_methods(strategy, "training_epoch", "optimizer_step") and not any(
        _is_overridden(other, "before_update") for other in later
    )


def _has_step_hooks(optimizer: Any) -> bool:
    """Whether hooks run at the start or the end of the optimizer's ``step``."""
    own = [getattr(optimizer, f"_optimizer_step_{when}_hooks", None) for when in ("pre", "post")]
    of_all = [getattr(torch.optim.optimizer, f"_global_optimizer_{when}_hooks", None) for when in ("pre", "post")]
    return any([*own, *of_all])


def gradients_are_private(strategy: SupervisedTemplate, plugin: SupervisedPlugin) -> bool:
    """Return whether only ``plugin`` can see the gradients between the backward pass and the update.

    Everybody else must see unprojected gradients: plugins that clip or correct gradients (A-GEM), metrics of gradients,
    other training loops, and other processes that average gradients.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    observers: list[object] = []
    for other in strategy.plugins:
        if isinstance(other, EvaluationPlugin):
            observers += [*other.metrics, *other.loggers]
        elif other is not plugin:
            observers.append(other)
    return _uses_avalanche_methods(strategy, "training_epoch", "backward") and not any(
        _is_overridden(observer, name) for observer in observers for name in _GRADIENT_CALLBACKS
    )


def _uses_avalanche_methods(strategy: SupervisedTemplate, *names: str) -> bool:
    """Return whether the strategy overrides none of these methods of Avalanche."""
    return all(
        getattr(type(strategy), name) is _AVALANCHE_METHODS[name] and name not in vars(strategy) for name in names
    )


_AVALANCHE_METHODS: dict[str, Any] = {
    "training_epoch": SGDUpdate.training_epoch,
    "backward": BaseSGDTemplate.backward,
    "optimizer_step": BaseSGDTemplate.optimizer_step,
}

_GRADIENT_CALLBACKS = ("after_backward", "before_update")


def _is_overridden(observer: object, name: str) -> bool:
    """Return whether a plugin, metric or logger implements the callback ``name``."""
    method = getattr(observer, name, None)
    defaults = (None, getattr(BaseSGDPlugin, name), getattr(PluginMetric, name))
    return getattr(method, "__func__", method) not in defaults

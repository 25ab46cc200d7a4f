"""A protected weight during an experience: what is done to its gradients or updates."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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
    """What guards need to know of the optimizer in a step."""

    linear: bool
    """Whether the update is that of SGD, linear in the weights and in the gradients as they are now."""
    momentum: bool
    fresh: bool
    """Whether the optimizer remembers nothing of earlier steps."""
    decays: dict[int, float]
    """``id`` of a parameter -> its weight decay."""

    @staticmethod
    def of(strategy: SupervisedTemplate, plugin: SupervisedPlugin) -> Step:
        optimizer = strategy.optimizer
        groups = optimizer.param_groups
        return Step(
            linear=type(optimizer) is torch.optim.SGD
            and not any(group["maximize"] for group in groups)
            and gradients_are_final(strategy, plugin),
            momentum=any(group.get("momentum", 0) for group in groups),
            fresh=not optimizer.state,
            decays={id(p): group.get("weight_decay", 0) for group in groups for p in group["params"]},
        )


class Guard:
    """One protected weight, with its bias if that is protected too. A frozen parameter is protected in all directions.

    With SGD the gradient is projected, with any other optimizer the update is. SGD is linear, with momentum and
    Nesterov, too: if all gradients are projected, so are all updates. Weight decay is part of the gradient for it:

        (G + c W) P  =  G P − c (W − W P)  +  c W,

    where the optimizer adds the last term. ``W − W P`` is the protected part of the weight, which does not move as long
    as ``P`` removes whole directions; otherwise the update is projected if there is weight decay.

    Of a computed weight (weight normalisation) the update is projected, and the parameters that it is computed from are
    set to what gives the projected one.

    In a large Linear layer the gradient comes projected out of the backward pass, which costs far less. For that the
    layers compute through ``ProjectedBackward`` from ``before_forward`` to ``after_forward``.
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
        :param parameters: the weight, and the bias if that is protected with it.
        :param project: what to apply to rows (groups, out, d).
        :param layers: the layers that use the weight; none for a frozen parameter.
        :param outputs: which outputs are protected, True or False for each of them; all if None.
        """
        self.parameters, self.project, self._outputs = parameters, project, outputs
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
        self._entered: list[nn.Module] = []
        self._start: list[Tensor] = []
        self._protected_part: list[Tensor] = []
        self._momentum_is_projected = True
        try:
            self._projected([parameter.detach() for parameter in parameters])
        except RuntimeError as error:
            raise ValueError(
                f"the memory of {name} does not fit its weight of shape {tuple(parameters[0].shape)}: the layer has "
                "changed its inputs, or the memory comes from another model or another setting of bias"
            ) from error

    # ------------------------------------------------------------------------------------------------- forward pass

    @property
    def in_backward(self) -> bool:
        """Whether the gradient may come projected out of the backward pass."""
        return self._backward is not None

    def enter_forward(self, step: Step) -> None:
        """Let large Linear layers compute so that their gradient comes projected out of the backward pass."""
        back = self._backward
        if back is None or not self._in_gradient(step) or _has_hooks(self.parameters):
            return
        back.uses.clear()
        for layer in self._layers:
            if "forward" not in vars(layer):  # otherwise it is somebody else's
                layer.forward = partial(back.forward, layer)
                self._entered.append(layer)

    def leave_forward(self) -> None:
        """Let all layers compute as usual again."""
        while self._entered:
            del self._entered.pop().forward

    # -------------------------------------------------------------------------------------------------------- update

    def before_update(self, step: Step) -> None:
        self._start = []
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if len(gradients) < len(self.parameters):
            return
        if self._computed is not None:
            self._start = [self._computed.weight.detach().clone()]
            return
        if not self._in_gradient(step) or any(gradient.is_sparse for gradient in gradients):
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
        """The optimizer makes a step that is not projected, and its momentum remembers it."""
        self._momentum_is_projected = False

    def note_epoch(self) -> None:
        """An epoch begins: the weights may have been set to others in between."""
        self._protected_part = []

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
            else:  # something was added to what the layers have projected, and will be in the steps to come
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

    def _in_gradient(self, step: Step) -> bool:
        """Whether projected gradients are projected updates."""
        if step.fresh:
            self._momentum_is_projected = True
        if not step.linear or (step.momentum and not self._momentum_is_projected):
            return False
        decays = {step.decays.get(id(parameter), 0) for parameter in self.parameters}
        whole = isinstance(self.project, Projector) and self.project.whole
        return decays == {0} or (len(decays) == 1 and whole)


def _has_hooks(parameters: Iterable[nn.Parameter]) -> bool:
    """Whether somebody has registered hooks that see the gradients of these parameters in the backward pass."""
    return any(parameter._backward_hooks or parameter._post_accumulate_grad_hooks for parameter in parameters)


def gradients_are_final(strategy: SupervisedTemplate, plugin: SupervisedPlugin) -> bool:
    """Whether the optimizer takes the gradients as ``plugin`` leaves them in its ``before_update``.

    It does not if a later plugin changes them, or if the strategy makes its steps in a way of its own, as with a
    closure that computes them anew.
    """
    plugins: list[object] = list(strategy.plugins)
    later = [other for other in plugins[plugins.index(plugin) + 1 :] if not isinstance(other, EvaluationPlugin)]
    return _is_usual(strategy, "training_epoch", "optimizer_step") and not any(
        _is_overridden(other, "before_update") for other in later
    )


def gradients_are_private(strategy: SupervisedTemplate, plugin: SupervisedPlugin) -> bool:
    """Whether nobody but ``plugin`` can see gradients between the backward pass and the update.

    Others have to find them as they are: plugins that clip or correct them (A-GEM), metrics of them, training loops of
    another kind, or other processes with which they are averaged.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return False
    observers: list[object] = []
    for other in strategy.plugins:
        if isinstance(other, EvaluationPlugin):
            observers += [*other.metrics, *other.loggers]
        elif other is not plugin:
            observers.append(other)
    return _is_usual(strategy, "training_epoch", "backward") and not any(
        _is_overridden(observer, name) for observer in observers for name in _BETWEEN
    )


def _is_usual(strategy: SupervisedTemplate, *names: str) -> bool:
    """Whether these methods of the strategy are Avalanche's."""
    return all(getattr(type(strategy), name) is _USUAL[name] and name not in vars(strategy) for name in names)


_USUAL: dict[str, Any] = {
    "training_epoch": SGDUpdate.training_epoch,
    "backward": BaseSGDTemplate.backward,
    "optimizer_step": BaseSGDTemplate.optimizer_step,
}

_BETWEEN = ("after_backward", "before_update")


def _is_overridden(observer: object, name: str) -> bool:
    method = getattr(observer, name, None)
    defaults = (None, getattr(BaseSGDPlugin, name), getattr(PluginMetric, name))
    return getattr(method, "__func__", method) not in defaults

"""Heads that Avalanche adds to a model or grows during training, and the state of a model with such heads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from avalanche.models import IncrementalClassifier, MultiHeadClassifier, MultiTaskModule
from avalanche.models.dynamic_modules import DynamicModule
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor, nn

from became_avalanche.layers.model import is_below


def growing_heads(model: nn.Module) -> dict[str, nn.Module]:
    """Return the heads that Avalanche grows with new tasks or classes, by name."""
    heads: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, MultiHeadClassifier | IncrementalClassifier) and not is_below(name, heads):
            heads[name] = module
    return heads


def task_heads(model: nn.Module) -> dict[str, nn.Module]:
    """Return the growing heads that have separate outputs for each task, by name.

    A single head that grows with the classes is not one of them: it serves all tasks.
    """
    return {name: head for name, head in growing_heads(model).items() if isinstance(head, MultiHeadClassifier)}


def trained_outputs(model: nn.Module, experience: Any) -> dict[str, Tensor]:
    """Return which outputs of each single growing head an experience trains, as a mask by the name of the weight."""
    result = {}
    for name, head in growing_heads(model).items():
        if isinstance(head, IncrementalClassifier):
            weight: Tensor = head.classifier.weight
            trained = torch.zeros(len(weight), dtype=torch.bool, device=weight.device)
            trained[sorted(experience.classes_in_this_experience)] = True
            result[f"{name}.classifier.weight".removeprefix(".")] = trained
    return result


def refuse_lbfgs_with_growing_heads(strategy: SupervisedTemplate) -> None:
    """Raise a ValueError if the optimizer is LBFGS, which cannot train the parameters of heads added later."""
    heads = growing_heads(strategy.model)
    if heads and isinstance(strategy.optimizer, torch.optim.LBFGS):
        raise ValueError(
            f"LBFGS keeps the parameters it was created with, so it cannot train the heads that {next(iter(heads))!r} "
            "adds for new tasks or classes; use another optimizer, or a model whose head does not grow"
        )


def model_state(model: nn.Module) -> dict[str, Any]:
    """Return all parameters and buffers of a model, and what is needed to add the same heads to a fresh model."""
    modules = dict(model.named_modules())
    return {
        "tensors": {name: tensor.detach() for name, tensor in _tensors(model).items()},
        "frozen": [name for name, parameter in model.named_parameters() if not parameter.requires_grad],
        "evaluating": [name for name, module in modules.items() if not module.training],
        "heads": {name: list(module.classifiers) for name, module in modules.items() if _has_heads(module)},
        "units": {
            name: module.classifier.out_features
            for name, module in modules.items()
            if isinstance(module, IncrementalClassifier)
        },
        "tasks": {
            name: {"max_class_label": module.max_class_label, "known": sorted(module.known_train_tasks_labels)}
            for name, module in modules.items()
            if isinstance(module, MultiTaskModule)
        },
    }


@torch.no_grad()
def load_model_state(model: nn.Module, state: Mapping[str, Any], experiences: Iterable[Any] = ()) -> None:
    """Load a state that ``model_state`` returned into a fresh model. Missing heads and output units are added.

    :param model: a model built in the same way.
    :param state: the state.
    :param experiences: the experiences that the model has seen so far, in order. They are needed only if it has dynamic
        modules other than Avalanche's heads.
    """
    device = next(model.parameters()).device
    heads = growing_heads(model)
    for experience in experiences:
        for name, module in list(model.named_modules()):
            if isinstance(module, DynamicModule) and module._auto_adapt and not is_below(name, heads):
                module.adaptation(experience)
    for name, labels in state["heads"].items():
        _add_heads(_module(model, name), labels)
    for name, units in state["units"].items():
        head = _module(model, name)
        rows = len(state["tensors"][f"{name}.classifier.weight" if name else "classifier.weight"])
        if units != rows:
            raise ValueError(
                f"the saved model is corrupt: its head {name!r} has {units} units, but its weight has {rows} rows"
            )
        if head.classifier.out_features != units:
            head.classifier = nn.Linear(head.classifier.in_features, units)
    model.to(device)
    _check_same_tensors(model, state["tensors"])
    for name, tensor in _tensors(model).items():
        saved = state["tensors"][name]
        if tensor.shape == saved.shape:
            tensor.copy_(saved)
        else:  # the masks of grown heads
            parent, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(parent), leaf, saved.to(device, copy=True))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in state["frozen"])
    for name, module in model.named_modules():
        module.training = name not in state["evaluating"]
    for name, task in state["tasks"].items():
        module = _module(model, name)
        module.max_class_label, module.known_train_tasks_labels = task["max_class_label"], set(task["known"])


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _has_heads(module: nn.Module) -> bool:
    return isinstance(module, MultiHeadClassifier)


def _module(model: nn.Module, name: str) -> Any:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise ValueError(f"the saved model has a module {name!r}, which this one lacks; build the same model") from None


def _add_heads(module: Any, labels: Iterable[str]) -> None:
    """Add the missing heads in the same way as ``MultiHeadClassifier.adaptation``."""
    for label in labels:
        if label not in module.classifiers:
            units = module.starting_out_features
            module.classifiers[label] = IncrementalClassifier(
                module.in_features, units, masking=False, auto_adapt=False
            )
            module.register_buffer(f"active_units_T{label}", torch.zeros(units, dtype=torch.int8))


def _check_same_tensors(model: nn.Module, saved: Mapping[str, Tensor]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in _tensors(model).items()}
    parameters = dict(model.named_parameters())
    for name in {**saved, **shapes}:
        there, here = (tuple(saved[name].shape) if name in saved else None), shapes.get(name)
        if there == here or (None not in (there, here) and name not in parameters):
            continue
        raise ValueError(
            f"in the saved model, {name} {_shape(there)}, in this one it {_shape(here)}; build the same model, and "
            "if it has dynamic modules other than Avalanche's heads, pass the experiences that it has seen"
        )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "does not exist" if shape is None else f"has the shape {shape}"

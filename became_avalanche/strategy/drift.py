"""Measure how far the outputs of a model's layers have moved on given data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from math import inf, sqrt
from typing import Any

import torch
from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.models.utils import avalanche_forward
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.data import DataLoader

from became_avalanche.layers.model import is_below
from became_avalanche.strategy.heads import task_heads


@torch.no_grad()
def measure_drift(
    before: nn.Module, after: nn.Module, data: Any, *, task_label: int = 0, batch_size: int = 128
) -> dict[str, float]:
    """Return how far the outputs of each layer have moved. Gradient projection methods promise to keep this small.

    The model ``before`` is called on ``data`` in eval mode, which gives each layer its inputs ``x``. The layer of the
    same name in ``after`` is called on the same ``x``. The result is ``‖after(x) − before(x)‖ / ‖before(x)‖``.

    >>> from copy import deepcopy
    >>> import torch
    >>> from became_avalanche import measure_drift
    >>> before = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2, bias=False))
    >>> after = deepcopy(before)
    >>> after[2].weight.data *= 2
    >>> measure_drift(before, after, torch.randn(8, 3))
    {'0': 0.0, '2': 1.0}

    A layer is any module that the model calls and that has parameters itself, not only in submodules. Normalisation
    layers are included, heads of single tasks are not. If a head has grown, only its old outputs are compared. Both
    models are left as they were.

    :param before: a copy of the model from before the training, made with ``copy.deepcopy``.
    :param after: the model after the training.
    :param data: an Avalanche experience or dataset, used with its eval transforms, or a batch of inputs.
    :param task_label: the task label of a batch of inputs, for models that need one.
    :param batch_size: number of samples per forward pass.
    :return: relative change by the name of the layer, in the order of the model.
    """
    if before is after:
        raise ValueError(
            "before and after are the same object; copy the model before the training: before = deepcopy(model)"
        )
    heads, there = list(task_heads(before)), dict(after.named_modules())
    if missing := [name for name in dict(before.named_modules()) if name not in there and not is_below(name, heads)]:
        raise ValueError(
            f"the model after the training has no module {missing[0]!r}, which the one before has: pass two states of "
            "one model"
        )
    pairs = {
        name: (module, there[name])
        for name, module in before.named_modules()
        if dict(module.named_parameters(recurse=False))
        and not is_below(name, heads)
        and not isinstance(module, ParametrizationList)  # computes a weight, not an output
    }
    moved: dict[str, Tensor] = {}
    total: dict[str, Tensor] = {}

    calls: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {name: [] for name in pairs}

    def compare(name: str, output: Any) -> None:
        args, kwargs = calls[name].pop()  # from before pre-hooks, which the other module has, too
        again = pairs[name][1](*args, **kwargs)
        for old, new in zip(_tensors(output), _tensors(again), strict=True):
            new = new.to(old.device)[tuple(slice(size) for size in old.shape)]
            moved[name] = moved.get(name, 0) + (_double(new) - _double(old)).abs().square().sum()
            total[name] = total.get(name, 0) + _double(old).abs().square().sum()

    device = next(before.parameters()).device
    with ExitStack() as stack:
        for model in (before, after):
            stack.enter_context(_evaluating(model))
        for name, (module, _) in pairs.items():
            stack.callback(
                module.register_forward_pre_hook(
                    lambda module, args, kwargs, name=name: calls[name].append((args, kwargs)),
                    prepend=True,
                    with_kwargs=True,
                ).remove
            )
            stack.callback(
                module.register_forward_hook(lambda module, args, output, name=name: compare(name, output)).remove
            )
        for x, labels in _batches(data, task_label, batch_size):
            avalanche_forward(before, x.to(device), labels.to(device))
    return {name: _ratio(float(moved[name]), float(total[name])) for name in pairs if name in moved}


def _ratio(moved: float, total: float) -> float:
    return sqrt(moved / total) if total else (inf if moved else 0.0)


def _double(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _batches(data: Any, task_label: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches of inputs with their task labels."""
    if isinstance(data, Tensor):
        for x in torch.split(data, batch_size):
            yield x, torch.full((len(x),), task_label)
        return
    dataset = data if isinstance(data, AvalancheDataset) else data.dataset
    dataset = dataset.eval()
    for x, _, *rest in DataLoader(dataset, batch_size, collate_fn=dataset.collate_fn):
        yield x, rest[-1] if rest else torch.full((len(x),), task_label)


def _tensors(output: Any) -> list[Tensor]:
    """Return the floating-point and complex tensors in a module's output, which may be nested."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() or output.is_complex() else []
    values = output.values() if isinstance(output, dict) else output if isinstance(output, list | tuple) else ()
    return [tensor for value in values for tensor in _tensors(value)]


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training

"""Passes over data in the middle of a training that do not change the training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from avalanche.benchmarks import OnlineCLExperience
from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.training.supervised import JointTraining
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor
from torch.utils.data import DataLoader


@contextmanager
def data_pass(
    strategy: SupervisedTemplate,
    dataset: AvalancheDataset,
    batch_size: int,
    n_samples: int | None = None,
    num_workers: int = 0,
    *,
    train_mode: bool = False,
    shuffle: bool = True,
) -> Iterator[Iterator[int]]:
    """Run forward passes over ``dataset`` in eval mode, with eval transforms, in random order.

    Each step of the iterator puts a batch into ``strategy.mbatch`` and the model's output into ``strategy.mb_output``,
    so that ``strategy.criterion()`` returns the loss of the batch. It yields the number of samples in the batch. When
    the context ends, the random state, the modes and buffers of the modules and the strategy's own batch are restored.

    :param n_samples: number of samples to draw, without replacement (default: all).
    :param train_mode: use train mode instead of eval mode. Layers that are in eval mode in training stay in it.
    :param shuffle: False to keep the order of the data; ``n_samples`` then takes the first ones.
    """
    dataset = dataset if _in_eval(dataset) else dataset.eval()
    modes = {module: module.training for module in strategy.model.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in strategy.model.buffers()] if train_mode else []
    mbatch, mb_output = strategy.mbatch, strategy.mb_output

    def forward_passes() -> Iterator[int]:
        for strategy.mbatch in loader:
            strategy._unpack_minibatch()
            strategy.mb_output = strategy.forward()
            yield len(strategy.mb_y)

    with kept_random_state(strategy.device):
        order = torch.randperm(len(dataset), device="cpu") if shuffle else torch.arange(len(dataset), device="cpu")
        chosen = order[:n_samples].tolist()
        if train_mode and len(chosen) % batch_size == 1 < len(chosen):
            chosen.pop()  # in train mode, batch normalisation refuses a batch of one sample
        loader = DataLoader(dataset, batch_size, sampler=chosen, collate_fn=dataset.collate_fn, num_workers=num_workers)
        try:
            if not (train_mode and strategy.model.training):  # training may keep single layers in eval mode
                strategy.model.train(train_mode)
            for module in modes:
                if hasattr(module, "train_classifier") and hasattr(module, "eval_classifier"):
                    module.training = True  # models of Avalanche that train one classifier and evaluate another
            yield forward_passes()
        finally:
            for buffer, before in buffers:  # running statistics
                buffer.copy_(before)
            for module, training in modes.items():
                module.training = training
            strategy.mbatch, strategy.mb_output = mbatch, mb_output


def _in_eval(dataset: AvalancheDataset) -> bool:
    """Whether the dataset already uses its eval transforms.

    If so, ``dataset.eval()`` would only return a copy, which has to index its samples again.
    """
    data = dataset._flat_data
    groups = {data._transform_groups.current_group, data._frozen_transform_groups.current_group}
    return groups == {"eval"}


@contextmanager
def kept_random_state(device: str | torch.device) -> Iterator[None]:
    """Restore the random states of the CPU and of all devices of this kind when the context ends."""
    kind = torch.device(device).type
    devices = range(0 if kind == "cpu" else getattr(torch, kind).device_count())
    with torch.random.fork_rng(devices, device_type="cuda" if kind == "cpu" else kind):
        yield


def mean_gradients(
    strategy: SupervisedTemplate,
    parameters: Mapping[str, Tensor],
    batch_size: int,
    n_samples: int | None = None,
    num_workers: int = 0,
) -> dict[str, Tensor]:
    """Return the gradient of the mean loss over ``n_samples`` samples of the experience.

    Parameters that do not require a gradient, or that the loss does not depend on, are left out.
    """
    wanted = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    totals: dict[str, Tensor] = {}
    samples = 0
    dataset = strategy.experience.dataset
    with torch.enable_grad(), data_pass(strategy, dataset, batch_size, n_samples, num_workers) as batches:
        for size in batches:
            gradients = torch.autograd.grad(mean_loss(strategy, size), list(wanted.values()), allow_unused=True)
            for name, gradient in zip(wanted, gradients, strict=True):
                if gradient is not None:
                    totals[name] = totals.get(name, 0) + size * gradient.to_dense()
            samples += size
    return {name: total / samples for name, total in totals.items()}


def mean_loss(strategy: SupervisedTemplate, size: int) -> Tensor:
    """Return the mean loss of the current batch of ``size`` samples, even if the strategy's criterion is a sum."""
    total: Tensor = strategy.criterion()
    return total / size if getattr(strategy._criterion, "reduction", "mean") == "sum" else total


def refuse_empty(strategy: SupervisedTemplate, plugin: object) -> None:
    """Raise a ValueError if the experience has no samples. Avalanche would raise an IndexError without a message."""
    if len(strategy.experience.dataset) == 0:
        raise ValueError(
            f"{type(plugin).__name__} got an experience without training samples; remove it from the stream"
        )


def refuse_online(strategy: SupervisedTemplate, plugin: object) -> None:
    """Raise a ValueError for online streams, in which an experience is only a part of a task."""
    if isinstance(strategy.experience, OnlineCLExperience):
        raise ValueError(
            f"{type(plugin).__name__} works on whole tasks, but got an online stream, which cuts each task into "
            "small experiences; train on the benchmark's ordinary train stream instead"
        )


def experiences_in_training(strategy: SupervisedTemplate) -> list[Any]:
    """Return the experiences that the strategy is training on: all under ``JointTraining``, otherwise one."""
    experiences = strategy._experiences if isinstance(strategy, JointTraining) else [strategy.experience]
    return [experience.logging() for experience in experiences]

"""A pass over data in the middle of a training that leaves no trace on it."""

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
    """Forward passes over ``dataset``, in random order, with eval transforms, in eval mode.

    Each step of the iterator leaves a batch in ``strategy.mbatch`` and the model's answer in ``strategy.mb_output``,
    so that ``strategy.criterion()`` is its loss, and yields the number of samples in it. Random state, modes and
    buffers of the modules and the strategy's own batch are as before when the context ends.

    :param n_samples: how many samples to draw, without replacement; all if None.
    :param train_mode: put the model into train mode instead.
    :param shuffle: False for the order of the data; ``n_samples`` are then the first ones.
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
        loader = DataLoader(dataset, batch_size, sampler=chosen, collate_fn=dataset.collate_fn, num_workers=num_workers)
        try:
            strategy.model.train(train_mode)
            for module in modes:
                if hasattr(module, "train_classifier") and hasattr(module, "eval_classifier"):
                    module.training = True  # such models of Avalanche train one classifier and evaluate with another
            yield forward_passes()
        finally:
            for buffer, before in buffers:  # running statistics
                buffer.copy_(before)
            for module, training in modes.items():
                module.training = training
            strategy.mbatch, strategy.mb_output = mbatch, mb_output


def _in_eval(dataset: AvalancheDataset) -> bool:
    """Whether ``dataset.eval()`` would be no more than a copy, which has to find out anew where its samples are."""
    data = dataset._flat_data
    groups = {data._transform_groups.current_group, data._frozen_transform_groups.current_group}
    return groups == {"eval"}


@contextmanager
def kept_random_state(device: str | torch.device) -> Iterator[None]:
    """A context after which the random states of the CPU and of all devices of this kind are as before."""
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
    """Gradient of the mean loss over ``n_samples`` of the experience, for those of ``parameters`` that have one."""
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
    """The mean loss of the present batch of ``size`` samples, also if the strategy's criterion is their sum."""
    total: Tensor = strategy.criterion()
    return total / size if getattr(strategy._criterion, "reduction", "mean") == "sum" else total


def refuse_empty(strategy: SupervisedTemplate, plugin: object) -> None:
    """Raise a ValueError if there is nothing to train on: Avalanche would fail with an IndexError without words."""
    if len(strategy.experience.dataset) == 0:
        raise ValueError(
            f"{type(plugin).__name__} got an experience without a training sample; leave it out of the stream"
        )


def refuse_online(strategy: SupervisedTemplate, plugin: object) -> None:
    """Raise a ValueError on online streams, where an 'experience' is a fragment of a task."""
    if isinstance(strategy.experience, OnlineCLExperience):
        raise ValueError(
            f"{type(plugin).__name__} works on whole tasks, but got an online stream, which cuts each task into "
            "small experiences; train on the benchmark's ordinary train stream instead"
        )


def experiences_in_training(strategy: SupervisedTemplate) -> list[Any]:
    """The experiences that the strategy trains on now: all at once under ``JointTraining``, otherwise one."""
    experiences = strategy._experiences if isinstance(strategy, JointTraining) else [strategy.experience]
    return [experience.logging() for experience in experiences]

"""Measure loss and accuracy along the path of a merge, on data of all tasks, which training never sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from avalanche.models import MultiTaskModule
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor
from torch.func import functional_call
from tqdm import tqdm

from became_avalanche.merging.fisher import curvature_along
from became_avalanche.merging.rules import MergeInputs
from became_avalanche.plugins.merge import BecameMergePlugin
from became_avalanche.results.scans import PathScan
from became_avalanche.strategy.passes import data_pass, mean_loss
from became_avalanche.strategy.weights import interpolate, restore, snapshot


def scan_path(
    strategy: SupervisedTemplate,
    plugin: BecameMergePlugin,
    experiences: Iterable[Any],
    *,
    n_samples: int | None = 1000,
    step: float = 0.05,
) -> PathScan:
    """Measure loss and accuracy of each task along the path of the last merge, from ``θ_GP`` to ``θ̂``.

    The path interpolates all parameters. Without projection the merge takes the new head from ``θ̂``, so the merged
    model is not on this path. Measurements use eval mode, eval transforms and batches of ``eval_mb_size``. The model
    and the random state are restored at the end.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from avalanche.training.plugins import EvaluationPlugin
    >>> from became_avalanche import BecameMergePlugin, GPMPlugin, MultiHeadMLP, scan_path, split_digits
    >>> model, merge, tasks = MultiHeadMLP(), BecameMergePlugin(keep_last_merge=True), split_digits().train_stream[:2]
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> options = {"train_mb_size": 64, "eval_mb_size": 64, "evaluator": EvaluationPlugin()}
    >>> strategy = Naive(model=model, optimizer=optimizer, plugins=[GPMPlugin(), merge], **options)
    >>> for experience in tasks:
    ...     _ = strategy.train(experience)
    >>> scan = scan_path(strategy, merge, tasks, n_samples=20, step=0.25)
    >>> scan.coefficients
    [0.0, 0.25, 0.5, 0.75, 1.0]
    >>> len(scan.loss), len(scan.loss[0])  # a row per task, a column per λ
    (2, 5)

    :param strategy: the strategy, after the training of a task.
    :param plugin: its merge plugin, created with ``keep_last_merge=True``.
    :param experiences: one experience per task, up to the task just trained: ``benchmark.train_stream[:t]``.
    :param n_samples: samples per task, the same for each λ; None for all.
    :param step: distance between two values of λ.
    """
    path = _last_merge(plugin, strategy)
    coefficients = grid(step)
    tasks = list(experiences)
    if not tasks:
        raise ValueError("there is nothing to measure: pass the experiences of the tasks trained so far")
    here, experience = snapshot(strategy), strategy.experience
    try:
        restore(strategy, path.candidate)
        curvature = _curvature(strategy, path, tasks[-1], n_samples)
        loss, accuracy = measure_path(strategy, path.base, path.candidate, coefficients, tasks, n_samples)
    finally:
        restore(strategy, here)
        strategy.experience = experience
    record = plugin.merges[-1]
    return PathScan(
        t=path.t,
        n_samples=n_samples,
        coefficients=coefficients,
        loss=loss,
        accuracy=accuracy,
        chosen=record.coefficient,
        plasticity=record.plasticity,
        curvature=curvature,
    )


def grid(step: float) -> list[float]:
    """Return values of λ from 0 to 1 in steps of about ``step``."""
    if not 0 < step <= 1:
        raise ValueError(f"step must be above 0 and at most 1; got {step}")
    n_steps = round(1 / step)
    return [k / n_steps for k in range(n_steps + 1)]


def measure_path(
    strategy: SupervisedTemplate,
    base: Mapping[str, Tensor],
    candidate: Mapping[str, Tensor],
    coefficients: Sequence[float],
    tasks: Sequence[Any],
    n_samples: int | None,
) -> tuple[list[list[float]], list[list[float]]]:
    """Return mean loss and accuracy with a row per task and a column per λ. Leaves the strategy at the last weights."""
    points = []
    for coefficient in tqdm(coefficients, desc="path", leave=False, disable=None):
        restore(strategy, interpolate(base, candidate, coefficient, coefficient))
        points.append([measure(strategy, task, n_samples) for task in tasks])
    loss, accuracy = ([[point[i][k] for point in points] for i in range(len(tasks))] for k in (0, 1))
    return loss, accuracy


@torch.no_grad()
def measure(strategy: SupervisedTemplate, experience: Any, n_samples: int | None) -> tuple[float, float]:
    """Return the mean loss and the accuracy at the current weights."""
    loss, right, samples = 0.0, 0, 0
    strategy.experience = experience
    with data_pass(strategy, experience.dataset, strategy.eval_mb_size, n_samples) as batches:
        for size in batches:
            loss += size * float(mean_loss(strategy, size))
            right += int((strategy.mb_output.argmax(-1) == strategy.mb_y).sum())
            samples += size
    return loss / samples, right / samples


@torch.no_grad()
def _curvature(strategy: SupervisedTemplate, path: MergeInputs, experience: Any, n_samples: int | None) -> float:
    """Return ``Δᵀ F Δ`` with the full Fisher matrix at the current weights, as a mean over the samples."""
    model, delta = strategy.model, path.delta
    theta = {name: parameter for name, parameter in model.named_parameters() if name in delta}
    total, samples = 0.0, 0
    strategy.experience = experience
    with data_pass(strategy, experience.dataset, strategy.eval_mb_size, n_samples) as batches:
        for size in batches:
            labels = (strategy.mb_task_id,) if isinstance(model, MultiTaskModule) else ()
            inputs = (strategy.mb_x, *labels)

            def logits_at(weights: dict[str, Tensor], inputs: tuple[Tensor, ...] = inputs) -> Tensor:
                logits: Tensor = functional_call(model, weights, inputs)
                return logits

            total += float(curvature_along(logits_at, theta, delta).sum())
            samples += size
    return total / samples


def _last_merge(plugin: BecameMergePlugin, strategy: SupervisedTemplate) -> MergeInputs:
    if plugin.last_merge is None:
        raise ValueError(
            "there is no path to scan: create the plugin with BecameMergePlugin(keep_last_merge=True), and scan after "
            "the second task or a later one"
        )
    check_in_model(strategy, plugin.last_merge.fisher)
    return plugin.last_merge


def check_in_model(strategy: SupervisedTemplate, merged: Iterable[str]) -> None:
    """Raise a ValueError unless all merged weights are part of the model."""
    model = strategy.model
    foreign = set(merged) - {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
    if foreign:
        raise ValueError(
            f"the path cannot be measured: {min(foreign)} was merged with the model but is not part of it (TRGP keeps "
            "its scales in the plugin)"
        )

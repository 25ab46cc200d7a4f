"""Loss and accuracy along the path of a merge: an analysis that needs data of all tasks, which training never sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
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
from became_avalanche.strategy.passes import data_pass
from became_avalanche.strategy.weights import interpolate, restore, snapshot


@dataclass(frozen=True)
class PathScan:
    """Loss and accuracy of each task at ``θ_GP + λ Δ``."""

    t: int
    """The task, counted from 1."""
    coefficients: list[float]
    """λ from 0 to 1."""
    loss: list[list[float]]
    """A row per task, a column per λ: mean loss over the samples."""
    accuracy: list[list[float]]
    """The same for the fraction of right answers."""
    chosen: float
    """The λ of the merge."""
    plasticity: float
    """Δᵀ F Δ of the merge, with the diagonal of F."""
    curvature: float
    """Δᵀ F Δ with the whole of F, on the samples of the last task."""

    @property
    def cumulative_loss(self) -> list[float]:
        """The sum of the losses of all tasks, for each λ."""
        return [sum(column) for column in zip(*self.loss, strict=True)]

    @property
    def best(self) -> float:
        """The λ with the least cumulative loss."""
        losses = self.cumulative_loss
        return self.coefficients[losses.index(min(losses))]


def scan_path(
    strategy: SupervisedTemplate,
    plugin: BecameMergePlugin,
    experiences: Iterable[Any],
    *,
    n_samples: int | None = 1000,
    step: float = 0.05,
) -> PathScan:
    """Walk along the path of the last merge, from ``θ_GP`` to ``θ̂``, and measure each task on the way.

    Model and random state are as before when it is done. Data are passed in eval mode with eval transforms, in batches
    of ``eval_mb_size``.

    :param strategy: the strategy, after the training of a task.
    :param plugin: its merge plugin, made with ``keep_last_merge=True``.
    :param experiences: one per task, the last one of the task just trained: ``benchmark.train_stream[:t]``.
    :param n_samples: samples per task, the same for each λ; None for all.
    :param step: between two λ.
    """
    path = _path_of(plugin, strategy)
    if not 0 < step <= 1:
        raise ValueError(f"step must be above 0 and at most 1; got {step}")
    tasks = list(experiences)
    if not tasks:
        raise ValueError("there is nothing to measure: pass the experiences of the tasks seen so far")
    n_steps = round(1 / step)
    coefficients = [k / n_steps for k in range(n_steps + 1)]
    here, experience = snapshot(strategy), strategy.experience
    points = []
    try:
        restore(strategy, path.candidate)
        curvature = _curvature(strategy, path, tasks[-1], n_samples)
        for coefficient in tqdm(coefficients, desc=f"path of task {path.t}", leave=False, disable=None):
            restore(strategy, interpolate(path.base, path.candidate, coefficient, coefficient))
            points.append([_measure(strategy, task, n_samples) for task in tasks])
    finally:
        restore(strategy, here)
        strategy.experience = experience
    record = plugin.merges[-1]
    return PathScan(
        t=path.t,
        coefficients=coefficients,
        loss=[[losses[i][0] for losses in points] for i in range(len(tasks))],
        accuracy=[[losses[i][1] for losses in points] for i in range(len(tasks))],
        chosen=record.coefficient,
        plasticity=record.plasticity,
        curvature=curvature,
    )


@torch.no_grad()
def _measure(strategy: SupervisedTemplate, experience: Any, n_samples: int | None) -> tuple[float, float]:
    """Mean loss and accuracy at the weights as they are."""
    loss, right, samples = 0.0, 0, 0
    strategy.experience = experience
    with data_pass(strategy, experience.dataset, strategy.eval_mb_size, n_samples) as batches:
        for size in batches:
            loss += size * float(strategy.criterion())
            right += int((strategy.mb_output.argmax(-1) == strategy.mb_y).sum())
            samples += size
    return loss / samples, right / samples


@torch.no_grad()
def _curvature(strategy: SupervisedTemplate, path: MergeInputs, experience: Any, n_samples: int | None) -> float:
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


def _path_of(plugin: BecameMergePlugin, strategy: SupervisedTemplate) -> MergeInputs:
    if plugin.last_merge is None:
        raise ValueError(
            "there is no path to scan: make the plugin with BecameMergePlugin(keep_last_merge=True), and scan after "
            "the second task or a later one"
        )
    foreign = plugin.last_merge.fisher.keys() - dict(strategy.model.named_parameters()).keys()
    if foreign:
        raise ValueError(
            f"the path cannot be walked: {min(foreign)} was merged with the model but is not part of it (TRGP keeps "
            "its scales itself)"
        )
    return plugin.last_merge

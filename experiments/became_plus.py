"""Variants of the BECAME merge as plugins for studies. Each changes one thing; everything else is as in the paper.

    became study experiments/studies/became-plus-split-digits.toml

The results are in docs/merging-results.md. Variants that are options of ``BecameMergePlugin``, such as the exact Fisher
information, are set as options in the study files.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace

import torch
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor

from became_avalanche import BecameMergePlugin
from became_avalanche.merging.fisher import Batch
from became_avalanche.merging.rules import Became, MergeInputs
from became_avalanche.strategy.passes import data_pass
from became_avalanche.strategy.protocols import StageAware
from became_avalanche.strategy.weights import interpolate, restore, snapshot, trainable

REFIT_EPOCHS = 5
SMOOTHING = 0.1


class Refit(BecameMergePlugin):
    """Trains the current head for a few epochs after the merge. All parameters that earlier tasks use are frozen."""

    def on_merged(self, strategy: SupervisedTemplate, inputs: MergeInputs, run: Callable[[int], None]) -> None:
        shared = [parameter for name, parameter in trainable(strategy).items() if _used_before(inputs, name)]
        with self.free_training(strategy, min(REFIT_EPOCHS, strategy.train_epochs)):
            try:
                for parameter in shared:
                    parameter.requires_grad_(False)
                run(3)
            finally:
                for parameter in shared:
                    parameter.requires_grad_(True)


def _used_before(inputs: MergeInputs, name: str) -> bool:
    return name in inputs.precision and bool(inputs.precision[name].any())


class ProjectedAfter(BecameMergePlugin):
    """Trains a third stage, with projection, after the merge."""

    def on_merged(self, strategy: SupervisedTemplate, inputs: MergeInputs, run: Callable[[int], None]) -> None:
        run(3)


class Average(BecameMergePlugin, StageAware):
    """Uses the mean of the weights after each epoch of stage 2, except the last epoch, as ``θ̂``.

    If stage 2 has only one epoch, ``θ̂`` is the weights at its end, as without this plugin.
    """

    def on_stage_start(self, strategy: SupervisedTemplate, stage: int) -> None:
        self.total: dict[str, Tensor] = {}
        self.count = 0

    def before_training_epoch(self, strategy: SupervisedTemplate, **kwargs: object) -> None:
        if strategy.clock.train_exp_epochs > 0:
            for name, weight in snapshot(strategy).items():
                self.total[name] = self.total[name] + weight if name in self.total else weight
            self.count += 1

    def choose_candidate(self, strategy: SupervisedTemplate, base: dict[str, Tensor]) -> dict[str, Tensor]:
        mean = {name: total / self.count for name, total in self.total.items() if total.is_floating_point()}
        return {**snapshot(strategy), **mean}


class ValidationFisher(BecameMergePlugin):
    """Estimates the Fisher information on the validation data of the task instead of its training data."""

    def estimate_fisher(
        self, strategy: SupervisedTemplate, names: Container[str], num_workers: int
    ) -> dict[str, Tensor]:
        training = strategy.experience
        experience = training.logging()
        strategy.experience = experience.origin_stream.benchmark.streams["valid"][experience.current_experience]
        try:
            return super().estimate_fisher(strategy, names, num_workers)
        finally:
            strategy.experience = training


class SmoothedFisher(BecameMergePlugin):
    """Estimates the Fisher information with label smoothing."""

    def estimate_fisher(
        self, strategy: SupervisedTemplate, names: Container[str], num_workers: int
    ) -> dict[str, Tensor]:
        parameters = {name: parameter for name, parameter in trainable(strategy).items() if name in names}
        loss = torch.nn.CrossEntropyLoss(label_smoothing=SMOOTHING)
        dataset, size = strategy.experience.dataset, strategy.train_mb_size
        with data_pass(strategy, dataset, size, self.fisher.n_samples, num_workers) as batches:
            passes = (
                Batch(loss(strategy.mb_output, strategy.mb_y), strategy.mb_output, strategy.mb_y) for _ in batches
            )
            return self.fisher(passes, strategy.model, parameters)


class MiddleFisher(BecameMergePlugin):
    """Estimates the Fisher information for the merge in the middle between ``θ_GP`` and ``θ̂`` instead of at ``θ̂``."""

    _middle: dict[str, Tensor] | None = None

    def choose_candidate(self, strategy: SupervisedTemplate, base: dict[str, Tensor]) -> dict[str, Tensor]:
        candidate = snapshot(strategy)
        self._middle = interpolate(base, candidate, 0.5, 0.5)
        return candidate

    def estimate_fisher(
        self, strategy: SupervisedTemplate, names: Container[str], num_workers: int
    ) -> dict[str, Tensor]:
        middle, self._middle = self._middle, None  # the second estimate, for Λ, is at θ*
        if middle is None:
            return super().estimate_fisher(strategy, names, num_workers)
        candidate = snapshot(strategy)
        restore(strategy, middle)
        try:
            return super().estimate_fisher(strategy, names, num_workers)
        finally:
            restore(strategy, candidate)


class HeadApart(BecameMergePlugin):
    """Leaves parameters that no earlier task has trained, such as the new head, out of λ. They are merged with it."""

    def __init__(self, **options: object) -> None:
        super().__init__(**options)
        self.rule = became_without_new_head


def became_without_new_head(inputs: MergeInputs) -> float:
    """Return Eq. 20 for the parameters with a precision."""
    fisher = {name: diagonal for name, diagonal in inputs.fisher.items() if _used_before(inputs, name)}
    return Became()(replace(inputs, fisher=fisher))

"""What a benchmark needs to be trained on: stream, network and training recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any

import torch
from avalanche.training.plugins import SupervisedPlugin
from torch import nn

from became_avalanche.benchmarks.files import Source
from became_avalanche.plugins.nscl import LaterTaskLR, nscl_groups
from became_avalanche.plugins.plateau import PlateauPlugin, TrainingPlateauPlugin
from became_avalanche.runs.methods import Strengths, base_of


@dataclass(frozen=True)
class Recipe:
    """How each stage of each task is trained: plain SGD until the validation loss has settled (``PlateauPlugin``)."""

    learning_rate: float
    batch_size: int
    epochs: int
    """At most, per stage."""
    patience: int
    factor: float
    lr_min: float

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """For a model before its first task."""
        return torch.optim.SGD(model.parameters(), lr=self.learning_rate)

    def plugins(self) -> list[SupervisedPlugin]:
        """The schedule."""
        return [PlateauPlugin(self.patience, self.factor, self.lr_min)]


@dataclass(frozen=True)
class NSCLRecipe:
    """How each stage of each task is trained: Adam until the training loss has settled (``TrainingPlateauPlugin``)."""

    batch_size: int
    learning_rate: float = 1e-4
    """Of the backbone, on the first task."""
    later_rate: float = 5e-5
    """Of the backbone, on further tasks."""
    head_rate: float = 1e-3
    normalisation_rate: float = 5e-4
    weight_decay: float = 5e-5
    epochs: int = 80
    """At most, per stage."""
    patience: int = 3
    factor: float = 2
    plateaus: int = 3
    """The stage ends at this one."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """For a model before its first task."""
        groups = nscl_groups(
            model,
            lr=self.learning_rate,
            head_lr=self.head_rate,
            normalisation_lr=self.normalisation_rate,
            weight_decay=self.weight_decay,
        )
        return torch.optim.Adam(groups)

    def plugins(self) -> list[SupervisedPlugin]:
        """The schedule."""
        return [LaterTaskLR(self.later_rate), TrainingPlateauPlugin(self.patience, self.factor, self.plateaus)]


AnyRecipe = Recipe | NSCLRecipe


@dataclass(frozen=True)
class BenchmarkPreset:
    """A benchmark with all that is needed to train on it."""

    name: str
    stream: Callable[..., Any]
    """Seed -> Avalanche benchmark with train, test and usually valid streams. If it needs data on disk, it has the
    parameters ``dataset_root`` and ``device``, too."""
    n_tasks: int
    """How many tasks of the stream are learned."""
    model: Callable[[], nn.Module]
    recipe: AnyRecipe
    """Of methods that have none of their own."""
    strengths: Strengths = field(default_factory=dict)
    """The setting of each method, without its second stage: one value, or options of its plugin by name."""
    recipes: Mapping[str, AnyRecipe] = field(default_factory=dict)
    """Of each method that has one of its own, without its second stage."""
    data: tuple[Source, ...] = ()
    """What the stream needs on disk."""
    dataset_root: str | PathLike[str] | None = None
    """Where that is."""
    budget: str = ""
    """To what it was scaled down, if it was."""

    @property
    def title(self) -> str:
        """The name, and to what it was scaled down."""
        return f"{self.name}, scaled down to {self.budget}" if self.budget else self.name

    def recipe_of(self, method: str) -> AnyRecipe:
        """How a method is trained."""
        return self.recipes.get(base_of(method), self.recipe)

    def scaled(self, tasks: int | None = None, epochs: int | None = None) -> BenchmarkPreset:
        """The same for a small machine.

        :param tasks: learn only so many tasks.
        :param epochs: train each stage for at most so many epochs.
        """
        if tasks is not None and not 1 <= tasks <= self.n_tasks:
            raise ValueError(f"{self.name} has {self.n_tasks} tasks: choose between 1 and {self.n_tasks}, not {tasks}")
        if epochs is not None and epochs < 1:
            raise ValueError(f"a stage has at least 1 epoch; got {epochs}")
        cut = []
        if tasks is not None and tasks < self.n_tasks:
            cut.append(f"{tasks} of {self.n_tasks} tasks")
        if epochs is not None and epochs < self._longest():
            cut.append(f"at most {epochs} instead of {self._longest()} epochs a stage")

        def shorter(recipe: AnyRecipe) -> AnyRecipe:
            return recipe if epochs is None else replace(recipe, epochs=min(epochs, recipe.epochs))

        return replace(
            self,
            n_tasks=tasks or self.n_tasks,
            recipe=shorter(self.recipe),
            recipes={method: shorter(recipe) for method, recipe in self.recipes.items()},
            budget=", ".join(filter(None, [self.budget, *cut])),
        )

    def _longest(self) -> int:
        return max(recipe.epochs for recipe in (self.recipe, *self.recipes.values()))

    def at(self, dataset_root: str | PathLike[str]) -> BenchmarkPreset:
        """The same with its data in this folder, if it needs any."""
        return replace(self, dataset_root=dataset_root) if self.data else self

    def open(self, seed: int, device: str | torch.device = "cpu") -> Any:
        """The stream, with its data kept on a device."""
        if not self.data:
            return self.stream(seed)
        if self.dataset_root is None:
            needed = ", ".join(source.name for source in self.data)
            raise ValueError(f"{self.name} needs {needed} on disk; say in which folder with dataset_root")
        return self.stream(seed, dataset_root=self.dataset_root, device=device)

"""Training recipes: optimizer, batch size and schedule of every stage of every task."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from annotated_types import Ge, Gt
from pydantic import AllowInfNan, ConfigDict, Field
from pydantic.dataclasses import dataclass

if TYPE_CHECKING:
    import torch
    from avalanche.training.plugins import SupervisedPlugin
    from torch import nn

Positive = Annotated[float, Gt(0), AllowInfNan(False)]
Count = Annotated[int, Ge(1)]
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class Recipe:
    """Plain SGD until the validation loss reaches a plateau (``PlateauPlugin``).

    ``epochs`` is the maximum number of epochs per stage. ``patience``, ``factor`` and ``lr_min`` are those of
    ``PlateauPlugin``.

    >>> from became_avalanche import MultiHeadMLP, Recipe
    >>> recipe = Recipe(learning_rate=0.1, batch_size=64, epochs=50, patience=4, factor=3, lr_min=0.005)
    >>> recipe.optimizer(MultiHeadMLP()).defaults["lr"], type(recipe.plugins()[0]).__name__
    (0.1, 'PlateauPlugin')
    """

    learning_rate: Positive
    batch_size: Count
    epochs: Count
    """Maximum number of epochs per stage."""
    patience: Count
    """Epochs without improvement before the learning rate drops."""
    factor: Annotated[float, Gt(1), AllowInfNan(False)]
    """The learning rate is divided by this factor when it drops."""
    lr_min: Positive
    """A stage ends when the learning rate would drop below this value."""
    kind: Literal["sgd"] = "sgd"

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer for a model that has not been trained yet."""
        import torch

        return torch.optim.SGD(model.parameters(), lr=self.learning_rate)

    def plugins(self) -> list[SupervisedPlugin]:
        """Return new plugins that implement the schedule."""
        from became_avalanche.plugins.plateau import PlateauPlugin

        return [PlateauPlugin(self.patience, self.factor, self.lr_min)]


@dataclass(frozen=True, config=_STRICT)
class NSCLRecipe:
    """Adam until the training loss reaches its third plateau (``TrainingPlateauPlugin``).

    The backbone has ``learning_rate`` in the first task and ``later_rate`` in later ones. The heads have ``head_rate``,
    and normalisation layers have ``normalisation_rate``. ``patience``, ``factor`` and ``plateaus`` are those of
    ``TrainingPlateauPlugin``, and ``epochs`` is the maximum number of epochs per stage.

    >>> from became_avalanche import NSCLRecipe
    >>> [type(plugin).__name__ for plugin in NSCLRecipe(batch_size=32).plugins()]
    ['LaterTaskLR', 'TrainingPlateauPlugin']
    """

    batch_size: Count
    learning_rate: Positive = 1e-4
    """Learning rate of the backbone in the first task."""
    later_rate: Positive = 5e-5
    """Learning rate of the backbone in later tasks."""
    head_rate: Positive = 1e-3
    """Learning rate of the heads."""
    normalisation_rate: Positive = 5e-4
    """Learning rate of normalisation layers."""
    weight_decay: Annotated[float, Ge(0), AllowInfNan(False)] = 5e-5
    epochs: Count = 80
    """Maximum number of epochs per stage."""
    patience: Count = 3
    """Epochs without improvement that make a plateau."""
    factor: Annotated[float, Gt(1), AllowInfNan(False)] = 2
    """The learning rate is divided by this factor at each plateau."""
    plateaus: Count = 3
    """A stage ends at this plateau."""
    kind: Literal["nscl"] = "nscl"

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer for a model that has not been trained yet."""
        import torch

        from became_avalanche.plugins.nscl import nscl_groups

        groups = nscl_groups(
            model,
            lr=self.learning_rate,
            head_lr=self.head_rate,
            normalisation_lr=self.normalisation_rate,
            weight_decay=self.weight_decay,
        )
        return torch.optim.Adam(groups)

    def plugins(self) -> list[SupervisedPlugin]:
        """Return new plugins that implement the schedule."""
        from became_avalanche.plugins.nscl import LaterTaskLR
        from became_avalanche.plugins.plateau import TrainingPlateauPlugin

        return [LaterTaskLR(self.later_rate), TrainingPlateauPlugin(self.patience, self.factor, self.plateaus)]


RECIPES: dict[str, Any] = {"sgd": Recipe, "nscl": NSCLRecipe}
"""Recipes by ``kind``."""

AnyRecipe = Annotated[Recipe | NSCLRecipe, Field(discriminator="kind")]


def limit_epochs(recipe: Any, epochs: int | None) -> Any:
    """Return the recipe with at most this many epochs per stage. None keeps the recipe as it is."""
    return recipe if epochs is None else replace(recipe, epochs=min(epochs, recipe.epochs))

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
    """Plain SGD until the validation loss reaches a plateau (``PlateauPlugin``)."""

    learning_rate: Positive
    batch_size: Count
    epochs: Count
    """At most, per stage."""
    patience: Count
    """Epochs without improvement before the learning rate drops."""
    factor: Annotated[float, Gt(1), AllowInfNan(False)]
    """The learning rate is divided by it."""
    lr_min: Positive
    """A stage ends instead of going below this learning rate."""
    kind: Literal["sgd"] = "sgd"

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """An optimizer for a model before its first task."""
        import torch

        return torch.optim.SGD(model.parameters(), lr=self.learning_rate)

    def plugins(self) -> list[SupervisedPlugin]:
        """Fresh plugins of the schedule."""
        from became_avalanche.plugins.plateau import PlateauPlugin

        return [PlateauPlugin(self.patience, self.factor, self.lr_min)]


@dataclass(frozen=True, config=_STRICT)
class NSCLRecipe:
    """Adam until the training loss reaches its third plateau (``TrainingPlateauPlugin``)."""

    batch_size: Count
    learning_rate: Positive = 1e-4
    """Backbone, first task."""
    later_rate: Positive = 5e-5
    """Backbone, later tasks."""
    head_rate: Positive = 1e-3
    normalisation_rate: Positive = 5e-4
    weight_decay: Annotated[float, Ge(0), AllowInfNan(False)] = 5e-5
    epochs: Count = 80
    """At most, per stage."""
    patience: Count = 3
    factor: Annotated[float, Gt(1), AllowInfNan(False)] = 2
    plateaus: Count = 3
    """A stage ends at this plateau."""
    kind: Literal["nscl"] = "nscl"

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """An optimizer for a model before its first task."""
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
        """Fresh plugins of the schedule."""
        from became_avalanche.plugins.nscl import LaterTaskLR
        from became_avalanche.plugins.plateau import TrainingPlateauPlugin

        return [LaterTaskLR(self.later_rate), TrainingPlateauPlugin(self.patience, self.factor, self.plateaus)]


RECIPES: dict[str, Any] = {"sgd": Recipe, "nscl": NSCLRecipe}
"""By their ``kind``."""

AnyRecipe = Annotated[Recipe | NSCLRecipe, Field(discriminator="kind")]


def at_most(recipe: Any, epochs: int | None) -> Any:
    """The same recipe with at most this many epochs per stage."""
    return recipe if epochs is None else replace(recipe, epochs=min(epochs, recipe.epochs))

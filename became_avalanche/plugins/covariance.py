"""What the methods share that remember the covariance of all inputs so far."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING

from torch import Tensor

from became_avalanche.plugins.projection import GradientProjectionPlugin, ProjectionOptions
from became_avalanche.subspace.basis import directions
from became_avalanche.subspace.inputs import InputMatrix

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CovariancePlugin(GradientProjectionPlugin, ABC):
    """Remembers ``C = A Aᵀ`` of the inputs of all experiences, uncentred, as the fewest columns that have it."""

    def __init__(self, n_samples: int | None = None, **options: Unpack[ProjectionOptions]) -> None:
        super().__init__(n_samples, **options)

    def update_memory(self, name: str, observed: InputMatrix) -> None:
        if name in self.memory:
            observed.add(self.memory[name]["inputs"])
        self.memory[name] = {"inputs": observed.compressed()}

    def spectrum(self, name: str) -> tuple[Tensor, Tensor]:
        """Eigenvalues of ``C`` above 0, descending, and their eigenvectors."""
        strengths, vectors = directions(self.memory[name]["inputs"])
        return strengths.square(), vectors

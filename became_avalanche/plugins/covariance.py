"""Base class of the methods that store the covariance of all inputs so far (NSCL and OWM)."""

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
    """Stores the uncentred covariance ``C = A Aᵀ`` of the inputs ``A`` of all experiences, as a minimal square root."""

    def __init__(self, n_samples: int | None = None, **options: Unpack[ProjectionOptions]) -> None:
        super().__init__(n_samples, **options)

    def update_memory(self, name: str, observed: InputMatrix) -> None:
        if name in self.memory:
            observed.add(self.memory[name]["inputs"])
        self.memory[name] = {"inputs": observed.compressed()}

    def spectrum(self, name: str) -> tuple[Tensor, Tensor]:
        """Return the positive eigenvalues of ``C`` in descending order, and their eigenvectors."""
        singular_values, vectors = directions(self.memory[name]["inputs"])
        return singular_values.square(), vectors

"""OWM: Orthogonal Weight Modification (Zeng et al., Nature Machine Intelligence 2019)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from became_avalanche.plugins.covariance import CovariancePlugin
from became_avalanche.plugins.projection import ProjectionOptions

if TYPE_CHECKING:
    from typing_extensions import Unpack


class OWMPlugin(CovariancePlugin):
    """Orthogonal Weight Modification.

    Updates are multiplied by ``P = α (α I + C)⁻¹``, where ``C = A Aᵀ`` is made of the inputs of all experiences so
    far: a direction with energy ``e`` keeps ``α / (α + e)`` of its update. The published recursion over single inputs
    converges to the same ``P``; its code runs it on means of batches during training, here the memory is updated after
    each experience.
    """

    def __init__(self, alpha: float = 1.0, n_samples: int | None = None, **options: Unpack[ProjectionOptions]) -> None:
        """Init.

        :param alpha: energy at which half of an update is left, in units of the inputs. Energies are sums over
            samples, so it has to be seen in proportion to ``n_samples``.
        :param n_samples: training samples of each experience whose layer inputs enter the memory; None for all.
        :param options: those of ``GradientProjectionPlugin``.
        """
        super().__init__(n_samples, **options)
        if not alpha > 0:
            raise ValueError(f"alpha must be above 0; got {alpha}")
        self.alpha = alpha

    def protected(self, name: str) -> tuple[Tensor, Tensor | None]:
        energies, vectors = self.spectrum(name)
        return vectors, energies / (self.alpha + energies)

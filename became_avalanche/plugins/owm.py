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

    Updates are multiplied by ``P = α (α I + C)⁻¹``, where ``C = A Aᵀ`` is the uncentred covariance of the inputs of
    all experiences so far. A direction with energy ``e`` keeps ``α / (α + e)`` of its update.

    The published recursion over single inputs converges to the same ``P``. The published code runs it on batch means
    during training. Here the memory is updated once after each experience.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from became_avalanche import MultiHeadMLP, OWMPlugin, split_digits
    >>> model, plugin = MultiHeadMLP(), OWMPlugin(alpha=1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> strategy = Naive(model=model, optimizer=optimizer, train_mb_size=64, evaluator=None, plugins=[plugin])
    >>> _ = strategy.train(split_digits().train_stream[:2])
    >>> directions, removed = plugin.protected("features.1.weight")
    >>> bool((removed > 0).all() and (removed < 1).all())  # a soft projection
    True
    """

    def __init__(self, alpha: float = 1.0, n_samples: int | None = None, **options: Unpack[ProjectionOptions]) -> None:
        """Init.

        :param alpha: energy of a direction that keeps half of its update. Energies are sums of squared inputs over
            all samples, so ``alpha`` has to scale with the inputs and with ``n_samples``.
        :param n_samples: number of training samples per experience whose layer inputs enter the memory; None for all.
        :param options: options of ``GradientProjectionPlugin``.
        """
        super().__init__(n_samples, **options)
        if not alpha > 0:
            raise ValueError(f"alpha must be above 0; got {alpha}")
        self.alpha = alpha

    def protected(self, name: str) -> tuple[Tensor, Tensor | None]:
        energies, vectors = self.spectrum(name)
        return vectors, energies / (self.alpha + energies)

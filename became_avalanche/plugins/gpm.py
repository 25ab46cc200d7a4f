"""GPM: Gradient Projection Memory (Saha et al., ICLR 2021)."""

from __future__ import annotations

from torch import Tensor

from became_avalanche.plugins.threshold import EnergyThresholdPlugin
from became_avalanche.subspace.basis import grow_basis
from became_avalanche.subspace.inputs import InputMatrix


class GPMPlugin(EnergyThresholdPlugin):
    """Gradient Projection Memory.

    Stores an orthonormal basis ``U`` per layer. After experience ``t`` the basis is extended until it holds a fraction
    ``threshold + (t - 1) * increment`` of the energy of the layer's inputs in that experience. Later updates lose
    their component in the span of ``U``: ``G <- G − G U Uᵀ``.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from became_avalanche import GPMPlugin, MultiHeadMLP, split_digits
    >>> model, plugin = MultiHeadMLP(), GPMPlugin(threshold=0.97, n_samples=None)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> strategy = Naive(model=model, optimizer=optimizer, train_mb_size=64, evaluator=None, plugins=[plugin])
    >>> _ = strategy.train(split_digits().train_stream[:2])
    >>> plugin.ranks()["features.1.weight"]  # protected directions of the 64 inputs
    23
    """

    def update_memory(self, name: str, observed: InputMatrix) -> None:
        first = name not in self.memory
        old = observed.empty_basis() if first else self.memory[name]["basis"]
        threshold = self.threshold_of(self.experiences + 1)
        self.memory[name] = {"basis": grow_basis(old, observed, threshold, below=self.reference and first)}

    def protected(self, name: str) -> tuple[Tensor, Tensor | None]:
        return self.memory[name]["basis"], None

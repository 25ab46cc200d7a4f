"""GPM: Gradient Projection Memory (Saha et al., ICLR 2021)."""

from __future__ import annotations

from torch import Tensor

from became_avalanche.plugins.threshold import EnergyThresholdPlugin
from became_avalanche.subspace.basis import grow_basis
from became_avalanche.subspace.inputs import InputMatrix


class GPMPlugin(EnergyThresholdPlugin):
    """Gradient Projection Memory.

    Stores an orthonormal basis ``U`` per layer that holds a fraction ``threshold + (t - 1) * increment`` of the energy
    of the layer's inputs in each experience ``t``, and removes its span from later updates: ``G <- G − G U Uᵀ``.
    """

    def update_memory(self, name: str, observed: InputMatrix) -> None:
        first = name not in self.memory
        old = observed.empty_basis() if first else self.memory[name]["basis"]
        threshold = self.threshold_of(self.experiences + 1)
        self.memory[name] = {"basis": grow_basis(old, observed, threshold, below=self.reference and first)}

    def protected(self, name: str) -> tuple[Tensor, Tensor | None]:
        return self.memory[name]["basis"], None

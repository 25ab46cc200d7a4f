"""GPM: Gradient Projection Memory (Saha et al., ICLR 2021)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import Tensor

from became_avalanche.plugins.projection import GradientProjectionPlugin
from became_avalanche.subspace.basis import Projector, grow_basis
from became_avalanche.subspace.layers import InputMatrix


class GPMPlugin(GradientProjectionPlugin):
    """Gradient Projection Memory.

    Stores an orthonormal basis ``U`` per layer that holds a fraction ``threshold + (t - 1) * increment`` of the energy
    of the layer's inputs in each experience ``t``, and removes its span from later updates: ``G <- G − G U Uᵀ``.

    The defaults are the settings of the GPM and BECAME papers for 10-Split CIFAR-100.
    """

    def __init__(
        self,
        threshold: float = 0.97,
        increment: float = 0.003,
        n_samples: int | None = 125,
        *,
        bias: Literal["freeze", "augment", "free"] = "freeze",
        exclude: Sequence[str] = (),
        strict: bool = False,
        reference: bool = False,
    ) -> None:
        """Init.

        :param threshold: fraction of the input energy that the basis holds after the first experience, in [0, 1].
        :param increment: added to the threshold with each further experience. Beyond 1, all that has energy is held.
        :param n_samples: training samples of each experience whose layer inputs enter the memory; None for all.
        :param bias: what happens to the biases of protected layers after the first experience: "freeze", "augment"
            (protected together with the weight) or "free".
        :param exclude: names of modules to leave alone, with everything below them.
        :param strict: raise an error, instead of a warning, if the model has parameters that cannot be protected.
        :param reference: the rule of the published code for the first experience, whose basis stays just below the
            threshold, instead of that of the paper, which reaches it.
        """
        super().__init__(n_samples, bias=bias, exclude=exclude, strict=strict)
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold is a fraction of energy between 0 and 1; got {threshold}")
        if not 0 <= increment <= 1:
            raise ValueError(f"increment is a fraction of energy between 0 and 1; got {increment}")
        self.threshold = threshold
        self.increment = increment
        self.reference = reference

    def update_memory(self, name: str, inputs: InputMatrix) -> None:
        threshold = self.threshold + self.experiences * self.increment
        first = name not in self.memory
        old = inputs.empty_basis() if first else self.memory[name]["basis"]
        self.memory[name] = {"basis": grow_basis(old, inputs, threshold, below=self.reference and first)}

    def projector(self, name: str) -> Callable[[Tensor], Tensor]:
        return Projector.away_from(self.memory[name]["basis"])

"""Base class of the methods that keep a growing fraction of the energy (GPM, SGP, TRGP and GPCNS)."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Literal

from became_avalanche.plugins.projection import GradientProjectionPlugin, ProjectionOptions


class ThresholdOptions(ProjectionOptions, total=False):
    """Options that GPM, SGP, TRGP and GPCNS share; see ``GPMPlugin``."""

    threshold: float
    increment: float
    n_samples: int | None
    reference: bool


class EnergyThresholdPlugin(GradientProjectionPlugin, ABC):
    """Stores directions that hold a fraction ``threshold + (t - 1) * increment`` of the energy of experience ``t``."""

    def __init__(
        self,
        threshold: float = 0.97,
        increment: float = 0.003,
        n_samples: int | None = 125,
        *,
        bias: Literal["freeze", "augment", "free"] = "freeze",
        exclude: Sequence[str] = (),
        freeze: Sequence[str] = (),
        strict: bool = False,
        verbose: bool = False,
        reference: bool = False,
    ) -> None:
        """Init. The defaults are the settings of the papers for 10-Split CIFAR-100.

        :param threshold: fraction of the energy of the first experience to hold, in [0, 1].
        :param increment: added to the threshold with each further experience. A threshold above 1 counts as 1.
        :param n_samples: number of training samples per experience that enter the memory; None for all.
        :param bias: what happens to the biases of protected layers after the first experience: "freeze", "augment"
            (protected together with the weight) or "free".
        :param exclude: names of modules or parameters to leave unprotected. A module includes all its submodules.
        :param freeze: names of modules or parameters that train in the first experience only. Use it for constants
            such as a class token, which no projection can protect.
        :param strict: raise an error, instead of a warning, if the model has parameters that cannot be protected.
        :param verbose: print ``report()`` once, after the first experience.
        :param reference: follow the published code where it differs from its paper. For all methods, the basis of the
            first experience then stays just below the threshold instead of reaching it.
        """
        super().__init__(n_samples, bias=bias, exclude=exclude, freeze=freeze, strict=strict, verbose=verbose)
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold must be a fraction of energy between 0 and 1; got {threshold}")
        if not 0 <= increment <= 1:
            raise ValueError(f"increment must be a fraction of energy between 0 and 1; got {increment}")
        self.threshold = threshold
        self.increment = increment
        self.reference = reference

    def threshold_of(self, t: int) -> float:
        """Return the threshold of task ``t``, counted from 1."""
        return self.threshold + (t - 1) * self.increment

    def single_precision(self) -> bool:
        """Return True while the energy that the threshold leaves out is much larger than rounding errors in float32."""
        return self.threshold_of(self.experiences + 1) <= 1 - 1e-3

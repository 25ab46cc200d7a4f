"""Statistics over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import sqrt
from statistics import fmean, stdev

import numpy as np
from scipy.special import stdtrit

EXACT = 15
"""Up to so many seeds the permutation test visits all 2^n sign patterns; beyond, it draws 2^15 of them."""


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds."""

    mean: float
    std: float | None
    """Standard deviation of a sample; None for a single value."""
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """The spread of one value per seed."""
        return Spread(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Paired:
    """What one method gains over another, seed by seed."""

    gain: Spread
    interval: tuple[float, float] | None
    """95 % confidence interval of the mean gain, from Student's t; None for a single seed."""
    p: float | None
    """Two-sided p of the sign-flip permutation test; None for a single seed. It cannot be less than 2/2^n."""


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Paired:
    """The gains of ``ours`` over ``theirs``, two values per seed in the same order of seeds."""
    gains = [our - their for our, their in zip(ours, theirs, strict=True)]
    spread = Spread.of(gains)
    if spread.std is None:
        return Paired(spread, None, None)
    half = float(stdtrit(spread.n - 1, 0.975)) * spread.std / sqrt(spread.n)
    return Paired(spread, (spread.mean - half, spread.mean + half), sign_flip_p(gains))


def sign_flip_p(gains: Sequence[float]) -> float:
    """Two-sided p of the hypothesis that the gains are symmetric around zero.

    It is the share of sign patterns whose mean is at least as far from zero as the observed one. The test assumes no
    distribution, and it is exact up to ``EXACT`` seeds.
    """
    n = len(gains)
    if n <= EXACT:
        signs = np.array(list(product((1, -1), repeat=n)))
    else:  # the observed pattern comes first, so that p is never zero
        drawn = np.random.default_rng(0).choice((1, -1), size=(2**EXACT, n))
        signs = np.vstack([np.ones((1, n), dtype=drawn.dtype), drawn])
    sums = np.abs(signs @ np.asarray(gains))
    rounding = 1e-12 * np.sum(np.abs(gains))  # sums that are equal but for the order of their terms count as equal
    return float(np.mean(sums >= sums[0] - rounding))

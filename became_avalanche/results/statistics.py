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
"""Up to this number of seeds, the permutation test visits all 2^n sign patterns. With more seeds it samples 2^15."""


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation over seeds."""

    mean: float
    std: float | None
    """Sample standard deviation (n − 1); None for a single value."""
    n: int

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Return mean and standard deviation of one value per seed."""
        return Spread(fmean(values), stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Paired:
    """Gain of one method over another, paired by seed."""

    gain: Spread
    interval: tuple[float, float] | None
    """95 % confidence interval of the mean gain, from Student's t distribution; None for a single seed."""
    p: float | None
    """Two-sided p-value of the sign-flip permutation test, at least 2/2^n with n seeds; None for a single seed."""


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Paired:
    """Return the gain of ``ours`` over ``theirs``: one value per seed each, in the same order of seeds."""
    gains = [our - their for our, their in zip(ours, theirs, strict=True)]
    spread = Spread.of(gains)
    if spread.std is None:
        return Paired(spread, None, None)
    half = float(stdtrit(spread.n - 1, 0.975)) * spread.std / sqrt(spread.n)
    return Paired(spread, (spread.mean - half, spread.mean + half), sign_flip_p(gains))


def sign_flip_p(gains: Sequence[float]) -> float:
    """Return the two-sided p-value of the hypothesis that the gains are symmetric around zero.

    It is the share of sign patterns whose mean is at least as far from zero as the observed mean. The test assumes no
    distribution and is exact up to ``EXACT`` seeds.
    """
    n = len(gains)
    if n <= EXACT:
        signs = np.array(list(product((1, -1), repeat=n)))
    else:  # the observed pattern comes first, so p is never zero
        drawn = np.random.default_rng(0).choice((1, -1), size=(2**EXACT, n))
        signs = np.vstack([np.ones((1, n), dtype=drawn.dtype), drawn])
    sums = np.abs(signs @ np.asarray(gains))
    rounding = 1e-12 * np.sum(np.abs(gains))  # sums that differ only by rounding count as equal
    return float(np.mean(sums >= sums[0] - rounding))

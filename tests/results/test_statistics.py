from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from became_avalanche.results.statistics import EXACT, Spread, paired, sign_flip_p

GAINS = st.lists(st.integers(-20, 20).map(lambda n: n / 100), min_size=2, max_size=7)


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=5))
def test_spread(values):
    spread = Spread.of(values)
    assert spread.n == len(values)
    assert spread.mean == pytest.approx(np.mean(values), abs=1e-12)
    assert (spread.std is None) == (len(values) == 1)
    if spread.std is not None:
        assert spread.std == pytest.approx(np.std(values, ddof=1), abs=1e-12)


@given(GAINS)
def test_paired(gains):
    theirs = np.linspace(0.3, 0.9, len(gains))
    result = paired(list(theirs + gains), list(theirs))
    n, mean, std = len(gains), np.mean(gains), np.std(gains, ddof=1)
    assert (result.gain.mean, result.gain.std) == pytest.approx((mean, std), abs=1e-12)
    half = stats.t(n - 1).ppf(0.975) * std / np.sqrt(n)
    assert result.interval == pytest.approx((mean - half, mean + half), abs=1e-12)


@given(GAINS)
def test_p_is_the_share_of_sign_patterns_at_least_as_far_from_zero(gains):
    hundredths = [round(100 * gain) for gain in gains]  # the oracle uses integers to avoid rounding
    sums = [
        abs(sum(s * h for s, h in zip(signs, hundredths, strict=True))) for signs in product((1, -1), repeat=len(gains))
    ]
    assert sign_flip_p(gains) == sum(s >= abs(sum(hundredths)) for s in sums) / len(sums)


@pytest.mark.parametrize("n", [2, 5, EXACT])
def test_gains_of_one_sign_have_the_least_p(n):
    assert sign_flip_p([0.01 * (k + 1) for k in range(n)]) == 2 / 2**n


def test_no_gain_at_all_is_no_evidence():
    result = paired([0.5, 0.6, 0.7], [0.5, 0.6, 0.7])
    assert (result.gain.mean, result.interval, result.p) == (0, (0, 0), 1)


def test_more_seeds_than_can_be_enumerated():
    gains = np.random.default_rng(1).normal(0.1, 1, size=EXACT + 3)
    reference = stats.permutation_test(
        (gains,), np.mean, permutation_type="samples", n_resamples=2 ** len(gains), vectorized=True, batch=2**14
    )
    assert 0.05 < reference.pvalue < 0.95
    assert sign_flip_p(gains) == pytest.approx(reference.pvalue, abs=0.01)
    assert 0 < sign_flip_p([1.0] * 40) < 1e-4


def test_a_single_seed_has_neither_interval_nor_p():
    result = paired([0.75], [0.5])
    assert (result.gain, result.interval, result.p) == (Spread(0.25, None, 1), None, None)


def test_unpaired_values_are_refused():
    with pytest.raises(ValueError, match="zip"):
        paired([0.5, 0.6], [0.5])

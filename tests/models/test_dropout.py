from copy import deepcopy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from became_avalanche.models.dropout import Dropout


def ones(n):
    return torch.ones(n)


@pytest.mark.parametrize("p", [0.001, 0.2, 0.5, 0.9])
def test_values_are_dropped_with_the_given_probability(p):
    torch.manual_seed(0)
    n = 400_000
    y = Dropout(p)(ones(n))
    dropped = int((y == 0).sum())
    assert stats.binomtest(dropped, n, p).pvalue > 1e-3
    kept = y[y != 0]
    assert kept.unique().numel() == 1
    assert kept[0].item() == pytest.approx(1 / (1 - p), abs=2**-16 / (1 - p) ** 2)


def test_neighbours_are_dropped_independently():
    torch.manual_seed(0)
    zero = (Dropout(0.3)(ones(400_000)) == 0).double()
    for lag in (1, 2, 3, 4, 64):
        correlation = torch.corrcoef(torch.stack([zero[:-lag], zero[lag:]]))[0, 1].item()
        assert abs(correlation) < 4 / len(zero) ** 0.5


def test_each_of_four_words_in_a_draw_has_the_right_probability():
    torch.manual_seed(0)
    zero = (Dropout(0.2)(ones(400_000)) == 0).reshape(-1, 4).sum(0)
    for dropped in zero.tolist():
        assert stats.binomtest(dropped, 100_000, 0.2).pvalue > 1e-3


@settings(deadline=None)
@given(shape=st.lists(st.integers(0, 5), min_size=0, max_size=4), p=st.floats(0, 1), flip=st.booleans())
def test_any_shape_and_probability(shape, p, flip):
    x = 2.0 ** torch.randint(-3, 4, shape)  # so that quotients are exact
    x = (x.mT if flip and len(shape) > 1 else x).requires_grad_()
    y = Dropout(p)(x)
    assert y.shape == x.shape
    factor = (y / x).detach()
    assert factor.unique().numel() <= 2
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, factor)


@pytest.mark.parametrize(("p", "expected"), [(0.0, 1.0), (1.0, 0.0)])
def test_the_ends_are_exact(p, expected):
    assert torch.equal(Dropout(p)(ones(1000)), torch.full((1000,), expected))


def test_memory_format_is_kept():
    x = torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last)
    assert Dropout()(x).is_contiguous(memory_format=torch.channels_last)


def test_seeds_and_random_states_decide_the_mask():
    dropout = Dropout()
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first, second = dropout(ones(100)), dropout(ones(100))
    torch.set_rng_state(state)
    assert torch.equal(dropout(ones(100)), first)
    assert torch.equal(dropout(ones(100)), second)
    assert not torch.equal(first, second)


def test_nothing_is_dropped_or_drawn_in_evaluation():
    dropout, x = Dropout().eval(), ones(100)
    state = torch.get_rng_state()
    assert dropout(x) is x
    assert torch.equal(torch.get_rng_state(), state)


def test_in_place():
    torch.manual_seed(0)
    x = ones(100)
    assert Dropout(inplace=True)(x) is x
    assert 0 in x


def test_copies_have_the_same_settings_and_no_state():
    copy = deepcopy(Dropout(0.3))
    assert copy.p == 0.3
    assert not copy.state_dict()


@pytest.mark.parametrize("p", [-0.1, 1.1])
def test_impossible_probabilities_are_refused(p):
    with pytest.raises(ValueError, match="dropout probability has to be between 0 and 1"):
        Dropout(p)

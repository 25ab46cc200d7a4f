import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from became_avalanche.merging.rules import Merge, became, norm, quadratic_form
from tests import oracles

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3)
seeds = st.integers(0, 2**16)


def random_merge(shape_list, seed, t=3):
    generator = torch.Generator().manual_seed(seed)

    def weights():
        return {str(i): torch.randn(n, generator=generator).double() for i, n in enumerate(shape_list)}

    def diagonal():
        return {name: tensor**2 for name, tensor in weights().items()}

    return Merge(t, weights(), weights(), weights(), diagonal(), diagonal())


def flat(weights):
    return torch.cat([tensor.flatten() for tensor in weights.values()]).double().numpy()


@given(sizes, seeds)
def test_coefficient_minimises_the_objective_on_the_line(shape_list, seed):
    merge = random_merge(shape_list, seed)
    delta = flat(merge.candidate) - flat(merge.base)
    grid = np.linspace(0, 1, 2001)
    objective = [oracles.line_objective(w, delta, flat(merge.fisher), flat(merge.precision)) for w in grid]
    coefficient = became(merge)
    assert 0 <= coefficient <= 1
    assert abs(coefficient - grid[np.argmin(objective)]) <= 1 / 2000


@given(sizes, seeds, st.floats(1e-6, 1e6))
def test_scale_of_all_fishers_does_not_matter(shape_list, seed, scale):
    merge = random_merge(shape_list, seed)
    scaled = Merge(
        merge.t,
        merge.anchor,
        merge.base,
        merge.candidate,
        {name: scale * f for name, f in merge.fisher.items()},
        {name: scale * f for name, f in merge.precision.items()},
    )
    assert became(scaled) == pytest.approx(became(merge))


@given(sizes, seeds, st.integers(2, 20))
def test_equal_fishers_give_one_over_t(shape_list, seed, t):
    merge = random_merge(shape_list, seed, t)
    equal = {name: (t - 1) * f for name, f in merge.fisher.items()}
    merge = Merge(t, merge.anchor, merge.base, merge.candidate, merge.fisher, equal)
    assert became(merge) == pytest.approx(1 / t)


def with_terms(fisher, precision, delta=(1.0, 2.0)):
    base = torch.zeros(2)
    return Merge(
        4,
        {"w": base},
        {"w": base},
        {"w": torch.tensor(delta)},
        {"w": torch.tensor(fisher)},
        {"w": torch.tensor(precision)},
    )


def test_degenerate_cases():
    assert became(with_terms((1.0, 1.0), (0.0, 0.0))) == 1
    assert became(with_terms((0.0, 0.0), (1.0, 1.0))) == 0
    assert became(with_terms((1.0, 1.0), (1.0, 1.0), delta=(0.0, 0.0))) == 0
    with pytest.warns(UserWarning, match=r"task 4.*undefined.*1/t = 0\.250"):
        assert became(with_terms((0.0, 0.0), (0.0, 0.0))) == 0.25
    with pytest.warns(UserWarning, match="undefined"):
        assert became(with_terms((1.0, 0.0), (1.0, 0.0), delta=(0.0, 1.0))) == 0.25


@given(seeds)
def test_merging_quadratic_losses_beats_both_ends(seed):
    """Linear regression with orthogonal inputs: the Fisher information is diagonal and the loss exactly quadratic."""
    generator = np.random.default_rng(seed)
    d = 4
    optima = generator.normal(size=(2, d))
    hessians = generator.uniform(0.1, 3, size=(2, d))
    assume(np.abs(optima[0] - optima[1]).max() > 1e-3)

    def loss(theta):
        return sum(0.5 * np.sum(h * (theta - optimum) ** 2) for h, optimum in zip(hessians, optima, strict=True))

    base, candidate = ({"w": torch.from_numpy(optimum)} for optimum in optima)
    fisher, precision = {"w": torch.from_numpy(hessians[1])}, {"w": torch.from_numpy(hessians[0])}
    coefficient = became(Merge(2, base, base, candidate, fisher, precision))
    merged = torch.lerp(base["w"], candidate["w"], coefficient).numpy()
    assert loss(merged) <= min(loss(optima[0]), loss(optima[1])) + 1e-12


@given(sizes, seeds)
def test_forms_and_norms_equal_dense_algebra(shape_list, seed):
    merge = random_merge(shape_list, seed)
    delta, drift, diagonal = flat(merge.delta), flat(merge.drift), np.diag(flat(merge.precision))
    assert quadratic_form(merge.drift, merge.precision, merge.delta) == pytest.approx(drift @ diagonal @ delta)
    assert norm(merge.delta) == pytest.approx(np.linalg.norm(delta))
    np.testing.assert_allclose(delta, flat(merge.candidate) - flat(merge.base))
    np.testing.assert_allclose(drift, flat(merge.base) - flat(merge.anchor))

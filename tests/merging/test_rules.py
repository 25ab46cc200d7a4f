import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from became_avalanche.merging.rules import (
    RULES,
    Became,
    CoFiMA,
    Constant,
    MergeInputs,
    became,
    mean_coefficient,
    norm,
    quadratic_form,
)
from tests import oracles

sizes = st.lists(st.integers(1, 5), min_size=1, max_size=3)
seeds = st.integers(0, 2**16)


def random_merge(shape_list, seed, t=3):
    generator = torch.Generator().manual_seed(seed)

    def weights():
        return {str(i): torch.randn(n, generator=generator).double() for i, n in enumerate(shape_list)}

    def diagonal():
        return {name: tensor**2 for name, tensor in weights().items()}

    return MergeInputs(t, weights(), weights(), weights(), diagonal(), diagonal())


def replaced(merge, **changes):
    return dataclasses.replace(merge, **changes)


def flat(weights):
    return torch.cat([tensor.flatten() for tensor in weights.values()]).double().numpy()


@given(sizes, seeds)
def test_coefficient_minimises_the_objective_on_the_line(shape_list, seed):
    merge = random_merge(shape_list, seed)
    delta, fisher, precision = flat(merge.candidate) - flat(merge.base), flat(merge.fisher), flat(merge.precision)
    grid = np.linspace(0, 1, 2001)
    objective = [oracles.line_objective(w, delta, fisher, precision) for w in grid]
    coefficient = became(merge)
    assert 0 <= coefficient <= 1
    assert abs(coefficient - grid[np.argmin(objective)]) <= 1 / 2000


@given(sizes, seeds, st.floats(1e-6, 1e6))
def test_scale_of_all_fishers_does_not_matter(shape_list, seed, scale):
    merge = random_merge(shape_list, seed)
    scaled = MergeInputs(
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
    merge = MergeInputs(t, merge.anchor, merge.base, merge.candidate, merge.fisher, equal)
    assert became(merge) == pytest.approx(1 / t)


def with_terms(fisher, precision, delta=(1.0, 2.0)):
    base = torch.zeros(2)
    return MergeInputs(
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
    coefficient = became(MergeInputs(2, base, base, candidate, fisher, precision))
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


# ------------------------------------------------------------------------------------------------------- other rules


def objective(merge, weight):
    """Eq. 11 with Eq. 12 for one weight per element, without the assumption that the anchor equals the base."""
    delta, drift, fisher, precision = map(flat, (merge.delta, merge.drift, merge.fisher, merge.precision))
    return 0.5 * np.sum(fisher * ((weight - 1) * delta) ** 2) + 0.5 * np.sum(precision * (drift + weight * delta) ** 2)


def expanded(merge, coefficient):
    """A coefficient as one weight per element."""
    if isinstance(coefficient, float):
        return coefficient
    return np.concatenate([np.broadcast_to(coefficient[name], len(merge.base[name])) for name in merge.base])


@given(sizes, seeds)
def test_finer_rules_minimise_better(shape_list, seed):
    merge = random_merge(shape_list, seed)
    merge = replaced(merge, anchor=merge.base)  # what Eq. 20 assumes
    values = [objective(merge, expanded(merge, Became(granularity)(merge))) for granularity in GRANULARITIES]
    scalars = [objective(merge, weight) for weight in np.linspace(0, 1, 21)]
    assert values[0] <= values[1] + 1e-9 <= values[2] + 2e-9 <= min(scalars) + 3e-9


GRANULARITIES = ("element", "tensor", "global")


@given(sizes, seeds)
@settings(max_examples=20)
def test_exact_anchor_minimises_with_the_anchor_where_it_is(shape_list, seed):
    merge = random_merge(shape_list, seed)
    grid = np.linspace(0, 1, 501)
    best = grid[np.argmin([objective(merge, weight) for weight in grid])]
    assert abs(Became(exact_anchor=True)(merge) - best) <= 1 / 500
    for granularity in ("tensor", "element"):
        weights = expanded(merge, Became(granularity, exact_anchor=True)(merge))
        for change in (-0.01, 0.01):
            assert objective(merge, weights) <= objective(merge, np.clip(weights + change, 0, 1)) + 1e-9
    at_anchor = replaced(merge, anchor=merge.base)
    assert Became(exact_anchor=True)(at_anchor) == pytest.approx(became(at_anchor))


@given(sizes, seeds)
def test_element_rule_is_the_mode_of_imm(shape_list, seed):
    merge = random_merge(shape_list, seed)
    for name, weight in RULES["imm-mode"](merge).items():
        expected = merge.fisher[name] / (merge.fisher[name] + merge.precision[name])
        torch.testing.assert_close(weight, expected)


@given(seeds, st.integers(2, 6))
def test_one_over_t_makes_the_mean_of_all_models(seed, tasks):
    generator = torch.Generator().manual_seed(seed)
    models = torch.randn(tasks, 5, generator=generator).double()
    mean = models[0]
    for t, model in enumerate(models[1:], start=2):
        base, candidate = {"w": mean}, {"w": model}
        weight = RULES["one-over-t"](MergeInputs(t, base, base, candidate, {}, {}))
        mean = torch.lerp(mean, model, weight)
    torch.testing.assert_close(mean, models.mean(0))


@given(sizes, seeds, st.floats(0.1, 0.9))
def test_cofima_with_equal_fishers_is_constant(shape_list, seed, alpha):
    merge = random_merge(shape_list, seed)
    equal = replaced(merge, previous_fisher=merge.fisher)
    for weight in CoFiMA(alpha)(equal).values():
        torch.testing.assert_close(weight, torch.full_like(weight, Constant(alpha)(equal)))
    other = replaced(merge, previous_fisher=merge.precision)
    for name, weight in CoFiMA(alpha)(other).items():
        now, before = alpha * merge.fisher[name], (1 - alpha) * merge.precision[name]
        torch.testing.assert_close(weight, now / (now + before))


@pytest.mark.parametrize("rule", RULES)
def test_nothing_seen_and_nothing_moved_give_numbers(rule):
    """Elements with zero Fisher information, elements that did not move, and a head that is new or has grown."""
    zeros = {"w": torch.tensor([0.0, 0.0, 1.0, 1.0]), "head": torch.ones(3)}
    merge = MergeInputs(
        t=4,
        anchor={"w": torch.zeros(4), "head": torch.zeros(3)},
        base={"w": torch.zeros(4), "head": torch.zeros(3)},
        candidate={"w": torch.tensor([1.0, 0.0, 1.0, 0.0]), "head": torch.ones(3)},
        fisher=zeros,
        precision={"w": zeros["w"], "head": torch.zeros(3)},
        previous_fisher={"w": zeros["w"], "head": torch.ones(2)},
    )
    weight = RULES[rule](merge)
    for value in [weight] if isinstance(weight, float) else weight.values():
        value = torch.as_tensor(value)
        assert value.isfinite().all()
        assert (value >= 0).all()
        assert (value <= 1).all()
    assert 0 <= mean_coefficient(weight, merge.delta) <= 1
    elements = RULES["imm-mode"](merge)
    assert elements["w"].tolist() == [0.25, 0.0, 0.5, 0.0]
    assert elements["head"].tolist() == [1.0, 1.0, 1.0]
    assert CoFiMA(0.4)(merge)["w"].tolist() == pytest.approx([0.4, 0.4, 0.4, 0.4])
    assert CoFiMA(0.4)(merge)["head"].tolist() == pytest.approx([0.4, 0.4, 1.0])


def test_mean_coefficient_counts_what_moved():
    delta = {"a": torch.tensor([1.0, 0.0]), "b": torch.tensor([[2.0, 2.0]])}
    assert mean_coefficient(0.3, delta) == 0.3
    assert mean_coefficient({"a": torch.tensor([0.5, 0.9]), "b": torch.tensor(0.25)}, delta) == pytest.approx(1 / 3)
    assert mean_coefficient({"a": torch.tensor(1.0)}, {"a": torch.zeros(2)}) == 0


def test_unknown_granularity_is_refused():
    with pytest.raises(ValueError, match=r"granularity.*'layer'"):
        Became("layer")

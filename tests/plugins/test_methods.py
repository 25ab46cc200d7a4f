"""What each method remembers and projects, against the formulas."""

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from became_avalanche import GPCNSPlugin, GPMPlugin, NSCLPlugin, OWMPlugin, SGPPlugin, TRGPPlugin
from became_avalanche.layers.model import layers_of
from became_avalanche.plugins.projection import stored_like
from tests import oracles
from tests.layers.test_layers import columns_of, layers_with_inputs
from tests.subspace.test_basis import inputs, matrix_of, task_inputs

METHODS = {
    "gpm": GPMPlugin,
    "sgp": SGPPlugin,
    "trgp": TRGPPlugin,
    "gpcns": GPCNSPlugin,
    "nscl": NSCLPlugin,
    "owm": OWMPlugin,
}
energy_thresholds = st.floats(0.3, 0.99)
seeds = st.integers(0, 2**16)


def remember(plugin, *tasks):
    """Update the memory of ``plugin`` with the input columns of each task, as arrays (d, n) or (groups, d, n)."""
    for columns in tasks:
        plugin.update_memory("w", matrix_of(np.asarray(columns)))
        plugin.experiences += 1
    return plugin


def matrix(plugin, d, groups=1):
    """Return the projection matrix of each group."""
    identity = torch.eye(d, dtype=torch.float64).expand(groups, -1, -1)
    return plugin.projector("w")(identity).numpy()


def removed(plugin, d):
    return np.eye(d) - matrix(plugin, d)[0]


def test_the_published_rule_stays_below_the_threshold_in_the_first_task_alone():
    generator, threshold = np.random.default_rng(0), 0.8
    first, second = generator.normal(size=(8, 30)), generator.normal(size=(8, 30))
    plugin = remember(GPMPlugin(threshold, 0, reference=True), first, second)
    u = oracles.gpm_later(oracles.gpm_first(first, threshold, strictly_below=True), second, threshold)
    np.testing.assert_allclose(removed(plugin, 8), u @ u.T, atol=1e-9)


# --------------------------------------------------------------------------------------------------------------- all


@given(layers_with_inputs(), st.sampled_from(sorted(METHODS)), st.integers(0, 1), seeds)
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_any_layer_keeps_what_it_must_and_gains_nothing(case, method, threshold, seed):
    """No method makes an update larger or reverses it, in any group."""
    layer, x = case
    columns = columns_of(layer, x.detach())
    options = {"threshold": threshold, "increment": 0} if method in ("gpm", "sgp", "trgp", "gpcns") else {}
    plugin = remember(METHODS[method](**options), columns.numpy(), 2 * columns.numpy())
    groups, d, _ = columns.shape
    for p in matrix(plugin, d, groups):
        np.testing.assert_allclose(p, p.T, atol=1e-9)
        eigenvalues = np.linalg.eigvalsh(p)
        assert eigenvalues.min() > -1e-9
        assert eigenvalues.max() < 1 + 1e-9
    rows = layers_of(layer)[0].rows([torch.randn_like(layer.weight)])
    assert plugin.projector("w")(rows).shape == rows.shape
    if method in ("gpm", "trgp") and threshold == 1:  # all inputs are held: no output moves
        moved = plugin.projector("w")(rows) @ columns
        assert moved.norm() < 1e-3 * (rows.norm() * columns.norm())
    if options and threshold == 0:
        np.testing.assert_allclose(matrix(plugin, d, groups), np.eye(d)[None].repeat(groups, 0), atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_dead_inputs_protect_nothing(method):
    plugin = remember(METHODS[method](), np.zeros((5, 7)), np.zeros((5, 3)))
    np.testing.assert_array_equal(matrix(plugin, 5)[0], np.eye(5))


@pytest.mark.parametrize("method", METHODS)
def test_groups_are_independent(method):
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=(2, 3, 6, 4))
    first[1, 2:] = 0  # other ranks in the second group, none in the third
    second[1, 3:], first[2], second[2] = 0, 0, 0
    whole = matrix(remember(METHODS[method](), first, second), 6, groups=3)
    for group in range(3):
        alone = matrix(remember(METHODS[method](), first[group], second[group]), 6)
        np.testing.assert_allclose(whole[group], alone[0], atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_memory_bytes_are_those_of_the_tensors(method):
    plugin = METHODS[method]()
    assert plugin.memory_bytes() == 0
    generator = np.random.default_rng(0)
    remember(plugin, generator.normal(size=(6, 4)), generator.normal(size=(6, 20)))
    plugin.memory["w"] = stored_like(plugin.memory["w"], torch.zeros(1, dtype=torch.float32))
    memory = plugin.memory["w"]
    if method == "trgp":
        directions, masks = memory["directions"], memory["protected"].numel() + memory["spaces"].numel()
        assert plugin.memory_bytes() == 4 * 6 * directions.shape[-1] + masks
        assert memory["spaces"].shape == (2, 1, directions.shape[-1])
    elif method == "gpcns":
        assert plugin.memory_bytes() == 4 * 6 * (memory["gradients"].shape[-1] + memory["spaces"].shape[-1])
    elif method in ("nscl", "owm"):
        assert plugin.memory_bytes() == 4 * 6 * 6
    else:
        rank = memory["basis"].shape[-1]
        assert plugin.memory_bytes() == 4 * (6 * rank + (rank if method == "sgp" else 0))


@pytest.mark.parametrize("method", ["gpcns", "nscl", "owm"])
def test_memory_does_not_grow_with_the_number_of_tasks(method):
    plugin, sizes = METHODS[method](), []
    generator = np.random.default_rng(0)
    for _ in range(30):
        remember(plugin, generator.normal(size=(8, 5)))
        sizes.append(plugin.memory_bytes())
    assert sizes[-1] == sizes[9] <= 8 * 2 * 8 * 8


# --------------------------------------------------------------------------------------------------------------- SGP


@given(task_inputs(max_tasks=3), energy_thresholds, st.floats(0, 100))
def test_sgp_importances_equal_the_published_form(tasks, threshold, alpha):
    plugin = SGPPlugin(alpha=alpha, threshold=threshold, increment=0)
    u, previous = None, np.zeros(0)
    for a in tasks:
        remember(plugin, a)
        if u is None:
            u = oracles.gpm_first(a, threshold)
            importance = oracles.phi(np.linalg.svd(a, compute_uv=False)[: u.shape[1]], alpha)
        else:
            u, importance = oracles.sgp_later(u, importance, a, threshold, alpha)
        now = plugin.memory["w"]["importance"].numpy()[0]
        np.testing.assert_allclose(now, importance, atol=1e-6)
        assert np.all((now >= 0) & (now <= 1 + 1e-12))
        assert np.all(now[: len(previous)] >= previous - 1e-12)
        assert now.max() == pytest.approx(1)  # the strongest direction of each task
        previous = now
    np.testing.assert_allclose(removed(plugin, len(u)), (u * importance) @ u.T, atol=1e-6)


@given(task_inputs(), energy_thresholds, seeds)
def test_sgp_with_infinite_alpha_is_gpm(tasks, threshold, seed):
    d = len(tasks[0])
    rows = torch.randn(1, 4, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    gpm, sgp = GPMPlugin(threshold), SGPPlugin(float("inf"), threshold=threshold)
    expected, actual = (remember(plugin, *tasks).projector("w")(rows) for plugin in (gpm, sgp))
    assert torch.equal(expected, actual)


def test_sgp_with_a_large_alpha_is_not_gpm_for_weak_directions():
    a = np.diag([1.0, 1e-4])
    plugin = remember(SGPPlugin(1e9, threshold=1), a)
    left = matrix(plugin, 2)[0].diagonal()
    assert left[1] == pytest.approx(1e-5, rel=1e-2)
    assert matrix(remember(SGPPlugin(0, threshold=1), a), 2)[0].diagonal() == pytest.approx([0, 1 - 1e-4])


@given(inputs(), energy_thresholds, st.floats(0, 100))
def test_sgp_lies_between_the_raw_gradient_and_gpm(a, threshold, alpha):
    plugin = remember(SGPPlugin(alpha, threshold=threshold), a)
    u = plugin.memory["w"]["basis"][0].numpy()
    p = matrix(plugin, len(a))[0]
    left = np.array([v @ p @ v for v in u.T])
    np.testing.assert_allclose(left, 1 - plugin.memory["w"]["importance"][0].numpy(), atol=1e-9)


def test_sgp_importance_of_an_unused_direction_stays():
    first, second = np.diag([3.0, 1, 0, 0]), np.diag([0, 0, 1.0, 0])
    plugin = remember(SGPPlugin(1, threshold=1), first)
    before = plugin.memory["w"]["importance"]
    remember(plugin, second)
    torch.testing.assert_close(plugin.memory["w"]["importance"][:, :2], before, rtol=0, atol=1e-15)


# -------------------------------------------------------------------------------------------------------------- TRGP


@pytest.mark.parametrize("reference", [False, True])
@given(task_inputs(max_tasks=3), energy_thresholds)
def test_trgp_subspaces_follow_the_published_selection(reference, tasks, threshold):
    plugin = TRGPPlugin(threshold=threshold, increment=0, reference=reference)
    u = None
    for t, a in enumerate(tasks):
        remember(plugin, a)
        if u is None:
            u = space = oracles.gpm_first(a, threshold, strictly_below=reference)
        else:
            u, space = oracles.trgp_later(u, a, threshold, slip=reference)
        own = plugin.space("w", t)[0].numpy()
        np.testing.assert_allclose(own @ own.T, space @ space.T, atol=1e-6)
        np.testing.assert_allclose(removed(plugin, len(a)), u @ u.T, atol=1e-6)
        if not (reference and t == 0):
            assert np.sum((own.T @ a) ** 2) >= (threshold - 1e-9) * np.sum(a**2)
        if not reference:  # S_t lies in the protected space
            np.testing.assert_allclose(removed(plugin, len(a)) @ own, own, atol=1e-6)


@given(task_inputs(max_tasks=3), energy_thresholds)
def test_trgp_energies_add_up(tasks, threshold):
    u = remember(TRGPPlugin(threshold=threshold), *tasks).space("w", 0)
    last = matrix_of(tasks[-1])
    energies, _ = last.residual_spectrum(u)
    total = last.energy_along(u).sum() + energies.sum()
    assert total.item() == pytest.approx(np.sum(tasks[-1] ** 2))


def test_trgp_trusts_what_holds_the_gradient():
    first, second = np.eye(6)[:, :2], np.eye(6)[:, 2:4]
    plugin = remember(TRGPPlugin(threshold=1), first, second)
    gradient = torch.zeros(1, 1, 6, dtype=torch.float64)
    assert plugin._trusted("w", gradient) == []
    gradient[..., 0] = 1
    assert plugin._trusted("w", gradient) == [0]
    gradient[..., 4] = 10  # a hundredth of the energy
    assert plugin._trusted("w", gradient) == []
    gradient[..., :] = torch.tensor([1.0, 0, 2, 0, 0, 0])
    assert plugin._trusted("w", gradient) == [1]
    plugin.trust_threshold = 0.4
    assert plugin._trusted("w", gradient) == [1, 0]
    plugin.top_k = 1
    assert plugin._trusted("w", gradient) == [1]
    assert plugin._trusted("new", gradient) == []


# ------------------------------------------------------------------------------------------------------------- GPCNS


@pytest.mark.parametrize("reference", [False, True])
@given(task_inputs(max_tasks=4), energy_thresholds, st.floats(0, 50))
def test_gpcns_equals_the_svd_of_the_stacks(reference, tasks, threshold, alpha):
    plugin = GPCNSPlugin(alpha, threshold=threshold, increment=0, reference=reference)
    remember(plugin, *tasks)
    expected = oracles.gpcns([a.T for a in tasks], [threshold] * len(tasks), alpha, below=reference)
    np.testing.assert_allclose(removed(plugin, len(expected)), expected, atol=1e-5)


def test_gpcns_takes_each_space_with_the_threshold_of_its_task():
    tasks, thresholds = np.random.default_rng(0).normal(size=(3, 8, 5)), (0.3, 0.6, 0.9)
    memory = remember(GPCNSPlugin(threshold=0.3, increment=0.3), *tasks).memory["w"]["spaces"][0].numpy()
    spaces = []
    for t, threshold in enumerate(thresholds):
        _, s, vt = np.linalg.svd(np.hstack(tasks[: t + 1]).T, full_matrices=False)
        spaces.append(vt[: oracles.leading(s, threshold, below=False)].T)
    stacked = np.hstack(spaces)
    np.testing.assert_allclose(memory @ memory.T, stacked @ stacked.T, atol=1e-6)


@given(st.integers(1, 5), st.floats(0, 50))
def test_gpcns_strength_is_the_root_of_multiplicity(times, alpha):
    plugin = GPCNSPlugin(alpha, threshold=1)
    remember(plugin, np.diag([1.0, 0.5, 0, 0]))
    assert np.allclose(removed(plugin, 4), np.diag([1, 1, 0, 0]))  # all alike after the first task
    if times == 1:
        return
    remember(plugin, *[np.diag([0.0, 0, 1, 0])] * (times - 1))
    # directions 0 and 1 were in every stack, direction 2 in all but the first
    weight = oracles.phi(np.sqrt([times, times, times - 1]), alpha)
    np.testing.assert_allclose(removed(plugin, 4), np.diag([*weight, 0]), atol=1e-9)


# ------------------------------------------------------------------------------------------------------ NSCL and OWM


@given(task_inputs(), st.floats(1, 1e5))
def test_nscl_null_space_equals_the_rule(tasks, a):
    c = sum(task @ task.T for task in tasks)
    values = np.linalg.eigvalsh(c)
    floor = max(values.min(), 1e-7 * values.max())
    assume(np.all(abs(values - a * floor) > 1e-3 * a * floor))  # what lies at the cut may fall to either side
    assume(not np.any((values > 1e-11 * values.max()) & (values < 1e-6 * values.max())))
    p = matrix(remember(NSCLPlugin(a), *tasks), len(c))[0]
    np.testing.assert_allclose(p, oracles.nscl_null_space(c, a, 1e-7), atol=1e-6)
    np.testing.assert_allclose(p @ p, p, atol=1e-6)
    step = np.random.default_rng(0).normal(size=(3, len(c))) @ p
    bound = a * floor * np.sum(step**2)
    assert np.trace(step @ c @ step.T) <= bound * (1 + 1e-6) + 1e-9 * values.max()


@given(inputs(), st.floats(1, 1e3))
def test_nscl_does_not_depend_on_the_scale_of_the_inputs(a, multiple):
    first, second = (matrix(remember(NSCLPlugin(multiple), scale * a), len(a)) for scale in (1, 7))
    np.testing.assert_allclose(first, second, atol=1e-6)


@given(inputs())
def test_nscl_with_infinite_a_is_unprojected_up_to_its_scale(a):
    np.testing.assert_array_equal(matrix(remember(NSCLPlugin(float("inf")), a), len(a))[0], np.eye(len(a)))
    reference = matrix(remember(NSCLPlugin(float("inf"), reference=True), a), len(a))[0]
    np.testing.assert_allclose(reference, np.eye(len(a)) / np.sqrt(len(a)))
    assert np.linalg.norm(reference) == pytest.approx(1)


def test_nscl_keeps_the_true_null_space_of_rank_deficient_inputs():
    generator = np.random.default_rng(0)
    a = (generator.normal(size=(40, 15)) @ generator.normal(size=(15, 300))).astype(np.float32)
    for plugin in (NSCLPlugin(), NSCLPlugin(reference=True)):
        remember(plugin, a)
        plugin.memory["w"] = stored_like(plugin.memory["w"], torch.zeros(1, dtype=torch.float32))
        p = plugin.projector("w")(torch.eye(40)[None])[0].numpy()
        eigenvalues = np.linalg.eigvalsh(p / np.linalg.eigvalsh(p).max())
        assert np.sum(eigenvalues > 0.5) == 25
    assert np.linalg.norm(p) == pytest.approx(1, rel=1e-5)


@given(task_inputs(max_tasks=3), st.floats(0.01, 10))
def test_owm_equals_the_published_recursion(tasks, alpha):
    p = matrix(remember(OWMPlugin(alpha), *tasks), len(tasks[0]))[0]
    np.testing.assert_allclose(p, oracles.owm(np.hstack(tasks), alpha), atol=1e-6)


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SGPPlugin(-1), "alpha.*-1"),
        (lambda: SGPPlugin(float("nan")), "alpha.*nan"),
        (lambda: GPCNSPlugin(-1), "alpha.*-1"),
        (lambda: OWMPlugin(0), "alpha.*0"),
        (lambda: NSCLPlugin(0.5), "a must be at least 1.*0.5"),
        (lambda: NSCLPlugin(coefficient=-1), "coefficient.*-1"),
        (lambda: TRGPPlugin(1.5), "trust_threshold.*1.5"),
        (lambda: TRGPPlugin(top_k=-1), "top_k.*-1"),
        (lambda: TRGPPlugin(threshold=2), "threshold.*2"),
    ],
)
def test_nonsense_is_refused_at_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("method", METHODS)
def test_misspelt_arguments_are_refused(method):
    with pytest.raises(TypeError, match="n_sample"):
        METHODS[method](n_sample=3)

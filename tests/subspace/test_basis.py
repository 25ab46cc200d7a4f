import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from became_avalanche.subspace.basis import Projector, grow_basis, importance, orthonormal, ranks
from became_avalanche.subspace.inputs import InputMatrix
from tests import oracles


def matrix_of(a, chunks=1):
    """An InputMatrix of a numpy array (d, n) or (groups, d, n), added in chunks."""
    matrix = InputMatrix()
    for part in torch.from_numpy(a if a.ndim == 3 else a[None]).tensor_split(chunks, dim=-1):
        matrix.add(part)
    return matrix


def basis_after(tasks, thresholds, below=False):
    basis = None
    for t, (a, threshold) in enumerate(zip(tasks, thresholds, strict=True)):
        matrix = matrix_of(a)
        basis = grow_basis(matrix.empty_basis() if basis is None else basis, matrix, threshold, below=below and t == 0)
    return basis


@st.composite
def inputs(draw, d=None):
    """An input matrix (d, n) with a decaying spectrum; it may be rank-deficient or have a dead input."""
    generator = np.random.default_rng(draw(st.integers(0, 2**16)))
    d = d or draw(st.integers(2, 12))
    n = draw(st.integers(1, 40))
    rank = draw(st.integers(1, min(d, n)))
    scales = 0.5 ** np.arange(rank)
    a = (generator.normal(size=(d, rank)) * scales) @ generator.normal(size=(rank, n))
    if draw(st.booleans()):
        a[generator.integers(d)] = 0
    return a


@st.composite
def task_inputs(draw, max_tasks=4):
    d = draw(st.integers(2, 12))
    return [draw(inputs(d=d)) for _ in range(draw(st.integers(1, max_tasks)))]


thresholds = st.floats(0, 1.1)


def projector(basis):
    u = basis.numpy()[0]
    return u @ u.T


@given(task_inputs(), thresholds)
def test_basis_stays_orthonormal(tasks, threshold):
    basis = basis_after(tasks, [threshold] * len(tasks))
    u = basis.numpy()[0]
    np.testing.assert_allclose(u.T @ u, np.eye(u.shape[1]), atol=1e-10)
    eigenvalues = np.linalg.eigvalsh(u @ u.T)
    assert np.all(np.minimum(abs(eigenvalues), abs(eigenvalues - 1)) < 1e-10)


def test_dead_inputs_and_threshold_beyond_one_do_not_reverse_gradients():
    """The published update gives U Uᵀ eigenvalues near 2 here."""
    generator = np.random.default_rng(0)
    first, second = generator.normal(size=(2, 16, 40))
    first[8:], second[8:] = 0, 0
    first[4:] *= 1e-3
    basis = basis_after([first, second, second], [0.9, 1.02, 1.05])
    assert np.linalg.eigvalsh(projector(basis)).max() < 1 + 1e-10
    assert basis.shape[-1] == 8


def test_weak_new_directions_are_orthogonal_to_strong_old_ones():
    """Rounding errors of the strong directions make the eigenvectors of weak ones less orthogonal to the basis."""
    generator = np.random.default_rng(0)
    rotation = np.linalg.qr(generator.normal(size=(20, 20)))[0]
    strong, weak = rotation[:, :10], rotation[:, 10:15]
    first = strong @ generator.normal(size=(10, 60))
    second = first + 1e-4 * weak @ generator.normal(size=(5, 60))
    u = basis_after([first, second], [1, 1]).numpy()[0]
    assert u.shape[1] > 12  # most of the weak ones are taken
    np.testing.assert_allclose(u.T @ u, np.eye(u.shape[1]), atol=1e-10)


@given(task_inputs(), st.floats(0.05, 1))
def test_residual_energy_is_what_the_threshold_allows(tasks, threshold):
    bases = [basis_after(tasks[: t + 1], [threshold] * (t + 1)) for t in range(len(tasks))]
    for t, a in enumerate(tasks):
        for basis in bases[t:]:
            residual = a - projector(basis) @ a
            assert np.sum(residual**2) <= (1 - threshold + 1e-9) * np.sum(a**2)


@given(task_inputs(max_tasks=2), st.floats(0.05, 1), st.integers(0, 2**16))
def test_projected_step_moves_old_outputs_by_no_more_than_the_residual(tasks, threshold, seed):
    basis = basis_after(tasks, [threshold] * len(tasks))
    gradient = torch.from_numpy(np.random.default_rng(seed).normal(size=(1, 3, len(tasks[0]))))
    step = Projector.away_from(basis)(gradient).numpy()[0]
    for a in tasks:
        residual = a - projector(basis) @ a
        moved = np.linalg.norm(step @ a)
        assert moved <= np.linalg.norm(step, 2) * np.linalg.norm(residual) + 1e-10 * np.linalg.norm(a)


def test_reference_first_task_stays_just_below_the_threshold():
    a = np.random.default_rng(0).normal(size=(30, 200)) * 0.9 ** np.arange(30)[:, None]
    paper, reference = basis_after([a], [0.97]), basis_after([a], [0.97], below=True)
    assert reference.shape[-1] == paper.shape[-1] - 1

    def residual(basis):
        return np.sum((a - projector(basis) @ a) ** 2) / np.sum(a**2)

    assert residual(paper) <= 0.03 < residual(reference) < 0.05


def far_from_the_cut(a, u, threshold):
    """Whether rounding cannot change the result: no cumulative energy is close to the threshold, and no two singular
    values are close to each other."""
    residual = a - u @ (u.T @ a)
    energies = np.linalg.svd(residual, compute_uv=False) ** 2
    total = np.sum(a**2)
    held = 1 - np.sum(residual**2) / total + np.concatenate([[0], np.cumsum(energies)]) / total
    gaps = (energies[:-1] - energies[1:]) / total
    return np.all(abs(held - threshold) > 1e-6) and np.all(gaps[energies[:-1] / total > 1e-9] > 1e-6)


@given(task_inputs(), st.floats(0.05, 0.999))
def test_basis_equals_the_svd_oracle(tasks, threshold):
    u = np.zeros((len(tasks[0]), 0))
    basis = None
    for t, a in enumerate(tasks):
        if not far_from_the_cut(a, u, threshold):
            return
        u = oracles.gpm_first(a, threshold) if t == 0 else oracles.gpm_later(u, a, threshold)
        matrix = matrix_of(a)
        basis = grow_basis(matrix.empty_basis() if basis is None else basis, matrix, threshold)
        np.testing.assert_allclose(projector(basis), u @ u.T, atol=1e-8)


@given(inputs(), st.floats(0.05, 0.999))
def test_reference_rule_equals_the_svd_oracle(a, threshold):
    if far_from_the_cut(a, np.zeros((len(a), 0)), threshold):
        u = oracles.gpm_first(a, threshold, strictly_below=True)
        np.testing.assert_allclose(projector(basis_after([a], [threshold], below=True)), u @ u.T, atol=1e-8)


@given(inputs(), st.floats(0.05, 0.999), st.integers(2, 5), st.integers(0, 100))
def test_order_and_chunks_of_columns_do_not_matter(a, threshold, chunks, seed):
    if not far_from_the_cut(a, np.zeros((len(a), 0)), threshold):
        return
    shuffled = np.random.default_rng(seed).permutation(a, axis=1)
    matrix = matrix_of(shuffled, chunks)
    np.testing.assert_allclose(
        projector(grow_basis(matrix.empty_basis(), matrix, threshold)),
        projector(basis_after([a], [threshold])),
        atol=1e-8,
    )


@given(task_inputs(), st.floats(0, 1), st.floats(0, 1))
def test_rank_grows_with_tasks_and_with_the_threshold(tasks, one, other):
    low, high = sorted((one, other))
    sizes = [basis_after(tasks[: t + 1], [low] * (t + 1)).shape[-1] for t in range(len(tasks))]
    assert sizes == sorted(sizes)
    assert sizes[-1] <= len(tasks[0])
    assert basis_after(tasks[:1], [low]).shape[-1] <= basis_after(tasks[:1], [high]).shape[-1]


@given(inputs(), st.floats(0, 1))
def test_same_data_again_adds_nothing(a, threshold):
    once = basis_after([a], [threshold])
    assert basis_after([a, a], [threshold] * 2).shape == once.shape
    stored = grow_basis(once.float(), matrix_of(a), threshold)
    assert stored.shape == once.shape  # also with the float32 copy that a float32 model stores


@given(inputs())
def test_threshold_zero_protects_nothing(a):
    basis = basis_after([a], [0.0])
    assert basis.shape == (1, len(a), 0)
    rows = torch.randn(1, 2, len(a), dtype=torch.float64)
    assert torch.equal(Projector.away_from(basis)(rows), rows)


def test_full_basis_stops_the_layer():
    a = np.random.default_rng(0).normal(size=(5, 9))
    basis = basis_after([a], [1.0])
    assert basis.shape == (1, 5, 5)
    assert not Projector.away_from(basis)(torch.randn(1, 2, 5, dtype=torch.float64)).any()


def test_inputs_without_energy_add_nothing():
    assert basis_after([np.zeros((4, 6))], [1.0]).shape == (1, 4, 0)


@given(st.integers(1, 10), st.integers(0, 10), st.integers(0, 2**16))
def test_projection_is_idempotent_and_leaves_the_span(d, rank, seed):
    generator = np.random.default_rng(seed)
    u = np.linalg.qr(generator.normal(size=(d, min(rank, d))))[0]
    basis, gradient = torch.from_numpy(u)[None], torch.from_numpy(generator.normal(size=(1, 4, d)))
    project = Projector.away_from(basis)
    once = project(gradient)
    np.testing.assert_allclose((once[0] @ torch.from_numpy(u)).numpy(), 0, atol=1e-10)
    torch.testing.assert_close(project(once), once)
    np.testing.assert_allclose(once[0].numpy(), gradient[0].numpy() @ (np.eye(d) - u @ u.T), atol=1e-10)
    assert project.factor.shape[-1] <= d // 2  # never the thicker of the two factors


@given(st.integers(2, 4), st.integers(2, 6), st.integers(1, 12), thresholds, st.integers(0, 2**16))
def test_groups_are_independent(groups, d, n, threshold, seed):
    """A layer with groups equals as many separate layers, for any ranks of the groups."""
    generator = np.random.default_rng(seed)
    tasks = generator.normal(size=(3, groups, d, n)) * 0.3 ** generator.integers(0, 6, size=(3, groups, d, 1))
    together = basis_after(list(tasks), [threshold] * 3)
    gradient = torch.from_numpy(generator.normal(size=(groups, 2, d)))
    projected = Projector.away_from(together)(gradient)
    rank = ranks(together)
    assert together.shape[-1] == int(rank.max())
    for group in range(groups):
        alone = basis_after(list(tasks[:, group]), [threshold] * 3)
        assert int(rank[group]) == alone.shape[-1]
        expected = Projector.away_from(alone)(gradient[group : group + 1])[0]
        torch.testing.assert_close(projected[group], expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("columns", [3, 30])
def test_bases_in_float32_project_well(columns):
    a = np.random.default_rng(0).normal(size=(20, columns))
    basis = basis_after([a], [0.99]).float()
    rows = torch.randn(1, 4, 20)
    assert (Projector.away_from(basis)(rows) @ basis).abs().max() < 1e-5


@given(groups=st.integers(1, 3), d=st.integers(1, 10), data=st.data())
def test_scaled_projector_equals_the_dense_matrix(groups, d, data):
    """For either factor that it may store, and for any ranks of the groups."""
    generator = np.random.default_rng(data.draw(st.integers(0, 2**16)))
    ranks_of_groups = [data.draw(st.integers(0, d)) for _ in range(groups)]
    levels = data.draw(st.sampled_from([[1.0], [0.0, 1.0], [0.3, 1.0], [0.2, 0.7]]))
    basis = np.zeros((groups, d, max(ranks_of_groups)))
    importances = generator.choice(levels, size=(groups, max(ranks_of_groups)))
    for group, rank in enumerate(ranks_of_groups):
        basis[group, :, :rank] = np.linalg.qr(generator.normal(size=(d, d)))[0][:, :rank]
    rows = generator.normal(size=(groups, 4, d))
    projector = Projector.away_from(torch.from_numpy(basis), torch.from_numpy(importances))
    expected = rows - rows @ (basis * importances[:, None]) @ basis.transpose(0, 2, 1)
    np.testing.assert_allclose(projector(torch.from_numpy(rows)).numpy(), expected, atol=1e-9)
    assert projector.factor.shape[-1] <= d


@given(inputs(), st.integers(1, 4), st.booleans())
def test_compressed_columns_have_the_same_gram_matrix(a, chunks, single):
    matrix = matrix_of(a, chunks)
    columns = matrix.compressed()[0]
    assert columns.shape[-1] == np.linalg.matrix_rank(a) <= len(a)
    norms = columns.norm(dim=0)
    assert torch.all(norms[:-1] >= norms[1:])
    if single:  # small singular values survive single precision
        columns = columns.float().double()
    np.testing.assert_allclose((columns @ columns.T).numpy(), a @ a.T, atol=1e-6 * np.sum(a**2))


def test_vectors_that_are_not_orthonormal_are_made_so():
    """The singular vectors of a rank-deficient residual may not be orthonormal."""
    generator = torch.Generator().manual_seed(0)
    old = torch.linalg.qr(torch.randn(2, 7, 2, generator=generator, dtype=torch.float64)).Q
    vectors = torch.randn(2, 7, 4, generator=generator, dtype=torch.float64)
    taken = torch.tensor([[True, True, True, False], [True, False, False, False]])
    new = orthonormal(vectors, taken, old)
    for u, v, n in zip(old, new, (3, 1), strict=True):
        both = torch.cat([u, v[:, :n]], dim=-1)
        torch.testing.assert_close(both.T @ both, torch.eye(2 + n, dtype=torch.float64))
        assert not v[:, n:].any()


def test_a_direction_without_strength_has_no_importance():
    magnitudes = torch.tensor([[3.0, 1.0, 0.0]])
    for alpha, expected in ((0.0, [1, 1 / 3, 0]), (2.0, [1, 3 / 5, 0]), (float("inf"), [1, 1, 0])):
        torch.testing.assert_close(importance(magnitudes, alpha), torch.tensor([expected], dtype=torch.float32))

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from became_avalanche.layers.convolution import ConvolutionLayer
from became_avalanche.layers.linear import LinearLayer
from became_avalanche.layers.model import map_layers
from became_avalanche.subspace.inputs import InputMatrix, add_inputs, recorded_inputs
from tests import oracles


@given(
    groups=st.integers(1, 3),
    d=st.integers(1, 12),
    n=st.integers(1, 30),
    rank=st.integers(0, 5),
    cut=st.integers(0, 30),
    seed=st.integers(0, 2**16),
)
def test_streamed_matrix_equals_svd_of_the_whole(groups, d, n, rank, cut, seed):
    generator = np.random.default_rng(seed)
    a = generator.normal(size=(groups, d, n))
    u = np.linalg.qr(generator.normal(size=(groups, d, min(rank, d))))[0]
    matrix = InputMatrix()
    for part in np.split(a, [min(cut, n)], axis=-1):
        matrix.add(torch.from_numpy(part))

    energies, vectors = matrix.residual_spectrum(torch.from_numpy(u))
    np.testing.assert_allclose(matrix.energy().numpy(), np.sum(a**2, axis=(1, 2)))
    for group in range(groups):
        residual = a[group] - u[group] @ (u[group].T @ a[group])
        expected = np.linalg.svd(residual, compute_uv=False) ** 2
        np.testing.assert_allclose(energies[group, : len(expected)].numpy(), expected, atol=1e-10 * np.sum(a**2))
        rebuilt = (vectors[group] * energies[group]) @ vectors[group].mT
        np.testing.assert_allclose(rebuilt.numpy(), residual @ residual.T, atol=1e-10 * np.sum(a**2))


def test_matrix_never_grows_beyond_the_gram_matrix():
    matrix = InputMatrix()
    for _ in range(50):
        matrix.add(torch.randn(1, 8, 3))
        held = sum(t.numel() for t in vars(matrix).values() if isinstance(t, torch.Tensor))
        assert held <= 8 * 8 + 8 * 3


def decaying(groups, d, n, seed):
    """Columns whose energies span eight orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    rotations = torch.linalg.qr(torch.randn(groups, d, d, generator=generator, dtype=torch.float64)).Q
    return rotations @ (torch.logspace(0, -4, d).double()[:, None] * torch.randn(groups, d, n, generator=generator))


@pytest.mark.parametrize("d", [256, 257, 700])
def test_gram_matrix_of_blocks_is_that_of_the_whole(d):
    columns, matrix = decaying(2, d, d + 50, seed=0), InputMatrix()
    for part in columns.split(400, dim=-1):
        matrix.add(part)
    u = torch.linalg.qr(torch.randn(2, d, 5, dtype=torch.float64)).Q
    gram = columns @ columns.mT
    torch.testing.assert_close(matrix.energy_along(u), (u * (gram @ u)).sum(-2))
    energies, vectors = matrix.residual_spectrum(u)
    residual = columns - u @ (u.mT @ columns)
    torch.testing.assert_close((vectors * energies.unsqueeze(-2)) @ vectors.mT, residual @ residual.mT)


@pytest.mark.parametrize("n", [100, 2000])
@pytest.mark.parametrize("old", [0, 40])
def test_single_precision_changes_energies_by_less_than_1e_5(old, n):
    columns = decaying(1, 300, n, seed=0).float()
    u = torch.linalg.qr(torch.randn(1, 300, old, dtype=torch.float64)).Q
    spectra = []
    for single in (False, True):
        matrix = InputMatrix(single=single)
        matrix.add(columns)
        spectra.append(matrix.residual_spectrum(u))
    total = float(columns.double().square().sum())
    (exact, _), (energies, vectors) = spectra
    assert (energies.cumsum(-1) - exact.cumsum(-1)).abs().max() < 1e-5 * total
    residual = columns.double() - u @ (u.mT @ columns.double())
    held = (vectors.mT @ residual).square().sum(-1).cumsum(-1)  # the energy that the vectors really hold
    assert (held - exact.cumsum(-1)).abs().max() < 1e-5 * total


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_inputs_of_other_precision_are_multiplied_in_float64(dtype):
    columns = decaying(1, 300, 2000, seed=0).to(dtype)
    spectra = []
    for single in (False, True):
        matrix = InputMatrix(single=single)
        matrix.add(columns)
        spectra.append(matrix.residual_spectrum(matrix.empty_basis())[0])
    assert torch.equal(*spectra)


def test_empty_matrix_says_so():
    with pytest.raises(RuntimeError, match="empty"):
        InputMatrix().energy()


class Block(nn.Module):
    """A residual block with a strided shortcut."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(6)
        self.conv2 = nn.Conv2d(6, 6, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(4, 6, 1, stride=2, bias=False)

    def forward(self, x):
        return self.conv2(F.relu(self.bn(self.conv1(x)))) + self.shortcut(x)


def recorded(model, x, **kwargs):
    with recorded_inputs(map_layers(model).protected, **kwargs) as inputs, torch.no_grad():
        model(x)
    return inputs


def gram(matrix, d):
    energies, vectors = matrix.residual_spectrum(torch.zeros(1, d, 0, dtype=torch.float64))
    return ((vectors * energies.unsqueeze(-2)) @ vectors.mT)[0].numpy()


def test_shortcut_has_its_own_inputs():
    block, x = Block(), torch.randn(3, 4, 7, 7)
    inputs = recorded(block, x)
    assert set(inputs) == {"conv1.weight", "conv2.weight", "shortcut.weight"}
    a = oracles.patches(x.double().numpy(), (1, 1), (2, 2), (0, 0), (1, 1), 1)[0]
    np.testing.assert_allclose(gram(inputs["shortcut.weight"], 4), a @ a.T, atol=1e-8)


def test_order_of_modules_does_not_matter():
    class Reversed(Block):
        def __init__(self):
            super().__init__()
            self._modules = dict(reversed(self._modules.items()))

    block, other, x = Block(), Reversed(), torch.randn(3, 4, 7, 7)
    other.load_state_dict(block.state_dict())
    inputs, same = recorded(block, x), recorded(other, x)
    for name, matrix in inputs.items():
        assert torch.equal(matrix.energy(), same[name].energy())


def test_layer_used_twice_and_shared_weights_accumulate():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(input=self.first(self.first(x)))

    model, x = Twice(), torch.randn(4, 3)
    inputs = recorded(model, x)
    assert set(inputs) == {"first.weight"}
    with torch.no_grad():
        seen = [x, model.first(x), model.first(model.first(x))]
    assert inputs["first.weight"].energy().item() == pytest.approx(sum(float(each.square().sum()) for each in seen))


def test_constant_input_of_the_bias():
    inputs = recorded(nn.Sequential(nn.Linear(3, 2)), torch.zeros(5, 3), ones=["0.weight"])
    assert inputs["0.weight"].energy().item() == 5


def test_a_mean_input_has_the_constant_input_too():
    model, x = nn.Sequential(nn.Linear(3, 2)), torch.randn(4, 3)
    (matrix,) = recorded(model, x, ones=["0.weight"], batch_mean=True).values()
    mean = torch.cat([x.mean(0), torch.ones(1)]).double()
    np.testing.assert_allclose(gram(matrix, 4), torch.outer(mean, mean), atol=1e-6)


def test_hooks_are_removed_after_an_error():
    model = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(ZeroDivisionError), recorded_inputs(map_layers(model).protected):
        raise ZeroDivisionError
    assert not model[0]._forward_pre_hooks


@pytest.mark.parametrize(("scales_weight", "energy"), [(False, 12), (True, 3)])
def test_recorded_inputs_are_those_that_the_weight_multiplies(scales_weight, energy):
    """A pre-hook that changes the input counts, unless it does so instead of scaling the weight."""

    def double(module, args):
        return (2 * args[0],)

    double.scales_weight = scales_weight
    layer = nn.Linear(3, 2)
    layer.register_forward_pre_hook(double)
    with recorded_inputs({"weight": [LinearLayer(layer)]}) as matrices:
        layer(torch.ones(1, 3))
    assert float(matrices["weight"].energy()) == energy


@given(
    axes=st.integers(1, 3),
    kernel=st.integers(1, 4),
    channels=st.integers(1, 3),
    size=st.integers(4, 7),
    padding=st.integers(0, 2),
    mode=st.sampled_from(["zeros", "circular", "reflect"]),
    stride=st.integers(1, 2),
    before=st.booleans(),
    single=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_sums_over_lines_are_sums_over_patches(
    axes, kernel, channels, size, padding, mode, stride, before, single, seed
):
    torch.manual_seed(seed)
    convolution = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    strides = (1, *[stride] * (axes - 1))  # patches share lines only if the stride along the first axis is 1
    layer = ConvolutionLayer(convolution(channels, 1, kernel, strides, padding, padding_mode=mode))
    x = torch.randn(3, channels, *[size] * axes)
    if axes == 2:
        x = x.to(memory_format=torch.channels_last)
    patches = torch.cat(list(layer.columns(x)), dim=-1).double()
    matrix, d = InputMatrix(single=single), patches.shape[1]
    if before:
        matrix.add(patches[..., :1])
        patches = torch.cat([patches[..., :1], patches], dim=-1)
    add_inputs(matrix, layer, x)
    expected = (patches @ patches.mT)[0].numpy()
    np.testing.assert_allclose(gram(matrix, d), expected, atol=1e-12 * np.trace(expected))


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ({}, True),
        ({"padding": 1}, True),
        ({"stride": (1, 2)}, True),
        ({"stride": 2}, False),
        ({"dilation": 2}, False),
        ({"groups": 2}, False),
    ],
)
def test_lines_are_shared_where_patches_overlap(monkeypatch, options, shared):
    calls, original = [], InputMatrix.add_windows
    monkeypatch.setattr(InputMatrix, "add_windows", lambda *args: (calls.append(args), original(*args)))
    model, x = nn.Sequential(nn.Conv2d(2, 2, 3, **options)), torch.randn(9, 2, 8, 8)
    recorded(model, x)
    assert len(calls) == shared
    recorded(model, x, ones=["0.weight"])  # windows of lines cannot have a constant row
    recorded(model, x, batch_mean=True)
    assert len(calls) == shared


def test_few_windows_are_kept_as_columns():
    layer, x, matrix = ConvolutionLayer(nn.Conv2d(64, 2, 3)), torch.randn(1, 64, 8, 8), InputMatrix()
    add_inputs(matrix, layer, x)
    assert torch.equal(matrix._columns, next(layer.columns(x)).double())


def test_sums_over_lines_in_single_precision():
    layer, x = ConvolutionLayer(nn.Conv2d(32, 2, 3, padding=1)), torch.randn(20, 32, 12, 12).relu()
    matrices = [InputMatrix(single=single) for single in (False, True)]
    for matrix in matrices:
        add_inputs(matrix, layer, x)
    exact, single = (matrix.residual_spectrum(matrix.empty_basis())[0] for matrix in matrices)
    assert (single - exact).abs().max() < 1e-5 * exact.sum()
    assert not torch.equal(single, exact)

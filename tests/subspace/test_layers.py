import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from became_avalanche.subspace import layers as layers_module
from became_avalanche.subspace.layers import (
    InputMatrix,
    as_rows,
    from_rows,
    input_columns,
    map_layers,
    recorded_inputs,
)
from tests import oracles

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@st.composite
def layers_with_inputs(draw, padding_modes=("zeros", "reflect", "replicate", "circular")):
    """A Linear or Conv layer of any shape in float64, and an input for it."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    batch = draw(st.integers(1, 3))
    kind = draw(st.sampled_from((nn.Linear, *CONVOLUTIONS)))
    if kind is nn.Linear:
        layer = nn.Linear(draw(st.integers(1, 6)), draw(st.integers(1, 4)), bias=draw(st.booleans())).double()
        tokens = draw(st.lists(st.integers(1, 3), max_size=2))
        return layer, torch.randn(batch, *tokens, layer.in_features, dtype=torch.float64)
    axes = CONVOLUTIONS.index(kind) + 1
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    each = st.integers(1, 2)
    kernel = [draw(st.integers(1, 3 if axes < 3 else 2)) for _ in range(axes)]
    padding = draw(st.one_of(st.just("valid"), st.tuples(*[st.integers(0, 1)] * axes)))
    stride = [draw(each) for _ in range(axes)]
    if stride == [1] * axes and draw(st.booleans()):
        padding = "same"
    layer = kind(
        groups * draw(each),
        groups * draw(each),
        kernel_size=kernel,
        stride=stride,
        padding=padding,
        dilation=[draw(each) for _ in range(axes)],
        groups=groups,
        padding_mode=draw(st.sampled_from(padding_modes)),
        bias=draw(st.booleans()),
    ).double()
    return layer, torch.randn(batch, layer.in_channels, *[draw(st.integers(5, 6)) for _ in range(axes)]).double()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@given(layers_with_inputs())
def test_output_is_weight_times_columns(case):
    layer, x = case
    columns = torch.cat(list(input_columns(layer, x)), dim=-1)
    bias = [] if layer.bias is None else [layer.bias]
    if bias:
        columns = F.pad(columns, (0, 0, 0, 1), value=1.0)
    product = as_rows([layer.weight, *bias], getattr(layer, "groups", 1)) @ columns

    output = layer(x)
    channels_first = output.movedim(-1, 0) if isinstance(layer, nn.Linear) else output.movedim(1, 0)
    torch.testing.assert_close(product.reshape(len(channels_first), -1), channels_first.flatten(1))


@given(layers_with_inputs(padding_modes=("zeros",)))
def test_columns_equal_explicit_loops(case):
    layer, x = case
    if isinstance(layer, nn.Linear) or isinstance(layer.padding, str):
        return
    columns = torch.cat(list(input_columns(layer, x)), dim=-1)
    expected = oracles.patches(x.numpy(), layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups)
    np.testing.assert_array_equal(columns.numpy(), expected)


@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
def test_columns_equal_torch_unfold_with_stride_and_padding(kernel):
    x = torch.randn(2, 3, 8, 8)
    layer = nn.Conv2d(3, 5, kernel, stride=2, padding=1)
    expected = F.unfold(x, kernel, padding=1, stride=2).transpose(0, 1).flatten(1)
    torch.testing.assert_close(next(input_columns(layer, x))[0], expected, rtol=0, atol=0)


def test_input_without_batch_axis():
    x = torch.randn(4, 6, 6)
    layer = nn.Conv2d(4, 2, 3)
    torch.testing.assert_close(next(input_columns(layer, x)), next(input_columns(layer, x[None])))


def test_chunks_are_bounded_and_change_nothing(monkeypatch):
    layer, x = nn.Conv2d(3, 4, 3, padding=1), torch.randn(10, 3, 6, 6)
    whole = next(input_columns(layer, x))
    monkeypatch.setattr(layers_module, "_CHUNK", 2 * 27 * 36)
    chunks = list(input_columns(layer, x))
    assert len(chunks) > 4
    assert max(chunk.numel() for chunk in chunks) <= 2 * 27 * 36
    torch.testing.assert_close(torch.cat(chunks, dim=-1), whole, rtol=0, atol=0)


@given(layers_with_inputs())
def test_rows_round_trip(case):
    layer, _ = case
    tensors = [layer.weight, *([] if layer.bias is None else [layer.bias])]
    back = from_rows(as_rows(tensors, getattr(layer, "groups", 1)), tensors)
    for tensor, same in zip(tensors, back, strict=True):
        assert torch.equal(tensor, same)


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
    """Columns with energies over eight orders of magnitude."""
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
    held = (vectors.mT @ residual).square().sum(-1).cumsum(-1)  # what the vectors hold in truth
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


def test_hooks_are_removed_after_an_error():
    model = nn.Sequential(nn.Linear(3, 2))
    with pytest.raises(ZeroDivisionError), recorded_inputs(map_layers(model).protected):
        raise ZeroDivisionError
    assert not model[0]._forward_pre_hooks


def test_map_sorts_a_model_into_kinds():
    class Lora(nn.Linear):
        pass

    model = nn.Sequential(
        nn.Conv1d(2, 2, 1),
        nn.BatchNorm1d(2),
        nn.Linear(4, 4, bias=False),
        nn.LayerNorm(4),
        nn.ConvTranspose1d(2, 2, 1),
        Lora(4, 4),
        parametrizations.weight_norm(nn.Linear(4, 4)),
        nn.Linear(4, 4),
    )
    layers = map_layers(model, skip=["7"])
    assert set(layers.protected) == {"0.weight", "2.weight"}
    assert layers.biases == {"0.weight": ["0.bias"]}
    assert layers.normalisation == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert [name.split()[0] for name in layers.unprotectable] == ["4", "5", "6", "6.parametrizations.weight"]


def test_skip_is_by_whole_names():
    model = nn.ModuleDict({"fc": nn.Linear(1, 1), "fc2": nn.Linear(1, 1)})
    assert set(map_layers(model, skip=["fc"]).protected) == {"fc2.weight"}


def test_recorded_inputs_are_those_before_other_hooks_change_them():
    layer = nn.Linear(3, 2)
    layer.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    with recorded_inputs({"weight": [layer]}) as matrices:
        layer(torch.ones(1, 3))
    assert float(matrices["weight"].energy()) == 3

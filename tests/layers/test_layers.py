"""The inputs of each kind of layer as columns, and its weight as rows."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from became_avalanche.layers import convolution
from became_avalanche.layers.model import layers_of, map_layers
from tests import oracles

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def columns_of(module, *args, **kwargs):
    """The inputs of a call of a module with one layer, as one matrix."""
    (layer,) = layers_of(module)
    return torch.cat(list(layer.columns(*args, **kwargs)), dim=-1)


@st.composite
def layers_with_inputs(draw, padding_modes=("zeros", "reflect", "replicate", "circular")):
    """A Linear, Conv or ConvTranspose layer of any shape in float64, and an input for it."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    batch = draw(st.integers(1, 3))
    kind = draw(st.sampled_from((nn.Linear, *CONVOLUTIONS, *TRANSPOSED)))
    if kind is nn.Linear:
        layer = nn.Linear(draw(st.integers(1, 6)), draw(st.integers(1, 4)), bias=draw(st.booleans())).double()
        tokens = draw(st.lists(st.integers(1, 3), max_size=2))
        return layer, torch.randn(batch, *tokens, layer.in_features, dtype=torch.float64)
    axes = (CONVOLUTIONS if kind in CONVOLUTIONS else TRANSPOSED).index(kind) + 1
    groups = draw(st.sampled_from((1, 1, 2, 3)))
    each = st.integers(1, 2)
    kernel = [draw(st.integers(1, 3 if axes < 3 else 2)) for _ in range(axes)]
    padding = draw(st.one_of(st.just("valid"), st.tuples(*[st.integers(0, 1)] * axes)))
    stride = [draw(each) for _ in range(axes)]
    dilation = [draw(each) for _ in range(axes)]
    if kind in TRANSPOSED:
        layer = kind(
            groups * draw(each),
            groups * draw(each),
            kernel_size=kernel,
            stride=stride,
            padding=[draw(st.integers(0, 1)) for _ in range(axes)],
            output_padding=[draw(st.integers(0, max(stride[a], dilation[a]) - 1)) for a in range(axes)],
            dilation=dilation,
            groups=groups,
            bias=draw(st.booleans()),
        ).double()
        return layer, torch.randn(batch, layer.in_channels, *[draw(st.integers(4, 5)) for _ in range(axes)]).double()
    if stride == [1] * axes and draw(st.booleans()):
        padding = "same"
    layer = kind(
        groups * draw(each),
        groups * draw(each),
        kernel_size=kernel,
        stride=stride,
        padding=padding,
        dilation=dilation,
        groups=groups,
        padding_mode=draw(st.sampled_from(padding_modes)),
        bias=draw(st.booleans()),
    ).double()
    return layer, torch.randn(batch, layer.in_channels, *[draw(st.integers(5, 6)) for _ in range(axes)]).double()


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@given(layers_with_inputs())
def test_output_is_weight_times_columns(case):
    layer, x = case
    columns = columns_of(layer, x)
    bias = [] if layer.bias is None else [layer.bias]
    if bias:
        columns = F.pad(columns, (0, 0, 0, 1), value=1.0)
    product = layers_of(layer)[0].rows([layer.weight, *bias]) @ columns

    output = layer(x)
    channels_first = output.movedim(-1, 0) if isinstance(layer, nn.Linear) else output.movedim(1, 0)
    torch.testing.assert_close(product.reshape(len(channels_first), -1), channels_first.flatten(1))


@given(layers_with_inputs(padding_modes=("zeros",)))
def test_columns_equal_explicit_loops(case):
    layer, x = case
    if type(layer) not in CONVOLUTIONS or isinstance(layer.padding, str):
        return
    columns = columns_of(layer, x)
    expected = oracles.patches(x.numpy(), layer.kernel_size, layer.stride, layer.padding, layer.dilation, layer.groups)
    np.testing.assert_array_equal(columns.numpy(), expected)


@pytest.mark.parametrize("kernel", [1, 2, 3, 4])
def test_columns_equal_torch_unfold_with_stride_and_padding(kernel):
    x = torch.randn(2, 3, 8, 8)
    layer = nn.Conv2d(3, 5, kernel, stride=2, padding=1)
    expected = F.unfold(x, kernel, padding=1, stride=2).transpose(0, 1).flatten(1)
    torch.testing.assert_close(columns_of(layer, x)[0], expected, rtol=0, atol=0)


def test_input_without_batch_axis():
    x = torch.randn(4, 6, 6)
    layer = nn.Conv2d(4, 2, 3)
    torch.testing.assert_close(columns_of(layer, x), columns_of(layer, x[None]))


def test_chunks_are_bounded_and_change_nothing(monkeypatch):
    layer, x = nn.Conv2d(3, 4, 3, padding=1), torch.randn(10, 3, 6, 6)
    whole = columns_of(layer, x)
    monkeypatch.setattr(convolution, "CHUNK", 2 * 27 * 36)
    chunks = list(layers_of(layer)[0].columns(x))
    assert len(chunks) > 4
    assert max(chunk.numel() for chunk in chunks) <= 2 * 27 * 36
    torch.testing.assert_close(torch.cat(chunks, dim=-1), whole, rtol=0, atol=0)


@given(layers_with_inputs())
def test_rows_round_trip(case):
    layer, _ = case
    tensors = [layer.weight, *([] if layer.bias is None else [layer.bias])]
    (own,) = layers_of(layer)
    back = own.from_rows(own.rows(tensors), tensors)
    for tensor, same in zip(tensors, back, strict=True):
        assert torch.equal(tensor, same)


@given(layers_with_inputs(), st.booleans(), st.integers(0, 4))
def test_rows_in_memory_order_are_projected_as_others(case, channels_last, rank):
    (layer,) = layers_of(case[0])
    if channels_last and layer.weight.dim() > 3:
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        layer.module.to(memory_format=formats[layer.weight.dim()])
    rows = layer.rows([layer.weight])
    factor = torch.randn(rows.shape[0], rows.shape[2], rank, dtype=torch.float64)
    other, reordered = layer.in_memory_order(factor)
    for leading in (rows, rows.expand(2, *rows.shape)):
        assert torch.equal(other.weight_like(other.rows([layer.weight]).expand_as(leading)), layer.weight_like(leading))
    expected = layer.weight_like(rows @ factor @ factor.mT)
    projected = other.weight_like(other.rows([layer.weight]) @ reordered @ reordered.mT)
    torch.testing.assert_close(projected, expected)
    if isinstance(case[0], nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        assert other.rows([layer.weight]).data_ptr() == layer.weight.data_ptr()  # without a copy


def test_map_sorts_a_model_into_kinds():
    class Same(nn.Linear):
        pass

    class Lora(nn.Linear):
        def forward(self, x):
            return 2 * super().forward(x)

    model = nn.Sequential(
        nn.Conv1d(2, 2, 1),
        nn.BatchNorm1d(2),
        nn.Linear(4, 4, bias=False),
        nn.LayerNorm(4),
        nn.PReLU(),
        Lora(4, 4),
        parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.Linear(4, 4),
        Same(4, 4, bias=False),
    )
    layers = map_layers(model, skip=["7"])
    assert set(layers.protected) == {"0.weight", "2.weight", "8.weight"}
    assert layers.biases == {"0.weight": ["0.bias"]}
    assert layers.normalisation == ["1.weight", "1.bias", "3.weight", "3.bias"]
    assert [*dict.fromkeys(label.split()[0] for label in layers.unprotectable.values())] == [
        "4",
        "5",
        "6",
        "6.weight",
    ]


def test_skip_is_by_whole_names():
    model = nn.ModuleDict({"fc": nn.Linear(1, 1), "fc2": nn.Linear(1, 1)})
    assert set(map_layers(model, skip=["fc"]).protected) == {"fc2.weight"}


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_same_padding_of_an_even_kernel_has_the_larger_side_last():
    layer, x = nn.Conv2d(2, 3, (2, 4), padding="same", bias=False).double(), torch.randn(2, 2, 5, 6).double()
    expected = layer(x).movedim(1, 0).flatten(1)
    torch.testing.assert_close(layer.weight.flatten(1) @ columns_of(layer, x)[0], expected)


def test_energy_of_an_embedding_is_the_number_of_tokens():
    tokens = torch.tensor([[0, 2, 2], [2, 0, 3]])
    assert columns_of(nn.Embedding(5, 4), tokens).square().flatten().tolist() == pytest.approx([2, 0, 3, 1, 0])


def test_the_padding_of_an_embedding_has_no_gradient():
    module, tokens = nn.Embedding(4, 3, padding_idx=1), torch.tensor([[0, 1, 1], [1, 2, 3]])
    (layer,) = layers_of(module)
    each = layer.per_sample("weight", tokens, torch.ones(2, 3, 3))
    for sample, own in zip(tokens, each, strict=True):
        module.zero_grad()
        module(sample).sum().backward()
        torch.testing.assert_close(own, module.weight.grad)


def test_inputs_of_an_output_projection_do_not_hold_its_bias():
    attention, x = nn.MultiheadAttention(6, 2, batch_first=True).double(), torch.randn(2, 3, 6).double()
    nn.init.normal_(attention.out_proj.bias)
    _, projection = layers_of(attention)
    (columns,) = projection.columns(x, x, x)
    output = columns[0].T @ attention.out_proj.weight.T + attention.out_proj.bias
    torch.testing.assert_close(output.reshape(2, 3, 6), attention(x, x, x)[0])


def test_a_layer_has_its_own_weight_again_after_an_error():
    module = nn.Linear(3, 2)
    (layer,), weight = layers_of(module), module.weight
    detach = layer.compute_with(lambda: [torch.zeros(2, 3)])
    with pytest.raises(RuntimeError):
        module(torch.ones(1, 4))
    assert module.weight is weight
    assert torch.equal(module(torch.ones(1, 3))[0], module.bias)
    detach()
    assert not torch.equal(module(torch.ones(1, 3))[0], module.bias)


def test_a_weight_that_layers_of_different_kinds_share_is_not_protected():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    layers = map_layers(model)
    assert layers.protected == {}
    assert [*layers.unprotectable] == ["0.weight"]
    assert "shared by Embedding and Linear" in layers.unprotectable["0.weight"]

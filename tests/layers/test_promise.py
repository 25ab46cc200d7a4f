"""Updates that are orthogonal to the recorded inputs of all layers do not change the outputs of a module."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from torchvision.models.swin_transformer import ShiftedWindowAttention, ShiftedWindowAttentionV2

from became_avalanche.layers.model import layers_of, map_layers
from became_avalanche.subspace.basis import Projector, grow_basis
from became_avalanche.subspace.inputs import recorded_inputs


def outputs_of(model, args, kwargs):
    output = model(*args, **kwargs)
    tensors, waiting = [], [output]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            tensors.append(value.flatten())
        elif isinstance(value, tuple | list):
            waiting += [part for part in value if part is not None]
    return torch.cat([tensor.double() for tensor in tensors])


@torch.no_grad()
def moves(model, args, kwargs, augmented, seed):
    """Relative change of the outputs by projected and by unprojected random updates; norm of the projected updates."""
    model.double().eval()
    layers = map_layers(model)
    ones = [name for name in layers.biases if augmented]
    with recorded_inputs(layers.protected, ones=ones) as inputs:
        before = outputs_of(model, args, kwargs)
    assert inputs.keys() == layers.protected.keys()
    parameters, generator = dict(model.named_parameters()), torch.Generator().manual_seed(seed)
    results, left = [], 0.0
    for projected in (True, False):
        start = {name: parameter.clone() for name, parameter in parameters.items()}
        for name, (layer, *_) in layers.protected.items():
            parts = [parameters[part] for part in (name, *(layers.biases[name] if name in ones else ()))]
            rows = layer.rows([torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in parts])
            if projected:
                basis = grow_basis(inputs[name].empty_basis(), inputs[name], 1)
                rows = Projector.away_from(basis)(rows)
                left += float(rows.norm())
            for part, update in zip(parts, layer.from_rows(rows, parts), strict=True):
                part += update
        moved = (outputs_of(model, args, kwargs) - before).norm() / before.norm()
        results.append(float(moved))
        for name, value in start.items():
            parameters[name].copy_(value)
    return *results, left


def assert_promise(model, *args, augmented=False, seed=0, constants=(), **kwargs):
    assert list(map_layers(model).unprotectable.values()) == list(constants)
    with_it, without, left = moves(model, args, kwargs, augmented, seed)
    assert left > 0.1
    assert without > 1e-3
    assert with_it < 1e-3 * without + 1e-6


booleans, seeds = st.booleans(), st.integers(0, 2**16)


@given(
    separate=booleans,
    bias=booleans,
    add_bias_kv=booleans,
    add_zero_attn=booleans,
    batch_first=booleans,
    cross=booleans,
    masked=booleans,
    augmented=booleans,
    seed=seeds,
)
def test_attention(separate, bias, add_bias_kv, add_zero_attn, batch_first, cross, masked, augmented, seed):
    torch.manual_seed(seed)
    sizes = {"kdim": 10, "vdim": 12} if separate else {}
    model = nn.MultiheadAttention(
        16, 2, bias=bias, add_bias_kv=add_bias_kv, add_zero_attn=add_zero_attn, batch_first=batch_first, **sizes
    )
    query = torch.randn(2, 2, 16).double()
    if cross or separate:
        shape = (2, 3) if batch_first else (3, 2)
        key, value = (torch.randn(*shape, sizes.get(name, 16)).double() for name in ("kdim", "vdim"))
    else:
        key = value = query
    mask = torch.tensor([[False] * (key.shape[1 if batch_first else 0] - 1) + [True]] * 2) if masked else None
    assert_promise(model, query, key, value=value, key_padding_mask=mask, augmented=augmented, seed=seed)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_transformer_encoder_in_eval_mode(batch_first, norm_first):
    """In eval mode without gradients torch computes encoder layers in one kernel, without calling their modules."""
    layer = nn.TransformerEncoderLayer(
        12, 2, 20, dropout=0.1, batch_first=batch_first, norm_first=norm_first, activation="gelu"
    )
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x = torch.randn(2, 2, 12).double()
    assert_promise(model, x)
    enabled = torch.backends.mha.get_fastpath_enabled()
    with recorded_inputs(map_layers(model).protected):
        pass
    assert torch.backends.mha.get_fastpath_enabled() == enabled


@given(
    kind=st.sampled_from((nn.LSTM, nn.GRU, nn.RNN)),
    layers=st.integers(1, 2),
    bidirectional=booleans,
    projected=booleans,
    batch_first=booleans,
    bias=booleans,
    packed=booleans,
    start=booleans,
    augmented=booleans,
    seed=seeds,
)
def test_recurrent(kind, layers, bidirectional, projected, batch_first, bias, packed, start, augmented, seed):
    torch.manual_seed(seed)
    options = {"proj_size": 10} if projected and kind is nn.LSTM else {}
    if kind is nn.RNN and projected:
        options = {"nonlinearity": "relu"}
    model = kind(
        14, 12, layers, batch_first=batch_first, bidirectional=bidirectional, bias=bias, dropout=0.0, **options
    )
    x = torch.randn(2, 3, 14).double() if batch_first else torch.randn(3, 2, 14).double()
    arguments = [pack_padded_sequence(x, [2, 3], batch_first, enforce_sorted=False) if packed else x]
    if start:
        places = layers * (1 + bidirectional), 2
        h, c = torch.randn(*places, options.get("proj_size", 12)).double(), torch.randn(*places, 12).double()
        arguments.append((h, c) if kind is nn.LSTM else h)
    assert_promise(model, *arguments, augmented=augmented, seed=seed)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_without_a_batch_axis(kind):
    h = torch.randn(1, 12).double()
    assert_promise(kind(14, 12), torch.randn(3, 14).double(), (h, h) if kind is nn.LSTM else h)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("start", [False, True])
def test_cells(kind, start):
    h = torch.randn(2, 12).double()
    arguments = [(h, h) if kind is nn.LSTMCell else h] if start else []
    assert_promise(kind(14, 12), torch.randn(2, 14).double(), *arguments)


@given(padding=booleans, limited=booleans, shape=st.lists(st.integers(1, 3), min_size=1, max_size=3), seed=seeds)
def test_embedding(padding, limited, shape, seed):
    torch.manual_seed(seed)
    model = nn.Embedding(40, 5, padding_idx=3 if padding else None, max_norm=2.0 if limited else None)
    tokens = torch.randint(12, shape)
    assert_promise(model, tokens, seed=seed)
    (layer,) = layers_of(model)
    (columns,) = layer.columns(tokens)
    assert columns.square().flatten().round().int().tolist() == [int((tokens == row).sum()) for row in range(40)]


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize("kind", [ShiftedWindowAttention, ShiftedWindowAttentionV2])
def test_attention_of_swin_transformers(kind, augmented):
    """Their Linear modules are never called: functions use the weights directly."""
    model = kind(24, [2, 2], [1, 1], 2)
    own = "relative_position_bias_table" if kind is ShiftedWindowAttention else "logit_scale"
    constants = [f"{own} (of {kind.__name__})"]
    model.eval().requires_grad_(True)
    if kind is ShiftedWindowAttentionV2:
        model.cpb_mlp.requires_grad_(False)
        model.cpb_mlp = nn.Identity()
        model.get_relative_position_bias = lambda: torch.zeros(1, 2, 4, 4).double()
    assert_promise(model, torch.randn(1, 4, 4, 24).double(), constants=constants, augmented=augmented)

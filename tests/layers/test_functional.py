"""Weights that functions use outside the calls of their modules."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from became_avalanche.layers.model import map_layers
from became_avalanche.subspace.inputs import recorded_inputs


class Uses(nn.Module):
    """A layer that is called and whose weight is also passed to a function."""

    def __init__(self, use):
        super().__init__()
        self.layer, self.table, self.use = nn.Linear(3, 4), nn.Embedding(5, 3), use

    def forward(self, x):
        self.table(torch.tensor([1]))
        return self.layer(x) + self.use(self, 2 * x)


class InTorch(torch.autograd.Function):
    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(context, gradient):
        x, weight = context.saved_tensors
        return gradient @ weight, gradient.T @ x


class InNumpy(InTorch):
    @staticmethod
    def forward(context, x, weight):
        context.save_for_backward(x, weight)
        return torch.from_numpy(x.numpy() @ weight.numpy().T)


def recorded(use, **options):
    model, x, others = Uses(use), torch.ones(2, 3), {}
    with torch.no_grad(), recorded_inputs(map_layers(model).protected, other_uses=others, **options) as matrices:
        model(x)
    return {name: float(matrix.energy().sum()) for name, matrix in matrices.items()}, others


@pytest.mark.parametrize(
    "use",
    [
        lambda model, x: F.linear(x, model.layer.weight),
        lambda model, x: F.linear(input=x, weight=model.layer.weight),
        lambda model, x: x @ model.layer.weight.T,
        lambda model, x: torch.matmul(x, model.layer.weight.t()),
        lambda model, x: x.mm(model.layer.weight.transpose(0, 1)),
        lambda model, x: x @ model.layer.weight.mT,
        lambda model, x: InTorch.apply(x, model.layer.weight),
    ],
)
def test_a_linear_use_counts(use):
    energies, others = recorded(use)
    assert energies["layer.weight"] == 6 + 24
    assert not others


def test_the_constant_input_counts_where_there_is_a_bias():
    for use, constant in (
        (lambda model, x: F.linear(x, model.layer.weight, model.layer.bias), 4),
        (lambda model, x: F.linear(x, model.layer.weight), 2),
    ):
        energies, _ = recorded(use, ones=["layer.weight"])
        assert energies["layer.weight"] == 30 + constant


@pytest.mark.parametrize(
    ("use", "function"),
    [
        (lambda model, x: F.linear(x, 2 * model.layer.weight), "mul"),
        (lambda model, x: torch.einsum("ni,oi->no", x, model.layer.weight), "einsum"),
        (lambda model, x: F.linear(x, torch.cat([model.layer.weight])), "cat"),
        (lambda model, x: x @ (model.layer.weight.T + 1), "add"),
        (lambda model, x: F.linear(model.layer.weight, model.layer.weight).sum(), "linear"),
        (lambda model, x: InNumpy.apply(x, model.layer.weight), "numpy"),
    ],
)
def test_any_other_use_is_named(use, function):
    energies, others = recorded(use)
    assert energies["layer.weight"] == 6
    assert function in others["layer.weight"]


def test_a_table_that_is_a_matrix_elsewhere_is_named():
    _, others = recorded(lambda model, x: F.linear(x, model.table.weight).sum())
    assert others == {"table.weight": "linear"}


def test_looking_at_a_weight_is_no_use():
    _, others = recorded(lambda model, x: x.to(model.layer.weight.dtype).sum() * model.layer.weight.shape[0])
    assert not others

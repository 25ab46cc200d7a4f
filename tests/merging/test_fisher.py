import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from became_avalanche.merging.fisher import accumulate, batched_fisher, fit


def oracle(model, batches):
    """Mean over batches of B times the squared gradient of the batch's mean loss, one parameter entry at a time."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x, y in batches:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                total[name] += len(y) * p.grad**2
    return {name: value / len(batches) for name, value in total.items()}


@given(
    sizes=st.lists(st.integers(2, 5), min_size=1, max_size=4),
    normalised=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_batched_equals_the_loop(sizes, normalised, seed):
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(6, track_running_stats=False) if normalised else nn.Identity()
    model = nn.Sequential(nn.Linear(3, 6), norm, nn.Tanh(), nn.Linear(6, 4)).double()
    batches = [(torch.randn(n, 3).double(), torch.randint(4, (n,))) for n in sizes]
    losses = ((F.cross_entropy(model(x), y), len(y)) for x, y in batches)
    fisher = batched_fisher(losses, dict(model.named_parameters()))
    for name, expected in oracle(model, batches).items():
        torch.testing.assert_close(fisher[name], expected)
        assert not fisher[name].requires_grad


def test_parameter_without_gradient_has_no_information():
    used, unused = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    fisher = batched_fisher([((used**2).mean(), 4)], {"used": used, "unused": unused})
    assert torch.equal(fisher["used"], torch.full((2,), 4.0))
    assert torch.equal(fisher["unused"], torch.zeros(3))
    assert used.grad is None


def test_no_data_is_refused():
    with pytest.raises(ValueError, match="no samples"):
        batched_fisher([], {"w": torch.ones(1, requires_grad=True)})


def test_precision_accumulates_by_name():
    precision = {"shared": torch.tensor([1.0, 2.0]), "old head": torch.tensor([5.0])}
    fisher = {"shared": torch.tensor([3.0, 4.0]), "new head": torch.tensor([6.0])}
    result = accumulate(precision, fisher)
    assert {name: tensor.tolist() for name, tensor in result.items()} == {
        "shared": [4.0, 6.0],
        "old head": [5.0],
        "new head": [6.0],
    }
    assert precision["shared"].tolist() == [1.0, 2.0]


def test_a_head_that_grew_is_padded():
    grown = fit(torch.ones(2, 3), torch.zeros(4, 3))
    assert grown.sum() == 6
    assert grown[:2].all()
    assert accumulate({"head": torch.ones(2, 3)}, {"head": torch.ones(4, 3)})["head"].sum() == 18

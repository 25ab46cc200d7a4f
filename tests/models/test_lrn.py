import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, jvp, vmap

from became_avalanche.models.lrn import LocalResponseNorm


def pair(size, alpha=0.7, k=1.3):
    return LocalResponseNorm(size, alpha, k), nn.LocalResponseNorm(size, alpha, 0.75, k)


def images(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.double, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 3),
    channels=st.integers(1, 9),
    side=st.integers(1, 4),
    size=st.integers(1, 12),
    k=st.floats(0.5, 3),
    channels_last=st.booleans(),
)
def test_values_and_gradients_are_those_of_pytorch(n, channels, side, size, k, channels_last):
    x = images(n, channels, side, side + 1).float()
    if channels_last:
        x = x.to(memory_format=torch.channels_last)
    results = []
    for norm in pair(size, k=k):
        own = x.clone().requires_grad_()
        y = norm(own)
        results.append((y.detach(), *torch.autograd.grad((y * y.detach().sin()).sum(), own)))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 4, 5, 9])
def test_derivatives_of_first_and_second_order_are_right(size):
    x, norm = images(2, 5, 2, 3).requires_grad_(), pair(size)[0]
    assert torch.autograd.gradcheck(norm, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(norm, x)


def test_transforms_of_functions_see_the_same_function():
    x, v = images(3, 5, 2, 2), images(3, 5, 2, 2, seed=1)

    def energy(norm):
        return lambda z: norm(z.unsqueeze(0)).square().sum()

    ours, theirs = pair(4)
    torch.testing.assert_close(vmap(grad(energy(ours)))(x), vmap(grad(energy(theirs)))(x))
    torch.testing.assert_close(jvp(ours, (x,), (v,)), jvp(theirs, (x,), (v,)))
    ours, theirs = (grad(lambda z, norm=norm: jvp(norm, (z,), (v,))[1].square().sum())(x) for norm in pair(4))
    torch.testing.assert_close(ours, theirs)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="size must be at least 1 channel; got 0"):
        LocalResponseNorm(0)
    with pytest.raises(ValueError, match=r"expected images .* got shape \(2, 3\)"):
        LocalResponseNorm(4)(torch.zeros(2, 3))

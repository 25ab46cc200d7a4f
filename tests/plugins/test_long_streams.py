"""Streams of many tasks: memory and cost stay bounded, and what the methods promise still holds at the end."""

import gc
from statistics import median
from time import process_time

import pytest
import torch
from torch import nn

from became_avalanche import (
    BecameMergePlugin,
    ConnectorPlugin,
    EqualTrainingPlugin,
    GPCNSPlugin,
    GPMPlugin,
    GradientProjectionPlugin,
    NSCLPlugin,
    OWMPlugin,
    SGPPlugin,
    TRGPPlugin,
)
from tests.helpers import batch_of, blobs, naive

HEAD = {"exclude": ["2"]}
"""The head, which all tasks share, is not protected. Otherwise nothing could learn at the end."""

METHODS = {
    "finetune+became": lambda: [BecameMergePlugin()],
    "finetune+cofima": lambda: [BecameMergePlugin(rule="cofima")],
    "gpm": lambda: [GPMPlugin(threshold=0.95, increment=0.001, **HEAD)],
    "gpm-2x": lambda: [GPMPlugin(threshold=0.95, increment=0.001, **HEAD), EqualTrainingPlugin()],
    "gpm+became": lambda: [GPMPlugin(threshold=0.95, increment=0.001, **HEAD), BecameMergePlugin()],
    "sgp+became": lambda: [SGPPlugin(threshold=0.95, increment=0.001, **HEAD), BecameMergePlugin()],
    "trgp+became": lambda: [TRGPPlugin(threshold=0.95, increment=0.001, **HEAD), BecameMergePlugin()],
    "gpcns+became": lambda: [GPCNSPlugin(**HEAD), BecameMergePlugin()],
    "nscl+became": lambda: [NSCLPlugin(a=1, **HEAD), BecameMergePlugin()],
    "owm+became": lambda: [OWMPlugin(**HEAD), BecameMergePlugin()],
    "connector": lambda: [NSCLPlugin(a=1, **HEAD), ConnectorPlugin()],
}

GROWS = {"trgp+became"}
"""TRGP keeps scales for each task."""


def train(method, n_tasks):
    """Train a stream of small tasks with one head; per task: CPU seconds and bytes of all live tensors."""
    plugins = METHODS[method]()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))
    strategy = naive(model, plugins, train_mb_size=20, train_epochs=1)
    benchmark = blobs(n_tasks, samples=20)
    seconds, live = [], []
    for t, experience in enumerate(benchmark.train_stream):
        start = process_time()
        strategy.train(experience)
        seconds.append(process_time() - start)
        if t in (n_tasks // 2 - 1, n_tasks - 1):
            gc.collect()
            live.append(sum(x.nbytes for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter)))
    return strategy, plugins, benchmark, seconds, live


def check(method, n_tasks, ratio):
    strategy, plugins, benchmark, seconds, live = train(method, n_tasks)
    assert all(parameter.isfinite().all() for parameter in strategy.model.parameters())
    later = median(seconds[-n_tasks // 4 :]) / median(seconds[n_tasks // 4 : n_tasks // 2])
    assert later < ratio, f"a task of the last quarter takes {later:.1f} times as long as one of the second"
    if method not in GROWS:
        assert live[1] <= live[0] + min(20_000, 1000 * n_tasks)  # bases of at most 12 x 12 values may still grow
    for plugin in plugins:
        if isinstance(plugin, BecameMergePlugin):
            assert len(plugin.merges) == n_tasks - 1
            assert all(0 <= merge.coefficient <= 1 for merge in plugin.merges)
            assert plugin.memory_bytes() <= 2 * sum(p.numel() * p.element_size() for p in strategy.model.parameters())
        if isinstance(plugin, GradientProjectionPlugin):
            assert plugin.experiences == n_tasks
            assert_orthonormal(plugin)
    return strategy, benchmark


def assert_orthonormal(plugin):
    assert plugin.memory
    for name in plugin.memory:
        basis, importance = plugin.protected(name)
        rank = basis.any(-2).sum(-1)
        gram = basis.double().mT @ basis.double()
        expected = torch.diag_embed((torch.arange(basis.shape[-1]) < rank.unsqueeze(-1)).double())
        assert (gram - expected).abs().max() < 1e-6, name
        assert int(rank.max()) <= basis.shape[-2]
        if importance is not None:
            assert importance.min() >= 0
            assert importance.max() <= 1 + 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_twelve_tasks(method):
    check(method, 12, ratio=10)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_two_hundred_tasks(method):
    check(method, 200, ratio=2)


@pytest.mark.parametrize("plugin", [GPMPlugin, SGPPlugin, TRGPPlugin], ids=lambda kind: kind.__name__)
def test_a_threshold_that_reaches_one_protects_everything(plugin, monkeypatch):
    options = {"threshold": 0.9, "increment": 0.05, **HEAD} | ({"alpha": float("inf")} if plugin is SGPPlugin else {})
    monkeypatch.setitem(METHODS, "saturated", lambda: [plugin(**options)])
    strategy, (method,), benchmark, *_ = train("saturated", 8)
    assert method.threshold_of(9) >= 1
    assert method.ranks()["0.weight"] == 6  # as many as there are inputs
    x, _ = batch_of(benchmark.train_stream[0])
    layer = strategy.model[0]
    before = layer(x).detach()
    if plugin is not TRGPPlugin:  # it scales weights for the task that it serves
        strategy.train(blobs(9, samples=20).train_stream[8])
        assert torch.allclose(layer(x), before, atol=1e-5)
    assert_orthonormal(method)

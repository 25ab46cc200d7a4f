"""The report of a plugin about a model."""

import pytest
import torch
from torch import nn

from became_avalanche import GPMPlugin, NSCLPlugin
from tests.helpers import CONV_SHAPE, Network, blobs, convnet, naive

BIASES = ["features.0.bias", "features.3.bias", "features.6.bias"]
NORM = ["features.1.weight", "features.1.bias"]


def trained(plugin, model=None):
    strategy = naive(model or convnet(), [plugin], train_epochs=1)
    strategy.train(blobs(shape=CONV_SHAPE, n_tasks=1).train_stream)
    return strategy


@pytest.mark.parametrize(
    ("options", "frozen", "free"),
    [
        ({}, {*BIASES, *NORM}, set()),
        ({"bias": "free"}, set(NORM), set(BIASES)),
        ({"bias": "augment"}, set(NORM), set()),
        ({"exclude": ["features.1", "features.6"]}, set(BIASES[:2]), {*NORM, "features.6.weight", BIASES[2]}),
    ],
)
def test_every_trainable_parameter_is_in_one_class(options, frozen, free):
    plugin = GPMPlugin(**options)
    strategy = trained(plugin)
    report = plugin.report()
    heads = {name for name, _ in strategy.model.named_parameters() if name.startswith("classifier")}
    assert set(report.frozen) == frozen
    assert set(report.free) == free | heads
    inputs = {"features.0.weight": (1, 18), "features.3.weight": (2, 18), "features.6.weight": (1, 32)}
    ones = options.get("bias") == "augment"
    assert report.bases == {
        name: (plugin.ranks()[name], groups * (d + ones))
        for name, (groups, d) in inputs.items()
        if name in plugin.memory
    }
    assert report.memory_bytes == plugin.memory_bytes() > 0


def test_what_is_said_about_frozen_parameters_is_what_happens():
    plugin = GPMPlugin()
    strategy = trained(plugin)
    report, before = plugin.report(), {n: p.detach().clone() for n, p in strategy.model.named_parameters()}
    strategy.train(blobs(shape=CONV_SHAPE).train_stream[1])
    parameters = dict(strategy.model.named_parameters())
    assert all(torch.equal(parameters[name], before[name]) for name in report.frozen)
    assert not any(torch.equal(parameters[name], before[name]) for name in report.bases)


def test_nscl_freezes_no_normalisation():
    plugin = NSCLPlugin(100)
    strategy = trained(plugin)
    assert set(plugin.report().frozen) == set(BIASES)
    del strategy


def test_weights_and_biases_that_functions_use_are_reported():
    class Bare(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.b = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.zeros(4))

        def forward(self, x):
            return nn.functional.linear(x, self.w, self.b)

    plugin, model = GPMPlugin(), nn.Sequential(Bare(), nn.Linear(4, 2))
    naive(model, [plugin]).train(blobs(n_tasks=1, task_labels=False).train_stream)
    report = plugin.report()
    assert set(report.bases) == {"0.w", "1.weight"}
    assert set(report.frozen) == {"0.b", "1.bias"}
    assert report.free == []


def test_a_wrapped_model_is_reported_by_its_own_names():
    plugin, benchmark = GPMPlugin(), blobs(n_tasks=1, task_labels=False)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    naive(nn.DataParallel(model), [plugin]).train(benchmark.train_stream)
    assert list(plugin.memory) == ["module.0.weight", "module.2.weight"]
    assert list(plugin.report().bases) == ["0.weight", "2.weight"]
    assert plugin.report().frozen == ["0.bias", "2.bias"]


def test_verbose_prints_it_once(capsys):
    plugin = GPMPlugin(verbose=True)
    model = Network(nn.Sequential(nn.Linear(6, 10), nn.ReLU()), 10)
    naive(model, [plugin], train_epochs=1).train(blobs(n_tasks=2).train_stream)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "GPMPlugin after 1 experience, 0.00 MiB"
    assert sum(line.startswith("GPMPlugin") for line in lines) == 1
    assert lines[1].startswith("  protected  features.0.weight  ")
    assert lines[1].endswith(" of 6 directions")
    assert "  frozen     features.0.bias" in lines
    assert "  free       classifier.classifiers.0.classifier.weight" in lines


def test_a_plugin_without_a_model_has_nothing_to_report():
    with pytest.raises(ValueError, match="train it first"):
        GPMPlugin().report()

"""``measure_drift`` against outputs computed by hand, and as a check of what a plugin protects."""

from copy import deepcopy

import pytest
import torch
from avalanche.models import IncrementalClassifier
from torch import nn

from became_avalanche import GPMPlugin, measure_drift
from tests.helpers import CONV_SHAPE, Network, assert_same_weights, batch_of, blobs, convnet, mlp, naive, weights


@torch.no_grad()
def test_is_the_relative_change_of_each_layer_on_the_inputs_of_the_old_model():
    """Compute the definition by hand for two Linear layers. Task heads are left out."""
    before, after = mlp(bias=True), mlp(bias=True)
    x = torch.randn(300, 6)
    first, _, second, _ = before.features
    inputs = {"features.0": x, "features.2": first(x).relu()}
    drift = measure_drift(before, after, x)
    assert list(drift) == ["features.0", "features.2"]
    for (name, layer), other in zip(
        (("features.0", first), ("features.2", second)), (after.features[0], after.features[2]), strict=True
    ):
        old, new = (inputs[name].double() @ m.weight.double().T + m.bias.double() for m in (layer, other))
        assert drift[name] == pytest.approx(float((new - old).norm() / old.norm()), rel=1e-5)


def test_counts_whole_experiences_in_batches_and_leaves_no_trace():
    experience = blobs(shape=CONV_SHAPE).train_stream[0]
    before, after = convnet(), convnet()
    for model in (before, after):
        model.classifier.adaptation(experience)
    modes = [module.training for module in before.modules()]
    states = weights(before), weights(after)
    whole = measure_drift(before, after, experience)
    parts = measure_drift(before, after, experience.dataset, batch_size=7)
    assert whole == pytest.approx(parts, rel=1e-6)
    assert whole == pytest.approx(measure_drift(before, after, batch_of(experience)[0]), rel=1e-6)
    assert set(whole) == {"features.0", "features.1", "features.3", "features.6"}
    assert [module.training for module in before.modules()] == modes
    assert not any(module._forward_hooks for model in (before, after) for module in model.modules())
    for state, model in zip(states, (before, after), strict=True):
        assert_same_weights(state, weights(model))


def test_running_statistics_count():
    before = convnet()
    after = deepcopy(before)
    after.features[1].running_mean += 1
    drift = measure_drift(before, after, torch.randn(5, *CONV_SHAPE))
    assert drift["features.1"] > 0.1
    assert drift["features.0"] == drift["features.3"] == 0


def test_of_a_grown_head_the_old_outputs_are_compared():
    before = nn.Sequential(nn.Linear(6, 4), IncrementalClassifier(4, masking=False))
    after = deepcopy(before)
    after[1].classifier = nn.Linear(4, 5)
    after[1].classifier.weight.data[:2] = before[1].classifier.weight.data
    after[1].classifier.bias.data[:2] = before[1].classifier.bias.data
    drift = measure_drift(before, after, torch.randn(9, 6))
    assert drift == pytest.approx({"0": 0, "1.classifier": 0}, abs=1e-6)


def test_shows_what_a_plugin_protects():
    benchmark, results = blobs(samples=8, shape=(30,)), []
    for plugins in ([], [GPMPlugin(1, n_samples=None)]):
        torch.manual_seed(0)
        model = Network(nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 10)), 10)
        strategy = naive(model, plugins)
        strategy.train(benchmark.train_stream[0])
        before = deepcopy(model)
        strategy.train(benchmark.train_stream[1])
        results.append(max(measure_drift(before, strategy.model, benchmark.train_stream[0]).values()))
    assert results[0] > 1e-2 > 1e-5 > results[1]


def test_the_same_object_is_refused():
    model = mlp()
    with pytest.raises(ValueError, match="same object; copy the model"):
        measure_drift(model, model, torch.randn(3, 6))

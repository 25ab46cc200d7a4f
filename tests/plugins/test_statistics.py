"""Running statistics that drift are noticed, and can be frozen or kept for each task."""

from copy import deepcopy

import pytest
import torch
from avalanche.benchmarks.scenarios.deprecated.generic_benchmark_creation import (
    create_generic_benchmark_from_tensor_lists,
)
from torch import nn

from became_avalanche import (
    BecameMergePlugin,
    GPMPlugin,
    RunningStatistics,
    load_strategy,
    measure_drift,
    save_strategy,
)
from tests.helpers import Network, assert_same_weights, blobs, logits_of, naive, weights


def shifted(shift=5.0, task_labels=True):
    """Two tasks with the same classes; the inputs of the second are shifted."""
    first = blobs(n_tasks=1, samples=40, shape=(12,))
    streams = []
    for stream in (first.train_stream, first.test_stream):
        x = torch.stack([stream[0].dataset[i][0] for i in range(len(stream[0].dataset))])
        y = torch.tensor([stream[0].dataset[i][1] for i in range(len(stream[0].dataset))])
        streams.append([(x, y), (x + shift, y), (x - shift, y)])
    return create_generic_benchmark_from_tensor_lists(*streams, task_labels=[0, 1, 2] if task_labels else [0, 0, 0])


def normalised():
    return Network(nn.Sequential(nn.Linear(12, 20), nn.BatchNorm1d(20), nn.ReLU()), 20)


def trained(plugins, benchmark, n_tasks=3):
    """Return the strategy, the outputs of the first task right after it, and the drift of the layers since then."""
    torch.manual_seed(0)
    strategy = naive(normalised(), plugins)
    strategy.train(benchmark.train_stream[0])
    before, logits = deepcopy(strategy.model), logits_of(strategy, benchmark.test_stream[0])
    strategy.train(benchmark.train_stream[1:n_tasks])
    return strategy, logits, measure_drift(before, strategy.model, benchmark.train_stream[0])


def test_drift_is_noticed_once():
    with pytest.warns(
        UserWarning,
        match=r"running statistics of 1 normalisation layers.*features\.1 \(the mean by .*RunningStatistics\(\)",
    ) as w:
        _, _, drift = trained([GPMPlugin(1, n_samples=None)], shifted())
    assert len(w) == 1
    assert drift["features.1"] > 0.5


@pytest.mark.filterwarnings("error:the running statistics")
def test_small_drift_is_not():
    trained([GPMPlugin()], shifted(0.0))


@pytest.mark.filterwarnings("error:the running statistics")
@pytest.mark.parametrize("merge", [[], [BecameMergePlugin()]])
def test_frozen_statistics_stay_after_the_first_experience(merge):
    plugins = [GPMPlugin(1, n_samples=None), RunningStatistics("freeze"), *merge]
    strategy, _, drift = trained(plugins, shifted())
    fresh = normalised().features[1].running_mean
    assert not torch.equal(strategy.model.features[1].running_mean, fresh)
    assert drift["features.1"] == 0 or merge  # a merge moves scale and shift, not the statistics
    assert strategy.model.features[1].num_batches_tracked == 2 * 4  # the batches of the first task


def test_each_task_has_its_own_statistics():
    benchmark = shifted()
    plugin = RunningStatistics("task")
    strategy, logits, _ = trained([GPMPlugin(1, n_samples=None), plugin], benchmark)
    assert set(plugin.statistics) == {0, 1, 2}
    means = [plugin.statistics[t]["features.1.running_mean"] for t in range(3)]
    assert (means[0] - means[1]).norm() > 1
    torch.testing.assert_close(logits_of(strategy, benchmark.test_stream[0]), logits, atol=1e-4, rtol=1e-3)
    for t in (2, 0, 1):
        logits_of(strategy, benchmark.test_stream[t])
        assert torch.equal(strategy.model.features[1].running_mean, means[t])
    assert all(torch.equal(plugin.statistics[t]["features.1.running_mean"], means[t]) for t in range(3))


def test_a_task_that_is_trained_in_two_calls_keeps_its_statistics():
    benchmark, results = shifted(), []
    for evaluated in (False, True):
        torch.manual_seed(0)
        strategy = naive(normalised(), [RunningStatistics("task")])
        strategy.train(benchmark.train_stream[0])
        torch.manual_seed(1)
        strategy.train(benchmark.train_stream[1], task_continues=True)
        if evaluated:
            logits_of(strategy, benchmark.test_stream[0])  # copies the statistics of the first task into the model
        torch.manual_seed(2)
        strategy.train(benchmark.train_stream[1])
        results.append(weights(strategy.model))
    assert_same_weights(*results)


def test_statistics_continue_from_a_file(tmp_path):
    benchmark, results = shifted(), []
    for resumed in (False, True):
        strategy, _, _ = trained([RunningStatistics("task")], benchmark, n_tasks=2)
        if resumed:
            save_strategy(strategy, tmp_path / "state")
            strategy = naive(normalised(), [RunningStatistics("task")])
            load_strategy(strategy, tmp_path / "state")
        torch.manual_seed(2)
        strategy.train(benchmark.train_stream[2])
        logits_of(strategy, benchmark.test_stream[0])
        results.append(weights(strategy.model))
    assert_same_weights(*results)


def test_nonsense_is_refused():
    with pytest.raises(ValueError, match="mode must be one of: 'freeze', 'task'; got 'thaw'"):
        RunningStatistics("thaw")
    strategy = naive(normalised(), [RunningStatistics("task")])
    strategy.train(shifted().train_stream[0])
    strategy.mbatch = [torch.zeros(2, 12), torch.zeros(2), torch.tensor([0, 1])]
    with pytest.raises(ValueError, match=r"needs one task label; got \[0, 1\].*mode='freeze'"):
        strategy.plugins[0].before_forward(strategy)

"""A single head that grows: what old tasks have trained is protected, what is new is free."""

import io

import pytest
import torch
from avalanche.benchmarks.scenarios.deprecated.generic_benchmark_creation import (
    create_generic_benchmark_from_tensor_lists,
)
from avalanche.models import IncrementalClassifier
from torch import nn

from became_avalanche import (
    BecameMergePlugin,
    GPCNSPlugin,
    GPMPlugin,
    NSCLPlugin,
    OWMPlugin,
    SGPPlugin,
    load_strategy,
    measure_drift,
    save_strategy,
)
from tests.helpers import Spy, assert_same_weights, batch_of, naive, weights
from tests.plugins.test_projection import OPTIMIZERS

METHODS = {
    "gpm": lambda **options: GPMPlugin(1, n_samples=None, **options),
    "sgp": lambda **options: SGPPlugin(float("inf"), threshold=1, n_samples=None, **options),
    "nscl": lambda **options: NSCLPlugin(1, **options),
}
HEAD = "1.classifier.weight", "1.classifier.bias"


def classes(n_tasks=3, order=None, samples=12):
    """Tasks of two new classes each, all with the task label 0, in a space that old inputs do not fill."""
    order = order or list(range(2 * n_tasks))
    generator = torch.Generator().manual_seed(0)
    means = torch.randn(2 * n_tasks, 60, generator=generator)

    def task(t):
        y = torch.tensor(order[2 * t : 2 * t + 2]).repeat(samples // 2)
        return means[y] + 0.5 * torch.randn(samples, 60, generator=generator), y

    train, test = ([task(t) for t in range(n_tasks)] for _ in range(2))
    return create_generic_benchmark_from_tensor_lists(train, test, task_labels=[0] * n_tasks)


def growing(masking=True, initial=2):
    return nn.Sequential(
        nn.Sequential(nn.Linear(60, 50), nn.ReLU()), IncrementalClassifier(50, initial, masking=masking)
    )


def trained(plugins, benchmark, make_model=growing, optimizer="sgd", before_each=lambda strategy: None):
    torch.manual_seed(0)
    model, states = make_model(), []
    strategy = naive(model, plugins, OPTIMIZERS[optimizer](model.parameters()), train_epochs=3, train_mb_size=6)
    for experience in benchmark.train_stream:
        before_each(strategy)
        strategy.train(experience)
        states.append(weights(model))
    return strategy, states


def moved(states, benchmark, rows):
    """Return the relative change of the outputs ``rows`` of the head on the inputs of the first task."""
    x = batch_of(benchmark.train_stream[0])[0]

    def logits(state):
        hidden = (x @ state["0.0.weight"].T + state["0.0.bias"]).relu()
        return (hidden @ state["1.classifier.weight"].T + state["1.classifier.bias"])[:, rows]

    old, new = logits(states[0]), logits(states[-1])
    return float((new - old).norm() / old.norm())


@pytest.mark.parametrize("optimizer", ["sgd", "momentum and decay", "adam"])
@pytest.mark.parametrize("method", METHODS)
def test_old_outputs_stay_and_new_ones_learn(method, optimizer):
    benchmark = classes()
    plugin = METHODS[method]()
    _, states = trained([plugin], benchmark, optimizer=optimizer)
    _, free = trained([], benchmark, optimizer=optimizer)
    assert moved(states, benchmark, [0, 1]) < 1e-3
    assert moved(free, benchmark, [0, 1]) > 0.1
    assert plugin.memory[HEAD[0]]["outputs"].tolist() == [True] * 6
    for name in HEAD:
        assert not torch.equal(states[1][name][2:4], states[2][name][2:4]) or name == HEAD[1]
    fresh = states[2][HEAD[1]][4:]
    assert not torch.equal(fresh, free[0][HEAD[1]].new_zeros(2))


@pytest.mark.parametrize("optimizer", ["sgd", "decay", "adam"])
def test_new_rows_learn_as_they_would_without_projection(optimizer):
    """Compares the first step of a task, when both trainings have the same weights."""
    benchmark, steps = classes(n_tasks=2), []
    for threshold in (1, 0):
        seen = []
        spy = Spy(
            before_update=lambda s, seen=seen: seen.append(weights(s.model)),
            after_training_iteration=lambda s, seen=seen: seen.append(weights(s.model)),
        )
        plugin = GPMPlugin(1, n_samples=None)
        torch.manual_seed(0)
        model = growing()
        strategy = naive(model, [plugin], OPTIMIZERS[optimizer](model.parameters()), train_mb_size=6)
        strategy.train(benchmark.train_stream[0])
        strategy.plugins.insert(0, spy)
        torch.manual_seed(1)
        if threshold:
            strategy.train(benchmark.train_stream[1])
        else:
            with plugin.suspended():
                strategy.train(benchmark.train_stream[1])
        steps.append({name: seen[1][name] - seen[0][name] for name in HEAD})
    projected, free = steps
    for name in HEAD:
        assert free[name][2:].any()
        torch.testing.assert_close(projected[name][2:], free[name][2:])
    assert free[HEAD[1]][:2].any()
    assert not projected[HEAD[1]][:2].any()


def test_classes_in_any_order_count_by_their_label():
    benchmark = classes(order=[4, 0, 5, 2, 1, 3])
    plugin = GPMPlugin(1, n_samples=None)
    seen = []
    _, states = trained(
        [plugin, Spy(after_training_exp=lambda s: seen.append(plugin.memory[HEAD[0]]["outputs"].nonzero().flatten()))],
        benchmark,
    )
    assert [each.tolist() for each in seen] == [[0, 4], [0, 2, 4, 5], [0, 1, 2, 3, 4, 5]]
    assert moved(states, benchmark, [4, 0]) < 1e-3


@pytest.mark.parametrize("masking", [True, False])
def test_outputs_that_an_evaluation_has_added_are_new(masking):
    """An evaluation of the whole stream makes the head as wide as it will ever be."""
    benchmark = classes()
    plugin = GPMPlugin(1, n_samples=None)
    _, states = trained(
        [plugin], benchmark, lambda: growing(masking), before_each=lambda strategy: strategy.eval(benchmark.test_stream)
    )
    assert len(states[0][HEAD[1]]) == 6
    assert moved(states, benchmark, [0, 1]) < 1e-3
    assert not torch.equal(states[0][HEAD[1]][2:], states[2][HEAD[1]][2:])


def test_biases_with_their_weights():
    benchmark = classes()
    _, states = trained([GPMPlugin(1, n_samples=None, bias="augment")], benchmark)
    assert moved(states, benchmark, [0, 1]) < 1e-3
    assert not torch.equal(states[0][HEAD[1]], states[2][HEAD[1]][:2])


@pytest.mark.parametrize("method", [GPMPlugin, SGPPlugin, GPCNSPlugin, NSCLPlugin, OWMPlugin])
def test_memory_and_precision_survive_growth_and_files(method, tmp_path):
    """With a merge, through a file between tasks, bitwise as without it."""
    benchmark, results = classes(), []
    for resumed in (False, True):
        plugins = [method(), BecameMergePlugin(rule="cofima")]
        strategy, _ = trained(plugins, _first(benchmark, 2))
        if resumed:
            save_strategy(strategy, tmp_path / "state")
            plugins = [method(), BecameMergePlugin(rule="cofima")]
            model = growing()
            strategy = naive(model, plugins, OPTIMIZERS["sgd"](model.parameters()), train_epochs=3, train_mb_size=6)
            load_strategy(strategy, tmp_path / "state")
            file = io.BytesIO()
            torch.save(plugins[0].state_dict(), file)
            file.seek(0)
            plugins[0].load_state_dict(torch.load(file, weights_only=True))
        torch.manual_seed(5)
        strategy.train(benchmark.train_stream[2])
        assert plugins[1].precision[HEAD[0]].shape == (6, 50)
        assert len(plugins[1].merges) == 2
        assert plugins[0].memory[HEAD[0]]["outputs"].sum() == 6
        results.append(weights(strategy.model))
    assert_same_weights(*results)


class _First:
    def __init__(self, train_stream):
        self.train_stream = train_stream


def _first(benchmark, n):
    return _First(benchmark.train_stream[:n])


def test_a_fixed_single_head_is_a_layer_like_any_other():
    benchmark = classes()
    plugin = GPMPlugin(1, n_samples=None)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 6))
    strategy = naive(model, [plugin], train_mb_size=6)
    strategy.train(benchmark.train_stream[0])
    before = naive(nn.Sequential(nn.Linear(60, 50), nn.ReLU(), nn.Linear(50, 6)))
    before.model.load_state_dict(model.state_dict())
    strategy.train(benchmark.train_stream[1:])
    assert max(measure_drift(before.model, model, benchmark.train_stream[0]).values()) < 1e-5
    assert "outputs" not in plugin.memory["2.weight"]

import math
import warnings

import pytest
import torch
from avalanche.benchmarks import benchmark_with_validation_stream
from avalanche.training.supervised import JointTraining
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from became_avalanche import (
    BecameMergePlugin,
    DivergenceError,
    EqualTrainingPlugin,
    GPMPlugin,
    PlateauPlugin,
    TrainingPlateauPlugin,
)
from tests.helpers import (
    Spy,
    assert_same_weights,
    batch_of,
    blobs,
    blobs_without_task_labels,
    mlp,
    naive,
    weights,
)


def reference_schedule(losses, lr, patience, factor, lr_min):
    """Return the learning rate of each epoch and the best epoch, computed like the published training loops."""
    best, left, rates, best_epoch = math.inf, patience, [], None
    for epoch, loss in enumerate(losses):
        rates.append(lr)
        if loss < best:
            best, best_epoch = loss, epoch
            left = patience
        else:
            left -= 1
            if left <= 0:
                lr /= factor
                if lr < lr_min:
                    break
                left = patience
    return rates, best_epoch


class Scripted(PlateauPlugin):
    """Gets its validation losses from a list."""

    def __init__(self, losses, *args):
        super().__init__(*args)
        self.script = iter(losses)

    def loss(self, strategy):
        return next(self.script)


class Watch:
    """Records learning rates and weights of all epochs."""

    def __init__(self):
        self.rates, self.states = [], []
        self.plugin = Spy(
            before_training_epoch=lambda s: self.rates.append(s.optimizer.param_groups[0]["lr"]),
            after_training_iteration=lambda s: self.states.append(weights(s.model)),
        )


@given(
    losses=st.lists(st.integers(0, 20), min_size=1, max_size=25),
    patience=st.integers(1, 3),
    factor=st.sampled_from([2.0, 3.0]),
    lr_min=st.sampled_from([0.1, 0.01, 0.001]),
)
def test_schedule_is_the_published_one(losses, patience, factor, lr_min):
    torch.manual_seed(0)
    model, watch = mlp(), Watch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    plugin = Scripted(losses, patience, factor, lr_min)
    strategy = naive(model, [plugin, watch.plugin], optimizer, train_epochs=len(losses), train_mb_size=50)
    strategy.train(blobs(n_tasks=1).train_stream)
    rates, best_epoch = reference_schedule(losses, 0.2, patience, factor, lr_min)
    assert watch.rates[: len(rates)] == pytest.approx(rates)
    assert len(watch.states) == len(rates)
    assert_same_weights(watch.states[best_epoch], weights(model))
    assert optimizer.param_groups[0]["lr"] == 0.2  # as it was, for the next experience
    assert not strategy._stop_training or len(watch.rates) > len(rates)


def test_each_stage_is_such_a_training():
    script = [5, 4, 6, 3, 9, 9, 9, 9] * 3
    stages = []

    def start(strategy, stage):
        stages.append([stage, weights(strategy.model), 0])

    def count(strategy):
        stages[-1][2] += 1

    torch.manual_seed(0)
    watch, model = Watch(), mlp()
    spy = Spy(on_stage_start=start, after_training_epoch=count)
    strategy = naive(
        model,
        [Scripted(script, 2, 2.0, 0.05), GPMPlugin(), BecameMergePlugin(), watch.plugin, spy],
        train_epochs=10,
        train_mb_size=50,
    )
    strategy.train(blobs(n_tasks=2).train_stream)
    # Losses 5, 4, 6, 3, 9, 9 | lr 0.05 | 9, 9 | stop: eight epochs, the fourth is best.
    assert [(stage, epochs) for stage, _, epochs in stages] == [(1, 8), (1, 8), (2, 8)]
    assert_same_weights(watch.states[8 + 3], stages[2][1])  # stage 2 starts from the best weights of stage 1


def test_loss_is_that_of_the_validation_experience_of_the_same_index():
    benchmark, seen = blobs(), []
    plugin = PlateauPlugin(batch_size=5)

    def compare(strategy):
        experience = benchmark.valid_stream[strategy.clock.train_exp_counter]
        data = [experience.dataset[i] for i in range(len(experience.dataset))]
        x, y = torch.stack([d[0] for d in data]), torch.tensor([d[1] for d in data])
        before = torch.get_rng_state()
        loss = plugin.loss(strategy)
        assert torch.equal(before, torch.get_rng_state())
        with torch.no_grad():
            expected = F.cross_entropy(strategy.model(x, torch.full((len(x),), data[0][2])), y)
        seen.append((loss, float(expected)))

    strategy = naive(mlp(), [plugin, Spy(after_training_epoch=compare)])
    strategy.train(benchmark.train_stream)
    assert len(seen) == 6
    for loss, expected in seen:
        assert loss == pytest.approx(expected, rel=1e-5)


def test_joint_training_is_validated_on_all_tasks():
    benchmark, sizes = blobs(), []
    plugin, model = PlateauPlugin(), mlp()
    strategy = JointTraining(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=torch.nn.CrossEntropyLoss(),
        plugins=[plugin, Spy(after_training_epoch=lambda s: sizes.append(len(plugin._datasets)))],
        evaluator=naive(mlp()).evaluator,
        train_mb_size=30,
    )
    strategy.train(benchmark.train_stream)
    assert sizes == [3]


def test_control_trains_a_second_projected_stage_without_a_merge():
    log, states = [], []
    torch.manual_seed(0)
    plugin = GPMPlugin(threshold=1, n_samples=None)
    spy = Spy(
        on_stage_start=lambda s, stage: log.append((s.clock.train_exp_counter, stage, len(s.optimizer.state))),
        after_training_epoch=lambda s: states.append(weights(s.model)),
        after_training_exp=lambda s: states.append(weights(s.model)),
    )
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = naive(model, [spy, plugin, EqualTrainingPlugin()], optimizer, train_epochs=1)
    strategy.train(blobs(samples=200).train_stream)
    assert log == [(0, 1, 0), (1, 1, 0), (1, 2, 0), (2, 1, 0), (2, 2, 0)]
    assert_same_weights(states[-1], states[-2])  # what stage 2 ended with stays
    assert len({tuple(state["features.0.weight"].flatten().tolist()) for state in states}) == 1  # projected all along
    head = "classifier.classifiers.2.classifier.weight"
    assert not torch.equal(states[-1][head], states[-3][head])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"patience": 0}, r"patience.*got 0"),
        ({"factor": 1}, r"factor.*got 1"),
        ({"lr_min": 0}, r"lr_min.*got 0"),
        ({"factor": math.nan}, r"factor.*got nan"),
    ],
)
def test_nonsense_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        PlateauPlugin(**arguments)


def test_missing_stream_is_named():
    with pytest.raises(ValueError, match=r"needs a stream 'dev'.*only the streams test, train, valid"):
        naive(mlp(), [PlateauPlugin(stream="dev")]).train(blobs().train_stream)


class ScriptedTraining(TrainingPlateauPlugin):
    """Gets its training losses from a list."""

    def __init__(self, losses, *args):
        super().__init__(*args)
        self.script = iter(losses)

    def loss(self, strategy):
        return next(self.script)


@given(
    losses=st.lists(st.integers(0, 20), min_size=1, max_size=25),
    patience=st.integers(1, 3),
    plateaus=st.integers(1, 3),
)
def test_training_ends_at_the_given_plateau_of_the_training_loss(losses, patience, plateaus):
    model, watch = mlp(), Watch()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    plugin = ScriptedTraining(losses, patience, 2, plateaus)
    strategy = naive(model, [plugin, watch.plugin], optimizer, train_epochs=len(losses), train_mb_size=50)
    strategy.train(blobs(n_tasks=1).train_stream)
    best, bad, met, rates = math.inf, 0, 0, []
    for loss in losses:
        rates.append(0.2 / 2**met)
        bad = 0 if loss < best else bad + 1
        best = min(best, loss)
        if bad == patience:
            bad, met = 0, met + 1
        if met == plateaus:
            break
    assert watch.rates[: len(rates)] == pytest.approx(rates)
    assert len(watch.states) == len(rates)
    assert_same_weights(watch.states[-1], weights(model))  # the last ones, not the best
    assert optimizer.param_groups[0]["lr"] == 0.2


def test_each_stage_ends_by_its_training_loss():
    stages = []
    plugin = ScriptedTraining([3, 2, 2, 2] * 3, 1, 2, 2)
    spy = Spy(on_stage_start=lambda s, stage: stages.append(0), after_training_epoch=lambda s: count(stages))

    def count(stages):
        stages[-1] += 1

    naive(mlp(), [plugin, GPMPlugin(), BecameMergePlugin(), spy], train_epochs=9).train(blobs(n_tasks=2).train_stream)
    assert stages == [4, 4, 4]


def test_training_loss_is_the_mean_over_the_samples_of_the_epoch_with_penalties():
    plugin, seen, losses = TrainingPlateauPlugin(), [], []

    def penalise(strategy):
        strategy.loss += 2

    spy = Spy(
        before_backward=penalise,
        after_training_iteration=lambda s: losses.append((s.loss.item(), len(s.mb_y))),
        after_training_epoch=lambda s: seen.append(plugin.loss(s)),
    )
    naive(mlp(), [spy, plugin], train_epochs=2, train_mb_size=15).train(blobs(n_tasks=1, samples=40).train_stream)
    assert [size for _, size in losses] == [15, 15, 10] * 2
    assert seen == pytest.approx([sum(loss * size for loss, size in epoch) / 40 for epoch in (losses[:3], losses[3:])])
    assert min(seen) > 2


@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_training_loss_that_is_not_finite_is_an_error(factor):
    spy = Spy(before_backward=lambda s: s.loss.mul_(factor))
    with pytest.raises(DivergenceError, match=r"the training loss is not finite: (nan|inf)"):
        naive(mlp(), [spy, TrainingPlateauPlugin()]).train(blobs(n_tasks=1).train_stream)


def test_training_needs_at_least_one_plateau():
    with pytest.raises(ValueError, match="plateaus must be at least 1; got 0"):
        TrainingPlateauPlugin(plateaus=0)


def test_divergence_is_an_error():
    strategy = naive(mlp(), [Scripted([math.nan] * 5, 2, 2.0, 0.1)], train_epochs=5)
    with pytest.raises(DivergenceError, match="diverged; lower the learning rate"):
        strategy.train(blobs(n_tasks=1).train_stream)


# ---------------------------------------------------------------------------------- where validation data come from


def split_off():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="stream generator will be converted to a list")
        return benchmark_with_validation_stream(blobs(n_tasks=2, task_labels=False), 0.25, shuffle=False)


def from_datasets():
    return blobs_without_task_labels(n_tasks=2)


def single_head():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))


@pytest.mark.parametrize("make", [split_off, from_datasets])
@pytest.mark.parametrize("source", ["a stream", "datasets", "one dataset", "eval_streams"])
def test_validation_data_of_streams_that_do_not_know_their_benchmark(make, source):
    benchmark = make()
    valid = {
        "a stream": benchmark.valid_stream,
        "datasets": [experience.dataset for experience in benchmark.valid_stream],
        "one dataset": benchmark.valid_stream[0].dataset,
        "eval_streams": None,
    }[source]
    plugin, losses = PlateauPlugin(valid=valid), []

    def expected(strategy):
        t = 0 if source == "one dataset" else strategy.clock.train_exp_counter
        x, y = batch_of(benchmark.valid_stream[t])
        with torch.no_grad():
            losses.append((plugin.last_loss, float(F.cross_entropy(strategy.model(x), y))))

    strategy = naive(single_head(), [plugin, Spy(after_training_epoch=expected)])
    for experience in benchmark.train_stream:
        strategy.train(experience, [benchmark.valid_stream] if source == "eval_streams" else [])
    assert len(losses) == 4
    for seen, loss in losses[::2]:  # the last epoch ends with the best weights
        assert seen == pytest.approx(loss, rel=1e-5)


def test_missing_validation_data_is_explained():
    benchmark = split_off()
    with pytest.raises(
        ValueError, match=r"does not know its benchmark; pass the data as PlateauPlugin\(valid=\.\.\.\)"
    ):
        naive(single_head(), [PlateauPlugin()]).train(benchmark.train_stream[0])
    with pytest.raises(ValueError, match="valid has data for 1 experiences, but got experience 1 to train"):
        naive(single_head(), [PlateauPlugin(valid=benchmark.valid_stream[:1])]).train(benchmark.train_stream[1])

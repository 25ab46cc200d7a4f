"""What may go wrong, or is unusual, in a training: each has the outcome that docs/faults.md promises."""

import copy
import io
import pickle

import dill
import pytest
import torch
from avalanche.benchmarks.scenarios.deprecated.generic_benchmark_creation import (
    create_generic_benchmark_from_tensor_lists,
)
from avalanche.logging import TextLogger
from avalanche.training.plugins import EvaluationPlugin, ReplayPlugin
from avalanche.training.supervised import Naive
from torch import nn
from torch.nn import functional as F

from became_avalanche import (
    BecameMergePlugin,
    ConnectorPlugin,
    DivergenceError,
    GPCNSPlugin,
    GPMPlugin,
    NSCLPlugin,
    OWMPlugin,
    PlateauPlugin,
    SGPPlugin,
    TRGPPlugin,
)
from tests.helpers import (
    CONV_SHAPE,
    Spy,
    assert_same_weights,
    batch_of,
    blobs,
    convnet,
    mlp,
    naive,
    stream_of,
    weights,
)

METHODS = {
    "gpm": lambda: [GPMPlugin(threshold=0.999)],
    "gpm+became": lambda: [GPMPlugin(threshold=0.999), BecameMergePlugin()],
    "sgp+became": lambda: [SGPPlugin(), BecameMergePlugin()],
    "trgp+became": lambda: [TRGPPlugin(), BecameMergePlugin()],
    "gpcns+became": lambda: [GPCNSPlugin(), BecameMergePlugin()],
    "nscl+became": lambda: [NSCLPlugin(), BecameMergePlugin()],
    "owm+became": lambda: [OWMPlugin(), BecameMergePlugin()],
    "connector": lambda: [ConnectorPlugin()],
}
every_method = pytest.mark.parametrize("method", METHODS)


def both():
    return METHODS["gpm+became"]()


def single_head():
    return nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 2))


def coefficients(plugins):
    return [merge.coefficient for plugin in plugins if isinstance(plugin, BecameMergePlugin) for merge in plugin.merges]


def assert_sound(strategy, plugins, merges=2):
    """All weights are finite, and so is every λ, which lies between 0 and 1."""
    assert all(parameter.isfinite().all() for parameter in strategy.model.parameters())
    if any(isinstance(plugin, BecameMergePlugin) for plugin in plugins):
        assert len(coefficients(plugins)) == merges
        assert all(0 <= value <= 1 for value in coefficients(plugins))


def moved(strategy, benchmark, features=lambda model: model.features):
    """How far the features of task 1 move while tasks 2 and 3 are trained."""
    x, _ = batch_of(benchmark.train_stream[0])
    strategy.train(benchmark.train_stream[0])
    before = features(strategy.model)(x).detach()
    for experience in benchmark.train_stream[1:]:
        strategy.train(experience)
    return float((features(strategy.model)(x).detach() - before).norm() / before.norm())


# ------------------------------------------------------------------------------------------------------- divergence


def nan_loss(experience, stage):
    """Makes the loss of a stage of an experience NaN."""
    now = {"stage": 1}

    def spoil(strategy):
        if (strategy.clock.train_exp_counter, now["stage"]) == (experience, stage):
            strategy.loss = strategy.loss * float("nan")

    return Spy(on_stage_start=lambda strategy, stage: now.update(stage=stage), before_backward=spoil)


def test_nan_in_stage_1_leaves_the_weights_of_the_task_before():
    ends = []
    plugins = [*both(), nan_loss(1, 1), Spy(after_training_exp=lambda strategy: ends.append(weights(strategy.model)))]
    strategy, benchmark = naive(mlp(), plugins), blobs()
    strategy.train(benchmark.train_stream[0])
    with pytest.raises(DivergenceError, match="after stage 1 of task 2 the weights are not finite"):
        strategy.train(benchmark.train_stream[1])
    after = weights(strategy.model)
    assert_same_weights({name: after[name] for name in ends[0]}, ends[0])
    assert plugins[0].experiences == plugins[1].t == 1


def test_nan_in_stage_2_leaves_the_weights_of_stage_1():
    starts = []
    plugins = [
        *both(),
        nan_loss(1, 2),
        Spy(on_stage_start=lambda strategy, stage: starts.append((stage, weights(strategy.model)))),
    ]
    strategy, benchmark = naive(mlp(), plugins), blobs()
    strategy.train(benchmark.train_stream[0])
    with pytest.raises(DivergenceError, match="Fisher information of task 2 is not finite"):
        strategy.train(benchmark.train_stream[1])
    assert starts[-1][0] == 2
    assert_same_weights(weights(strategy.model), starts[-1][1])  # where stage 2 began
    assert plugins[1].merges == []


@pytest.mark.parametrize("fisher", ["batched", "exact"])
def test_nan_in_the_fisher_information_leaves_the_weights_of_stage_1(fisher):
    class Spoilt(BecameMergePlugin):
        def estimate_fisher(self, *args):
            fisher = super().estimate_fisher(*args)
            return {name: value * float("nan") if self.t else value for name, value in fisher.items()}

    plugins = [GPMPlugin(), Spoilt(fisher=fisher)]
    strategy, benchmark = naive(mlp(), plugins), blobs()
    strategy.train(benchmark.train_stream[0])
    with pytest.raises(DivergenceError, match="Fisher information of task 2 is not finite"):
        strategy.train(benchmark.train_stream[1])
    assert all(parameter.isfinite().all() for parameter in strategy.model.parameters())


def test_nan_in_the_first_task():
    with pytest.raises(DivergenceError, match="lower the learning rate"):
        stream_of([*both(), nan_loss(0, 1)])


# ------------------------------------------------------------------------------------------------------- small tasks


def with_tasks(*tasks):
    """A stream of these (x, y), with ordinary test data."""
    return create_generic_benchmark_from_tensor_lists(
        tasks, [batch_of(e) for e in blobs(len(tasks)).test_stream], task_labels=list(range(len(tasks)))
    )


@every_method
def test_an_empty_experience_is_refused(method):
    plugins = METHODS[method]()
    first, second = map(batch_of, blobs(2).train_stream)
    benchmark = with_tasks(first, (second[0][:0], second[1][:0]))
    strategy = naive(mlp(), plugins)
    strategy.train(benchmark.train_stream[0])
    with pytest.raises(ValueError, match="got an experience without training samples; remove it from the stream"):
        strategy.train(benchmark.train_stream[1])


@every_method
@pytest.mark.parametrize("samples", [1, 2])
def test_tasks_of_one_or_two_samples(method, samples):
    plugins = METHODS[method]()
    assert_sound(stream_of(plugins, benchmark=blobs(samples=samples)), plugins)


@every_method
def test_tasks_of_one_class(method):
    plugins = METHODS[method]()
    assert_sound(stream_of(plugins, benchmark=blobs(classes=1, samples=20)), plugins)


@pytest.mark.parametrize("method", ["gpm+became", "trgp+became", "nscl+became"])
def test_a_last_batch_of_one_sample(method):
    plugins = METHODS[method]()
    benchmark = blobs(2, samples=11, shape=CONV_SHAPE)
    assert_sound(stream_of(plugins, make_model=convnet, benchmark=benchmark), plugins, merges=1)


# ----------------------------------------------------------------------------------------------------------- numbers


def typed(dtype, task_labels):
    """The stream in another precision."""
    benchmark = blobs(samples=20)
    parts = [[(x.to(dtype), y) for x, y in map(batch_of, stream)] for stream in benchmark.streams.values()][:2]
    return create_generic_benchmark_from_tensor_lists(*parts, task_labels=[0, 1, 2] if task_labels else [0] * 3)


@every_method
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_half_and_double_precision(method, dtype):
    plugins = METHODS[method]()
    benchmark = typed(dtype, method == "trgp+became")
    strategy = stream_of(plugins, make_model=lambda: single_head().to(dtype), benchmark=benchmark)
    assert_sound(strategy, plugins)
    assert {parameter.dtype for parameter in strategy.model.parameters()} == {dtype}


def test_protection_is_as_good_as_the_precision():
    for dtype, bound in ((torch.float16, 0.02), (torch.float64, 1e-4)):
        torch.manual_seed(0)
        strategy = naive(single_head().to(dtype), [GPMPlugin(threshold=1, exclude=["2"])])
        assert moved(strategy, typed(dtype, False), lambda model: model[:2]) < bound


# ------------------------------------------------------------------------------------------------------- optimizers


class WithClosure(Naive):
    """Avalanche's strategies call ``optimizer.step()``, which LBFGS does not accept."""

    def optimizer_step(self):
        def closure():
            self.optimizer.zero_grad()
            self.mb_output = self.forward()
            loss = self.criterion()
            loss.backward()
            return float(loss.detach())

        self.optimizer.step(closure)


def lbfgs(model, plugins):
    return WithClosure(
        model=model,
        optimizer=torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
        plugins=plugins,
        evaluator=EvaluationPlugin(loggers=[TextLogger(io.StringIO())]),
        train_mb_size=10,
    )


def test_lbfgs_is_projected():
    far = moved(lbfgs(single_head(), []), blobs(task_labels=False), lambda model: model[:2])
    near = moved(lbfgs(single_head(), [GPMPlugin(threshold=1)]), blobs(task_labels=False), lambda model: model[:2])
    assert near < 1e-4 < 0.01 < far


def test_lbfgs_with_the_merge():
    plugins = both()
    strategy = lbfgs(single_head(), plugins)
    strategy.train(blobs(task_labels=False).train_stream)
    assert_sound(strategy, plugins)


@every_method
def test_lbfgs_with_heads_that_grow_is_refused(method):
    with pytest.raises(ValueError, match="cannot train the heads that 'classifier' adds"):
        lbfgs(mlp(), METHODS[method]()).train(blobs().train_stream[0])


def test_lbfgs_with_trgp_is_refused():
    with pytest.raises(ValueError, match="LBFGS takes one parameter group, and TRGPPlugin"):
        lbfgs(single_head(), [TRGPPlugin()]).train(blobs().train_stream[0])


@every_method
def test_several_parameter_groups(method):
    plugins, model = METHODS[method](), mlp(bias=True)
    groups = [{"params": model.features.parameters(), "lr": 0.05}, {"params": model.classifier.parameters()}]
    strategy = naive(model, plugins, torch.optim.SGD(groups, lr=0.1, momentum=0.9, weight_decay=1e-3))
    strategy.train(blobs(samples=20).train_stream)
    assert_sound(strategy, plugins)
    assert [group["lr"] for group in strategy.optimizer.param_groups] == [0.05, 0.1]


def test_weights_and_biases_in_groups_of_their_own():
    model = single_head()
    decayed = [p for name, p in model.named_parameters() if "weight" in name]
    free = [p for name, p in model.named_parameters() if "bias" in name]
    optimizer = torch.optim.SGD([{"params": decayed, "weight_decay": 0.1}, {"params": free}], lr=0.1)
    strategy = naive(model, [GPMPlugin(threshold=1)], optimizer)
    assert moved(strategy, blobs(task_labels=False), lambda model: model[:2]) < 1e-4


# ------------------------------------------------------------------------------------------------------------ losses


def one_hot_bce(logits, y):
    return F.binary_cross_entropy_with_logits(logits, F.one_hot(y, logits.shape[1]).float())


LOSSES = {
    "sum": nn.CrossEntropyLoss(reduction="sum"),
    "label smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
    "class weights": nn.CrossEntropyLoss(weight=torch.tensor([1.0, 3.0])),
    "binary": one_hot_bce,
}


@pytest.mark.parametrize("loss", LOSSES)
def test_other_losses(loss):
    plugins = both()
    strategy = stream_of(plugins, criterion=LOSSES[loss], optimizer=lambda p: torch.optim.SGD(p, lr=0.02))
    assert_sound(strategy, plugins)


def test_a_sum_and_a_mean_give_the_same_fisher_information():
    fishers = []

    class Noted(BecameMergePlugin):
        def estimate_fisher(self, *args):
            fishers.append(super().estimate_fisher(*args))
            return fishers[-1]

    for reduction, rate in (("mean", 0.1), ("sum", 0.01)):  # batches of ten, and one of one
        stream_of(
            [Noted()],
            benchmark=blobs(1, samples=30),
            criterion=nn.CrossEntropyLoss(reduction=reduction),
            optimizer=lambda p, rate=rate: torch.optim.SGD(p, lr=rate),
        )
    for name, value in fishers[0].items():
        assert torch.allclose(value, fishers[1][name], rtol=1e-3, atol=1e-9), name


def test_a_sum_and_a_mean_meet_the_same_plateau():
    def best(reduction):
        noted = []
        plateau = PlateauPlugin(patience=1)
        plateau.loss = lambda strategy, loss=plateau.loss: noted.append(loss(strategy)) or noted[-1]
        rate = 0.1 if reduction == "mean" else 0.01
        criterion = nn.CrossEntropyLoss(reduction=reduction)
        stream_of([plateau], benchmark=blobs(1, samples=30), criterion=criterion,
                  optimizer=lambda p: torch.optim.SGD(p, lr=rate), train_epochs=2)  # fmt: skip
        return noted

    assert best("sum") == pytest.approx(best("mean"), rel=1e-3)


def test_sample_weights():
    """A strategy whose loss weighs samples, here by what the inputs are."""

    class Weighted(Naive):
        def criterion(self):
            losses = F.cross_entropy(self.mb_output, self.mb_y, reduction="none")
            return (losses * (1 + self.mb_x[:, 0].sigmoid())).mean()

    plugins = both()
    model = mlp()
    strategy = Weighted(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), plugins=plugins,
                        evaluator=EvaluationPlugin(loggers=[TextLogger(io.StringIO())]), train_mb_size=10)  # fmt: skip
    strategy.train(blobs().train_stream)
    assert_sound(strategy, plugins)


# ---------------------------------------------------------------------------------------------------- ways to train


def trained(plugins, train):
    torch.manual_seed(0)
    strategy = naive(mlp(), plugins)
    train(strategy, blobs(samples=20).train_stream)
    return weights(strategy.model)


def one_by_one(strategy, stream, **options):
    for experience in stream:
        strategy.train(experience, **options)


@every_method
def test_a_whole_stream_in_one_call_is_as_experiences_one_by_one(method):
    at_once = trained(METHODS[method](), lambda strategy, stream: strategy.train(stream))
    assert_same_weights(at_once, trained(METHODS[method](), one_by_one))


def test_a_list_of_experiences():
    as_list = trained(both(), lambda strategy, stream: strategy.train(list(stream)))
    assert_same_weights(as_list, trained(both(), one_by_one))


def test_worker_processes_change_nothing():
    with_workers = trained(both(), lambda strategy, stream: one_by_one(strategy, stream[:2], num_workers=1))
    assert_same_weights(with_workers, trained(both(), lambda strategy, stream: one_by_one(strategy, stream[:2])))


@pytest.mark.filterwarnings("ignore:Call to deprecated function update:DeprecationWarning")
@pytest.mark.parametrize("method", [name for name in METHODS if name != "trgp+became"])
def test_replay_that_mixes_tasks(method):
    plugins = METHODS[method]()
    strategy = naive(mlp(), [*plugins, ReplayPlugin(mem_size=10)])
    strategy.train(blobs().train_stream)
    assert_sound(strategy, plugins)


@pytest.mark.filterwarnings("ignore:Call to deprecated function update:DeprecationWarning")
def test_replay_that_mixes_tasks_with_trgp_is_refused():
    with pytest.raises(ValueError, match=r"a batch mixes the tasks \[0, 1\]"):
        naive(mlp(), [TRGPPlugin(), ReplayPlugin(mem_size=10)]).train(blobs().train_stream)


@every_method
def test_a_copied_strategy_continues_as_the_original(method):
    strategy, stream = naive(mlp(), METHODS[method]()), blobs(samples=20).train_stream
    strategy.evaluator.loggers = []  # Avalanche's text logger holds an open file
    strategy.train(stream[:2])
    copies = copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy)), dill.loads(dill.dumps(strategy))
    ends = []
    for each in (strategy, *copies):
        torch.manual_seed(1)
        each.train(stream[2])
        ends.append(weights(each.model))
    for other, end in zip(copies, ends[1:], strict=True):
        assert_same_weights(ends[0], end)
        assert other.plugins[0] is not strategy.plugins[0]

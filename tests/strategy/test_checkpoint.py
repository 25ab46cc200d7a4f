"""Train some tasks, save, load into fresh objects, train the rest: bitwise the same as without the interruption."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from avalanche.benchmarks.scenarios.deprecated.generic_benchmark_creation import (
    create_generic_benchmark_from_tensor_lists,
)
from avalanche.checkpointing import maybe_load_checkpoint, save_checkpoint
from avalanche.evaluation.metrics import accuracy_metrics, forgetting_metrics
from avalanche.logging import BaseLogger
from avalanche.models import IncrementalClassifier
from avalanche.models.dynamic_modules import DynamicModule
from avalanche.training.plugins import (
    AGEMPlugin,
    EarlyStoppingPlugin,
    EWCPlugin,
    LRSchedulerPlugin,
    LwFPlugin,
    ReplayPlugin,
    SupervisedPlugin,
    SynapticIntelligencePlugin,
)
from avalanche.training.supervised import Cumulative
from torch import nn
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, ReduceLROnPlateau, SequentialLR, StepLR

from became_avalanche import (
    AccuracyMatrix,
    BecameMergePlugin,
    ConnectorPlugin,
    EqualTrainingPlugin,
    GPCNSPlugin,
    GPMPlugin,
    LaterTaskLR,
    NotResumableError,
    NSCLPlugin,
    OWMPlugin,
    PlateauPlugin,
    SGPPlugin,
    StateFileError,
    TrainingPlateauPlugin,
    TRGPPlugin,
    load_strategy,
    nscl_groups,
    save_strategy,
)
from became_avalanche.strategy.checkpoint import not_resumable, strategy_state
from tests.helpers import CONV_SHAPE, Network, Spy, assert_same_weights, batch_of, blobs, convnet, mlp, naive, weights
from tests.runs.conftest import forked, how_it_ended


class Dropout(nn.Sequential):
    """Features that draw random numbers in training."""

    def __init__(self):
        super().__init__(nn.Linear(6, 12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 10), nn.ReLU())


class Copying(SynapticIntelligencePlugin):
    """Synaptic Intelligence that keeps copies, so that it works on the CPU, and accepts heads without gradients."""

    def before_training_exp(self, strategy, **kwargs):
        super().before_training_exp(strategy, **kwargs)
        self.copy(self.ewc_data[0])

    def before_training_iteration(self, strategy, **kwargs):
        super().before_training_iteration(strategy, **kwargs)
        self.copy(self.syn_data["old_theta"])

    def after_training_iteration(self, strategy, **kwargs):
        for parameter in strategy.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        super().after_training_iteration(strategy, **kwargs)

    def copy(self, values):
        for value in values.values():
            value.data = value.data.clone()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def momentum(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=0.01)


def adam_in_groups(model):
    return torch.optim.Adam(nscl_groups(model, lr=1e-2, head_lr=2e-2, normalisation_lr=1e-2))


def schedule(make, **options):
    """A schedule that is not reset between experiences."""
    return lambda optimizer: [LRSchedulerPlugin(make(optimizer), reset_scheduler=False, reset_lr=False, **options)]


def plugins(*makers):
    return lambda optimizer: [make() for make in makers]


def sequential(optimizer):
    first = LinearLR(optimizer, 0.5, total_iters=5)
    return SequentialLR(optimizer, [first, MultiStepLR(optimizer, [0, 2])], [5])


PROJECTIONS = {
    "gpm": GPMPlugin,
    "sgp": SGPPlugin,
    "trgp": lambda: TRGPPlugin(trust_threshold=0.1),
    "gpcns": GPCNSPlugin,
    "nscl": lambda: NSCLPlugin(100),
    "owm": OWMPlugin,
}
CASES = {
    "gpm": (sgd, plugins(GPMPlugin)),
    **{f"{name}+became, momentum": (momentum, plugins(make, BecameMergePlugin)) for name, make in PROJECTIONS.items()},
    "nscl+became in groups": (adam_in_groups, plugins(NSCLPlugin, BecameMergePlugin, lambda: LaterTaskLR(1e-3))),
    "gpm-2x": (sgd, plugins(GPMPlugin, EqualTrainingPlugin)),
    "two projections": (sgd, plugins(GPMPlugin, lambda: GPMPlugin(threshold=0.5))),
    "connector": (adam, plugins(lambda: NSCLPlugin(100), ConnectorPlugin)),
    "connector+became": (adam, plugins(lambda: NSCLPlugin(100), ConnectorPlugin, BecameMergePlugin)),
    "finetune+cofima": (sgd, plugins(lambda: BecameMergePlugin(rule="cofima"))),
    "plateau": (sgd, plugins(GPMPlugin, BecameMergePlugin, lambda: PlateauPlugin(patience=1))),
    "training plateau": (momentum, plugins(lambda: TrainingPlateauPlugin(patience=1))),
    "momentum": (momentum, plugins()),
    "adam": (adam, plugins()),
    "step": (momentum, schedule(lambda o: StepLR(o, 3, 0.5))),
    "milestones": (sgd, schedule(lambda o: MultiStepLR(o, [1, 3, 5]))),
    "sequential": (sgd, schedule(sequential)),
    "on plateau": (sgd, schedule(lambda o: ReduceLROnPlateau(o, patience=0), metric="train_loss")),
    "ewc": (sgd, plugins(lambda: EWCPlugin(1.0))),
    "online ewc": (momentum, plugins(lambda: EWCPlugin(1.0, mode="online", decay_factor=0.9))),
    "si": (momentum, plugins(lambda: Copying(1.0))),
    "lwf": (momentum, plugins(lambda: LwFPlugin(1.0))),
}


def with_dropout():
    return Network(Dropout(), 10)


def build(make_optimizer, make_plugins, make_model=with_dropout, **options):
    """Build a strategy, always with the same weights, and its accuracy matrix."""
    torch.manual_seed(0)
    model = make_model()
    optimizer = make_optimizer(model)
    matrix = AccuracyMatrix()
    strategy = naive(model, make_plugins(optimizer), optimizer, metrics=[matrix], **options)
    return strategy, matrix


def train(strategy, benchmark, start, stop):
    for experience in benchmark.train_stream[start:stop]:
        strategy.train(experience)
        strategy.eval(benchmark.test_stream)


def disturb():
    """Draw random numbers, as other code would."""
    torch.rand(17), np.random.rand(5), random.random()


def assert_same_strategies(one, other):
    assert_same_weights(weights(one.model), weights(other.model))
    assert [name for name, _ in one.model.named_parameters()] == [name for name, _ in other.model.named_parameters()]
    states = [strategy.optimizer.state_dict() for strategy in (one, other)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    assert vars(one.clock) == vars(other.clock)
    for plugin, twin in zip(one.plugins, other.plugins, strict=True):
        if isinstance(plugin, BecameMergePlugin):
            pairs = zip(plugin.merges, twin.merges, strict=True)
            assert plugin.merges
            assert all(a.coefficient == b.coefficient and a.plasticity == b.plasticity for a, b in pairs)
    assert one.evaluator.get_last_metrics() == other.evaluator.get_last_metrics()
    assert list(one.evaluator.get_all_metrics()) == list(other.evaluator.get_all_metrics())


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning")  # in Avalanche's SI
@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad:UserWarning")  # in its LRSchedulerPlugin
@pytest.mark.parametrize("case", CASES)
def test_continues_bitwise(case, tmp_path):
    make_optimizer, make_plugins = CASES[case]
    make_model, shape = (convnet, CONV_SHAPE) if "nscl" in case or case == "connector" else (with_dropout, (6,))
    benchmark = blobs(samples=20, shape=shape)
    undisturbed, matrix = build(make_optimizer, make_plugins, make_model)
    train(undisturbed, benchmark, 0, 2)
    save_strategy(undisturbed, tmp_path / "state")
    train(undisturbed, benchmark, 2, 3)

    disturb()
    resumed, same_matrix = build(make_optimizer, make_plugins, make_model)
    disturb()
    load_strategy(resumed, tmp_path / "state")
    train(resumed, benchmark, 2, 3)
    assert_same_strategies(undisturbed, resumed)
    np.testing.assert_array_equal(matrix.result(), same_matrix.result())
    assert matrix.result().shape == (3, 3)


def continue_from(middle, end):
    strategy, _ = build(*CASES["trgp+became, momentum"])
    load_strategy(strategy, middle)
    train(strategy, blobs(n_tasks=4), 2, 4)
    save_strategy(strategy, end)


def in_a_fork(middle, end):
    """Without imports, which take seconds."""
    assert how_it_ended(forked(lambda: continue_from(middle, end))) == 0


def in_another_interpreter(middle, end):
    code = "import sys; from tests.strategy.test_checkpoint import continue_from; continue_from(*sys.argv[1:])"
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    arguments = [sys.executable, "-W", "ignore", "-c", code, middle, end]
    subprocess.run(arguments, check=True, cwd=Path(__file__).parents[2], env=environment)


@pytest.mark.parametrize("proceed", [in_a_fork, pytest.param(in_another_interpreter, marks=pytest.mark.long)])
def test_continues_bitwise_in_another_process(proceed, tmp_path):
    benchmark = blobs(n_tasks=4)
    undisturbed, _ = build(*CASES["trgp+became, momentum"])
    train(undisturbed, benchmark, 0, 2)
    save_strategy(undisturbed, tmp_path / "middle")
    train(undisturbed, benchmark, 2, 4)
    proceed(tmp_path / "middle", tmp_path / "end")
    resumed, _ = build(*CASES["trgp+became, momentum"])
    load_strategy(resumed, tmp_path / "end")
    assert_same_strategies(undisturbed, resumed)
    assert_same_state(undisturbed.plugins[0].state_dict(), resumed.plugins[0].state_dict())
    assert undisturbed.plugins[0].scales[3]


def assert_same_state(one, other):
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same_state(one[key], other[key])
    elif isinstance(one, torch.Tensor):
        assert torch.equal(one, other)
    else:
        assert one == other


class OneHead(nn.Module):
    """A single head that grows with the classes."""

    def __init__(self):
        super().__init__()
        self.features, self.classifier = mlp().features, IncrementalClassifier(10, 1)

    def forward(self, x):
        return self.classifier(self.features(x))


def growing(n_tasks=4):
    """Tasks with 2, 3, 4, ... classes."""
    tasks = [blobs(1, classes=2 + t, seed=t) for t in range(n_tasks)]
    streams = [[batch_of(task.streams[name][0]) for task in tasks] for name in ("train", "test")]
    return create_generic_benchmark_from_tensor_lists(*streams, task_labels=[0] * n_tasks)


@pytest.mark.parametrize("evaluate_all", [True, False])
@pytest.mark.parametrize("merge", [True, False])
def test_a_head_that_grows_is_continued(tmp_path, merge, evaluate_all):
    """This also works if an evaluation has made the head larger and the optimizer still has the old parameters."""
    benchmark = growing()
    make = plugins(GPMPlugin, BecameMergePlugin) if merge else plugins()
    runs = []
    for interrupted in (False, True):
        strategy, _ = build(momentum, make, OneHead)
        for t, experience in enumerate(benchmark.train_stream):
            strategy.train(experience)
            strategy.eval(benchmark.test_stream if evaluate_all else benchmark.test_stream[: t + 1])
            if interrupted:
                save_strategy(strategy, tmp_path / "state")
                strategy, _ = build(momentum, make, OneHead)
                load_strategy(strategy, tmp_path / "state")
        runs.append(strategy)
    assert_same_strategies(*runs)
    assert runs[0].model.classifier.classifier.out_features == 5


@pytest.mark.filterwarnings("ignore:Metric Top1_Acc_Stream used by the EarlyStopping:UserWarning")
def test_early_stopping_and_metrics_are_continued(tmp_path):
    benchmark = blobs(n_tasks=3)
    runs = []
    for interrupted in (False, True):
        strategy = early_stopping()
        for experience in benchmark.train_stream:
            strategy.train(experience, eval_streams=[benchmark.valid_stream])
            if interrupted:
                save_strategy(strategy, tmp_path / "state")
                strategy = early_stopping()
                load_strategy(strategy, tmp_path / "state")
        runs.append(strategy)
    assert_same_strategies(*runs)
    np.testing.assert_equal(*(dict(run.evaluator.get_all_metrics()) for run in runs))


def early_stopping():
    torch.manual_seed(0)
    model = with_dropout()
    metrics = [AccuracyMatrix("valid"), *accuracy_metrics(minibatch=True, epoch=True, experience=True, stream=True)]
    stopping = EarlyStoppingPlugin(1, "valid_stream")
    return naive(model, [stopping], momentum(model), metrics=metrics, eval_every=1, train_epochs=4)


class Widening(DynamicModule):
    """A dynamic module that is not one of Avalanche's: it adds a scale for each task."""

    def __init__(self):
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(10))])

    def adaptation(self, experience):
        self.scales.append(nn.Parameter(torch.rand(10)))

    def forward(self, x):
        return x * torch.stack(list(self.scales)).mean(0)


def widening():
    return Network(nn.Sequential(*mlp().features, Widening()), 10)


def test_other_dynamic_modules_need_the_experiences(tmp_path):
    benchmark = blobs(n_tasks=3)
    undisturbed, _ = build(momentum, plugins(), widening)
    for experience in benchmark.train_stream[:2]:
        undisturbed.train(experience)
    save_strategy(undisturbed, tmp_path / "state")
    undisturbed.train(benchmark.train_stream[2])
    fresh, _ = build(momentum, plugins(), widening)
    with pytest.raises(ValueError, match=r"scales\.1 has the shape \(10,\), in this one it does not exist"):
        load_strategy(fresh, tmp_path / "state")
    resumed, _ = build(momentum, plugins(), widening)
    load_strategy(resumed, tmp_path / "state", benchmark.train_stream[:2])
    resumed.train(benchmark.train_stream[2])
    assert_same_strategies(undisturbed, resumed)


class Counting(SupervisedPlugin):
    """A third-party plugin that saves itself."""

    def __init__(self):
        super().__init__()
        self.experiences = 0

    def after_training_exp(self, strategy, **kwargs):
        self.experiences += 1

    def state_dict(self):
        return {"experiences": self.experiences}

    def load_state_dict(self, state):
        self.experiences = state["experiences"]


class Silent(SupervisedPlugin):
    """A plugin without attributes."""


class RememberingEWC(EWCPlugin):
    """A subclass with more state than its parent."""

    def __init__(self):
        super().__init__(1.0)
        self.losses = []


def test_plugins_of_strangers_save_themselves_or_are_refused(tmp_path):
    benchmark, spy = blobs(), Spy(after_update=lambda s: None)
    strategy, _ = build(sgd, plugins(Counting, Silent, lambda: spy))
    strategy.train(benchmark.train_stream[0])
    assert not_resumable(strategy) == ["Spy"]
    with pytest.raises(NotResumableError, match=r"the state of Spy cannot be saved; .*state_dict.*stateless"):
        save_strategy(strategy, tmp_path / "state")
    assert not (tmp_path / "state").exists()
    save_strategy(strategy, tmp_path / "state", stateless=[spy])
    resumed, _ = build(sgd, plugins(Counting, Silent))
    load_strategy(resumed, tmp_path / "state")
    assert resumed.plugins[0].experiences == 1


@pytest.mark.parametrize(
    "plugin",
    [lambda: AGEMPlugin(4, 4), lambda: ReplayPlugin(10), RememberingEWC],
)
def test_plugins_of_avalanche_that_cannot_be_saved_are_named(plugin):
    strategy, _ = build(sgd, plugins(GPMPlugin, plugin))
    assert not_resumable(strategy) == [type(strategy.plugins[1]).__name__]


def test_strategies_and_metrics_with_state_of_their_own_are_named():
    model = mlp()
    strategy = Cumulative(
        model=model, optimizer=sgd(model), criterion=nn.CrossEntropyLoss(), evaluator=naive(model).evaluator
    )
    assert not_resumable(strategy) == ["Cumulative"]
    metrics = [*forgetting_metrics(stream=True), *accuracy_metrics(trained_experience=True, stream=True)]
    strategy = naive(model, metrics=metrics)
    assert not_resumable(strategy) == ["StreamForgetting", "TrainedExperienceAccuracy"]
    assert not_resumable(strategy, stateless=metrics) == []


def test_a_strategy_cannot_be_saved_in_the_middle_of_an_experience(tmp_path):
    spy = Spy(after_training_exp=lambda s: save_strategy(s, tmp_path / "state", stateless=[spy]))
    strategy, _ = build(sgd, plugins(lambda: spy))
    with pytest.raises(ValueError, match="only between experiences"):
        strategy.train(blobs().train_stream[0])


def test_frozen_parameters_and_modules_in_eval_mode_stay_so(tmp_path):
    strategy, _ = build(sgd, plugins())
    strategy.model.features[0].weight.requires_grad_(False)
    strategy.model.features[2].eval()
    save_strategy(strategy, tmp_path / "state")
    resumed, _ = build(sgd, plugins())
    load_strategy(resumed, tmp_path / "state")
    assert [p.requires_grad for p in resumed.model.features.parameters()] == [False, True, True, True]
    assert [module.training for module in resumed.model.features] == [True, True, False, True, True]


def test_parameters_that_are_not_of_the_model_are_refused():
    strategy, _ = build(sgd, plugins())
    strategy.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(NotResumableError, match="parameters that do not belong to the model"):
        strategy_state(strategy)


def test_a_strategy_that_is_built_otherwise_is_refused(tmp_path):
    strategy, _ = build(sgd, plugins(GPMPlugin))
    strategy.train(blobs().train_stream[0])
    save_strategy(strategy, tmp_path / "state")
    others = {
        "the plugins GPMPlugin, EvaluationPlugin, .*, this one has SGPPlugin, ": (sgd, plugins(SGPPlugin)),
        r"features\.0\.weight has the shape \(12, 6\), .* has the shape \(4, 2, 3, 3\)": (
            sgd,
            plugins(GPMPlugin),
            convnet,
        ),
        "has 1 parameter groups, this one has 2": (adam_in_groups, plugins(GPMPlugin)),
    }
    for message, arguments in others.items():
        with pytest.raises(ValueError, match=message):
            load_strategy(build(*arguments)[0], tmp_path / "state")
    with pytest.raises(StateFileError, match="cannot read"):
        load_strategy(build(sgd, plugins(GPMPlugin))[0], tmp_path / "elsewhere")


@pytest.mark.parametrize("case", ["gpm", "trgp+became, momentum", "nscl+became in groups", "connector+became", "step"])
def test_checkpoints_of_avalanche_work(case, tmp_path):
    make_optimizer, make_plugins = CASES[case]
    benchmark = blobs(samples=20)
    undisturbed, _ = build(make_optimizer, make_plugins, loggers=[BaseLogger()])
    train(undisturbed, benchmark, 0, 2)
    save_checkpoint(undisturbed, tmp_path / "state")
    train(undisturbed, benchmark, 2, 3)
    disturb()
    resumed, _ = build(make_optimizer, make_plugins, loggers=[BaseLogger()])
    resumed, t = maybe_load_checkpoint(resumed, tmp_path / "state")
    assert t == 2
    train(resumed, benchmark, 2, 3)
    assert_same_strategies(undisturbed, resumed)

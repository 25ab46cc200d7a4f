import copy
import io
import itertools

import pytest
import torch
from avalanche.benchmarks.scenarios.online import split_online_stream
from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.logging import TextLogger
from avalanche.models import IncrementalClassifier, SimpleMLP
from avalanche.training.plugins import (
    AGEMPlugin,
    EarlyStoppingPlugin,
    EWCPlugin,
    LRSchedulerPlugin,
    LwFPlugin,
    ReplayPlugin,
    SynapticIntelligencePlugin,
)
from avalanche.training.supervised import Naive
from torch import nn
from torch.nn import functional as F

from became_avalanche import (
    AccuracyMatrix,
    BecameMergePlugin,
    GPMPlugin,
    MergeRecord,
    MultiHeadMLP,
    permuted_digits,
)
from tests.helpers import (
    CONV_SHAPE,
    Network,
    Spy,
    assert_same_weights,
    blobs,
    blobs_without_task_labels,
    convnet,
    mlp,
    naive,
    weights,
)


def stream_of(plugins, make_model=mlp, benchmark=None, optimizer=None, seed=0, **kwargs):
    """Train a strategy on a stream and return it."""
    torch.manual_seed(seed)
    model = make_model()
    strategy = naive(model, plugins, optimizer and optimizer(model.parameters()), **kwargs)
    for experience in (benchmark or blobs()).train_stream:
        strategy.train(experience)
    return strategy


def batch_of(experience):
    """All data of an experience, through the plain dataset."""
    data = [experience.dataset.eval()[i] for i in range(len(experience.dataset))]
    return torch.stack([x for x, *_ in data]), torch.tensor([y for _, y, *_ in data])


# -------------------------------------------------------------------------------------------------- the line works


@pytest.mark.parametrize(
    ("make_model", "make_benchmark"),
    [
        (MultiHeadMLP, lambda: permuted_digits(n_tasks=2)),
        (convnet, lambda: blobs(shape=CONV_SHAPE)),
        (lambda: SimpleMLP(num_classes=2, input_size=6), lambda: blobs(task_labels=False)),
        (lambda: SimpleMLP(num_classes=2, input_size=6), blobs_without_task_labels),
        (
            lambda: nn.Sequential(nn.Linear(6, 10), nn.ReLU(), IncrementalClassifier(10)),
            lambda: blobs(task_labels=False),
        ),
    ],
    ids=["permuted digits", "convolutions", "single head", "no task labels", "growing head"],
)
def test_any_order_gives_the_same_weights(make_model, make_benchmark):
    results = []
    for order in ([GPMPlugin, BecameMergePlugin], [BecameMergePlugin, GPMPlugin]):
        plugins = [plugin() for plugin in order]
        strategy = stream_of(plugins, make_model, make_benchmark(), train_epochs=1, train_mb_size=20)
        results.append(weights(strategy.model))
        merge = plugins[order.index(BecameMergePlugin)]
        assert [record.t for record in merge.merges] == list(range(2, strategy.clock.train_exp_counter + 1))
    assert_same_weights(*results)


def test_the_line_of_the_title_with_positions_and_with_keywords():
    results = []
    for keywords in (False, True):
        torch.manual_seed(0)
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if keywords:
            strategy = Naive(model=model, optimizer=optimizer, plugins=[GPMPlugin(), BecameMergePlugin()])
        else:
            with pytest.warns(Warning, match="positional arguments"):
                strategy = Naive(model, optimizer, plugins=[GPMPlugin(), BecameMergePlugin()])
        for experience in blobs(n_tasks=2, samples=6).train_stream:
            strategy.train(experience)
        results.append(weights(model))
    assert_same_weights(*results)


def test_list_of_experiences_is_the_same_as_one_by_one():
    one_by_one = stream_of([GPMPlugin(), BecameMergePlugin()])
    torch.manual_seed(0)
    model = mlp()
    naive(model, [GPMPlugin(), BecameMergePlugin()]).train(blobs().train_stream)
    assert_same_weights(weights(one_by_one.model), weights(model))


def test_without_projection_the_first_stage_is_free():
    merge = BecameMergePlugin()
    stream_of([merge])
    assert [0 < record.coefficient < 1 for record in merge.merges] == [True, True]


def test_several_projection_plugins_are_all_suspended():
    frozen = []
    first = GPMPlugin(threshold=1, n_samples=None, exclude=["features.2"])
    second = GPMPlugin(threshold=1, n_samples=None, exclude=["features.0"])
    spy = Spy(on_stage_start=lambda s, stage: frozen.append((stage, weights(s.model))))
    strategy = stream_of([first, BecameMergePlugin(), second, spy], benchmark=blobs(samples=200))
    (_, _), (_, before), (_, gp), *_ = frozen
    assert torch.equal(before["features.0.weight"], gp["features.0.weight"])
    assert not torch.equal(gp["features.0.weight"], strategy.model.state_dict()["features.0.weight"])


@pytest.mark.parametrize(
    "other",
    [
        lambda: EWCPlugin(ewc_lambda=1.0),
        lambda: LwFPlugin(alpha=1.0, temperature=2.0),
        lambda: AGEMPlugin(patterns_per_experience=10, sample_size=10),
        pytest.param(
            lambda: SynapticIntelligencePlugin(si_lambda=0.1),
            marks=pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning"),
        ),
        lambda: ReplayPlugin(mem_size=10),
    ],
    ids=["EWC", "LwF", "A-GEM", "SI", "replay"],
)
@pytest.mark.parametrize("position", [0, 2])
def test_built_in_plugins_see_one_experience_and_the_merged_weights(other, position):
    plugins = [GPMPlugin(), BecameMergePlugin()]
    plugins.insert(position, other())
    seen = []
    plugins.insert(0, Spy(after_training_exp=lambda s: seen.append(weights(s.model))))
    strategy = stream_of(plugins, convnet, blobs(shape=CONV_SHAPE))
    assert len(seen) == strategy.clock.train_exp_counter == 3
    assert_same_weights(seen[-1], weights(strategy.model))


# ---------------------------------------------------------------------------------------------- what a merge computes


class Stages:
    """Everything that happens around the stages of a stream, recorded from outside."""

    def __init__(self):
        self.starts, self.ends, self.merged, self.batches = [], [], [], []

    def plugin(self):
        return Spy(
            on_stage_start=lambda s, stage: self.starts.append((s.clock.train_exp_counter, stage, weights(s.model))),
            after_training_epoch=self.note_end,
            after_training_exp=lambda s: self.merged.append(weights(s.model)),
        )

    def note_end(self, strategy):
        if strategy.clock.train_exp_epochs == strategy.train_epochs - 1:
            self.ends.append(weights(strategy.model))


def fisher_oracle(make_model, state, experience, permutation_free_batch):
    """Mean over batches of B g², with all data as one batch: independent of the order of the data."""
    model = make_model()
    for task in range(experience.task_label + 1):
        model.classifier.adaptation(next(e for e in blobs().train_stream if e.task_label == task))
    model.load_state_dict({name: tensor for name, tensor in state.items() if name in model.state_dict()})
    model.eval()
    x, y = permutation_free_batch
    F.cross_entropy(model(x, torch.full((len(x),), experience.task_label)), y).backward()
    return {
        name: len(y) * p.grad.double() ** 2 if p.grad is not None else torch.zeros_like(p).double()
        for name, p in model.named_parameters()
    }


@pytest.mark.parametrize("projected", [True, False])
def test_merge_follows_the_algorithm(projected):
    """λ, θ* and Λ of each task, recomputed from the weights at the ends of the stages."""
    stages, merge = Stages(), BecameMergePlugin()
    plugins = [stages.plugin(), merge] + ([GPMPlugin(0.9)] if projected else [])
    precisions = []
    plugins.append(Spy(after_training_exp=lambda s: precisions.append(copy.deepcopy(merge.precision))))
    stream_of(plugins, train_mb_size=1000, train_epochs=5, optimizer=lambda p: torch.optim.SGD(p, lr=0.5))

    assert [(exp, stage) for exp, stage, _ in stages.starts] == [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2)]
    precision = {}
    gps, hats = {1: stages.ends[1], 2: stages.ends[3]}, {1: stages.ends[2], 2: stages.ends[4]}
    for t, experience in enumerate(blobs().train_stream):
        data = batch_of(experience)
        theta = stages.merged[t]
        if t > 0:
            gp, hat = gps[t], hats[t]
            fisher = fisher_oracle(mlp, hat, experience, data)
            delta = {name: hat[name].double() - gp[name].double() for name in fisher}
            drift = {name: gp[name].double() - stages.starts[2 * t - 1][2][name].double() for name in fisher}
            plasticity = sum((fisher[n] * delta[n] ** 2).sum() for n in fisher)
            zero = torch.zeros(())
            stability = sum((precision.get(n, zero) * delta[n] ** 2).sum() for n in fisher)
            expected = float(plasticity / (plasticity + stability))
            record = merge.merges[t - 1]
            assert record.t == t + 1
            assert record.coefficient == pytest.approx(expected, rel=1e-3)
            assert 0.01 < record.coefficient < 0.99
            assert record.plasticity == pytest.approx(float(plasticity), rel=1e-3)
            assert record.stability == pytest.approx(float(stability), rel=1e-3)
            assert record.drift == pytest.approx(
                float(sum((precision.get(n, zero) * drift[n] ** 2).sum() for n in fisher)), rel=1e-3
            )
            assert record.drift_along_delta == pytest.approx(
                float(sum((precision.get(n, zero) * drift[n] * delta[n]).sum() for n in fisher)), rel=1e-3, abs=1e-9
            )
            assert record.delta_norm == pytest.approx(float(sum((d**2).sum() for d in delta.values())) ** 0.5, rel=1e-4)
            assert record.drift_norm == pytest.approx(float(sum((d**2).sum() for d in drift.values())) ** 0.5, rel=1e-4)
            for name in fisher:  # the current head included
                torch.testing.assert_close(theta[name], torch.lerp(gp[name], hat[name], record.coefficient))
        at_merged = fisher_oracle(mlp, theta, experience, data)
        for name, value in at_merged.items():
            precision[name] = precision.get(name, 0) + value
            torch.testing.assert_close(precisions[t][name].double(), precision[name], rtol=1e-3, atol=1e-8)


def test_heads_of_other_tasks_stay_as_they_are():
    stages = Stages()
    stream_of([GPMPlugin(), BecameMergePlugin(), stages.plugin()])
    for t, later in itertools.combinations(range(3), 2):
        for part in ("weight", "bias"):
            name = f"classifier.classifiers.{t}.classifier.{part}"
            assert torch.equal(stages.merged[t][name], stages.merged[later][name])
    new = "classifier.classifiers.2.classifier.weight"
    assert not torch.equal(stages.merged[2][new], stages.ends[-1][new])  # merged, not taken from stage 2


def test_statistics_are_merged_and_counters_kept():
    stages, merge = Stages(), BecameMergePlugin()
    stream_of([GPMPlugin(), merge, stages.plugin()], convnet, blobs(shape=CONV_SHAPE))
    gp, hat, merged = stages.ends[3], stages.ends[4], stages.merged[2]
    weight = merge.merges[-1].coefficient
    assert 0 < weight < 1
    name = "features.1.running_mean"
    assert not torch.equal(gp[name], hat[name])
    torch.testing.assert_close(merged[name], torch.lerp(gp[name], hat[name], weight), rtol=0, atol=0)
    for name in ("features.1.num_batches_tracked", "classifier.active_units_T2"):
        assert torch.equal(merged[name], hat[name])
        assert merged[name].dtype == hat[name].dtype


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_memory_is_built_on_the_merged_weights(order):
    """The second layer's inputs depend on the first layer's weights, so its basis tells which weights were used."""
    plugins = [GPMPlugin(threshold=1, n_samples=None, exclude=["features.0"]), BecameMergePlugin()]
    benchmark, stages = blobs(n_tasks=2, samples=4), Stages()
    stream_of([stages.plugin(), *(plugins[i] for i in order)], benchmark=benchmark, train_epochs=20)
    basis = plugins[0].memory["features.2.weight"]["basis"][0]
    x, _ = batch_of(benchmark.train_stream[1])

    def outside(state):
        inputs = F.relu(x @ state["features.0.weight"].T).T
        return (inputs - basis @ (basis.T @ inputs)).norm()

    assert outside(stages.merged[1]) < 1e-5
    assert outside(stages.ends[1]) > 1e-3  # θ_GP
    assert outside(stages.ends[2]) > 1e-3  # θ̂


def test_no_movement_leaves_the_model_bitwise_unchanged():
    stages, merge = Stages(), BecameMergePlugin()

    def stand_still(strategy, stage):
        for group in strategy.optimizer.param_groups:
            group["lr"] = 0.0 if stage == 2 else 0.1

    stream_of([GPMPlugin(), merge, stages.plugin(), Spy(on_stage_start=stand_still)])
    assert [record.coefficient for record in merge.merges] == [0, 0]
    assert_same_weights(stages.ends[3], stages.merged[2])


def test_divergence_is_an_error_that_keeps_the_sound_weights():
    starts = []

    def diverge(strategy, stage):
        starts.append(weights(strategy.model))
        if stage == 2:
            for group in strategy.optimizer.param_groups:
                group["lr"] = float("inf")

    merge = BecameMergePlugin()
    with pytest.raises(ValueError, match=r"task 2 is not finite, first in features\.0\.weight.*learning rate"):
        stream_of([merge, Spy(on_stage_start=diverge)], make_model=lambda: made.append(mlp()) or made[-1])
    assert_same_weights(starts[-1], weights(made[-1]))
    assert merge.t == 1
    assert not merge.merges


made = []


# ---------------------------------------------------------------------------------------------------- two stages


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
}

SCHEDULES = {
    "step": lambda o: LRSchedulerPlugin(torch.optim.lr_scheduler.StepLR(o, 2, gamma=0.5)),
    "cosine": lambda o: LRSchedulerPlugin(torch.optim.lr_scheduler.CosineAnnealingLR(o, 6)),
    "one cycle": lambda o: LRSchedulerPlugin(
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=24, cycle_momentum=False),
        step_granularity="iteration",
    ),
    "sequence": lambda o: LRSchedulerPlugin(
        torch.optim.lr_scheduler.SequentialLR(
            o,
            [
                torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
                torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
            ],
            milestones=[3],
        )
    ),
    "plateau": lambda o: LRSchedulerPlugin(
        torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0, factor=0.5), metric="val_loss"
    ),
}


def controlled(model, make_optimizer, make_schedule, plugins, **kwargs):
    """A strategy with a schedule and early stopping on the valid stream, evaluated every epoch."""
    optimizer = make_optimizer(model.parameters())
    stopping = EarlyStoppingPlugin(patience=2, val_stream_name="valid_stream", metric_name="Loss_Stream", mode="min")
    return naive(
        model,
        [make_schedule(optimizer), stopping, *plugins],
        optimizer,
        metrics=[loss_metrics(stream=True), accuracy_metrics(stream=True)],
        eval_every=1,
        train_epochs=6,
        **kwargs,
    )


@pytest.mark.filterwarnings("ignore:Metric Loss_Stream used by the EarlyStopping plugin:UserWarning")
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", set(SCHEDULES) - {"sequence"})
def test_second_stage_is_bitwise_a_plain_training(optimizer, schedule):
    start, ends, stages = {}, [], []

    def keep_start(strategy):
        if stages and stages[-1] == 2 and not start:
            start.update(model=copy.deepcopy(strategy.model), random=torch.get_rng_state(), epochs=[])

    def keep_epoch(strategy):
        if start:
            start["epochs"].append((weights(strategy.model), strategy.optimizer.param_groups[0]["lr"]))

    spy = Spy(
        on_stage_start=lambda s, stage: stages.append(stage),
        before_training_epoch=keep_start,
        after_training_epoch=keep_epoch,
    )
    torch.manual_seed(0)
    strategy = controlled(mlp(), OPTIMIZERS[optimizer], SCHEDULES[schedule], [spy, GPMPlugin(0.9), BecameMergePlugin()])
    first, second = blobs(n_tasks=2).train_stream
    valid = blobs(n_tasks=2).valid_stream
    strategy.train(first, eval_streams=[valid[:1]])
    strategy.train(second, eval_streams=[valid[1:]])

    model = start["model"]
    plain_spy = Spy(
        before_training_exp=lambda s: torch.set_rng_state(start["random"]),
        after_training_epoch=lambda s: ends.append((weights(s.model), s.optimizer.param_groups[0]["lr"])),
    )
    plain = controlled(model, OPTIMIZERS[optimizer], SCHEDULES[schedule], [plain_spy])
    plain.train(second, eval_streams=[valid[1:]])

    assert len(ends) == len(start["epochs"])
    for (expected, lr), (actual, same_lr) in zip(ends, start["epochs"], strict=True):
        assert lr == same_lr
        assert_same_weights(expected, actual)


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedule_runs_again_in_the_second_stage(schedule):
    """Avalanche itself cannot restart a SequentialLR between experiences, so it is looked at within one."""
    rates, merge = [], BecameMergePlugin()
    merge.load_state_dict({"t": 1, "precision": {}, "merges": []})  # so that the first experience has two stages
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spy = Spy(
        on_stage_start=lambda s, stage: rates.append([]),
        before_training_iteration=lambda s: rates[-1].append(s.optimizer.param_groups[0]["lr"]),
    )
    plugins = [SCHEDULES[schedule](optimizer), merge, spy]
    naive(model, plugins, optimizer, metrics=[loss_metrics(stream=True)], eval_every=1, train_epochs=6).train(
        blobs(n_tasks=1).train_stream, eval_streams=[blobs(n_tasks=1).valid_stream]
    )
    assert len(rates) == 2
    if schedule != "plateau":
        assert rates[0] == rates[1]
        assert len(set(rates[0])) > 1
    else:
        assert rates[0][0] == rates[1][0]


@pytest.mark.filterwarnings("ignore:Metric Loss_Stream used by the EarlyStopping plugin:UserWarning")
def test_early_stopping_ends_each_stage_by_itself():
    epochs = []
    spy = Spy(
        on_stage_start=lambda s, stage: epochs.append([s.clock.train_exp_counter, stage, 0]),
        after_training_epoch=lambda s: epochs[-1].__setitem__(2, epochs[-1][2] + 1),
    )
    torch.manual_seed(0)
    model = mlp()
    make = lambda p: torch.optim.SGD(p, lr=2.0)  # noqa: E731 - too large a step: the loss soon rises
    strategy = controlled(model, make, SCHEDULES["step"], [spy, GPMPlugin(0.9), BecameMergePlugin()])
    valid = blobs().valid_stream
    strategy.train(blobs().train_stream, eval_streams=[valid])
    assert [(exp, stage) for exp, stage, _ in epochs] == [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2)]
    assert all(n > 0 for *_, n in epochs)
    assert any(n < 6 for *_, n in epochs)


def test_a_stop_in_the_last_epoch_skips_nothing():
    """Avalanche clears its stop flag only at the next epoch, which would be the first of the next stage."""
    epochs = []

    def stop_in_last_epoch(strategy):
        epochs[-1] += 1
        if strategy.clock.train_exp_epochs == strategy.train_epochs - 1:
            strategy.stop_training()

    spy = Spy(on_stage_start=lambda s, stage: epochs.append(0), after_training_epoch=stop_in_last_epoch)
    naive(mlp(), [BecameMergePlugin(), spy], train_epochs=2).train(blobs().train_stream)
    assert epochs == [2] * 5


def test_second_stage_starts_from_an_evaluation_of_its_first_weights():
    """Early stopping and plateau schedules compare with the last evaluation, which was of other weights."""
    losses, stages = [], []
    key = "Loss_Exp/eval_phase/valid_stream/Task001/Exp001"

    def change_weights(strategy):
        with torch.no_grad():
            strategy.model.features[0].weight.mul_(0.5)

    def compare_with_evaluator(strategy):
        if stages and stages.pop() == 2:
            x, y = batch_of(blobs().valid_stream[1])
            strategy.model.eval()
            with torch.no_grad():
                loss = F.cross_entropy(strategy.model(x, torch.ones(len(x), dtype=torch.long)), y)
            strategy.model.train()
            losses.append((float(loss), strategy.evaluator.get_last_metrics()[key]))

    spy = Spy(on_stage_start=lambda s, stage: stages.append(stage), before_training_epoch=compare_with_evaluator)
    late = Spy(after_training_epoch=change_weights)
    torch.manual_seed(0)
    strategy = naive(mlp(), [BecameMergePlugin(), spy], metrics=[loss_metrics(experience=True)], eval_every=1)
    strategy.plugins.append(late)  # after the periodic evaluation
    first, second, _ = blobs().train_stream
    strategy.train(first, eval_streams=[blobs().valid_stream[:2]])
    strategy.train(second, eval_streams=[blobs().valid_stream[:2]])
    assert len(losses) == 1
    assert losses[0][0] == pytest.approx(losses[0][1], rel=1e-5)


def test_second_stage_is_not_projected_and_starts_fresh_from_theta_gp():
    log = []

    class Watched(GPMPlugin):
        def projector(self, name):
            project = super().projector(name)
            return lambda rows: log.append("projected") or project(rows)

    plugin = Watched(threshold=0.9)
    stages = Stages()
    spy = Spy(
        on_stage_start=lambda s, stage: log.append((stage, len(s.optimizer.state), s.optimizer.param_groups[0]["lr"])),
        before_training_iteration=lambda s: log.append("step"),
    )
    schedule = lambda o: LRSchedulerPlugin(torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.1))  # noqa: E731
    torch.manual_seed(0)
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    strategy = naive(model, [plugin, BecameMergePlugin(), schedule(optimizer), stages.plugin(), spy], optimizer)
    strategy.train(blobs(shape=CONV_SHAPE).train_stream)

    starts = [i for i, entry in enumerate(log) if isinstance(entry, tuple)]
    parts = [log[i:j] for i, j in zip(starts, [*starts[1:], len(log)], strict=True)]
    assert [part[0][0] for part in parts] == [1, 1, 2, 1, 2]
    assert all(part[0][1:] == (0, 0.1) for part in parts)
    assert all("step" in part for part in parts)
    # Each projector is tried once before the first step, then used in each.
    assert [part[1:].count("projected") > 3 for part in parts] == [False, True, False, True, False]
    assert_same_weights(stages.starts[2][2], stages.ends[1])  # stage 2 starts at θ_GP
    bn = "features.1.weight"
    assert torch.equal(stages.starts[1][2][bn], stages.ends[1][bn])  # frozen in stage 1
    assert not torch.equal(stages.ends[1][bn], stages.ends[2][bn])  # free in stage 2
    assert torch.equal(stages.starts[3][2][bn], stages.ends[3][bn])  # and frozen again


def test_stage_two_may_have_its_own_epochs():
    epochs = []
    spy = Spy(on_stage_start=lambda s, stage: epochs.append(0), after_training_epoch=lambda s: epochs.append(1))
    strategy = stream_of([BecameMergePlugin(epochs=3), spy], train_epochs=2)
    assert epochs == [0, 1, 1] + [0, 1, 1, 0, 1, 1, 1] * 2
    assert strategy.train_epochs == 2


@pytest.mark.parametrize("eval_every", [-1, 0, 1, 2])
def test_the_merged_model_is_what_is_evaluated_last(eval_every):
    matrix = AccuracyMatrix("valid")
    seen = []
    spy = Spy(after_eval=lambda s: seen.append(weights(s.model)))
    torch.manual_seed(0)
    model = mlp()
    strategy = naive(model, [GPMPlugin(), BecameMergePlugin(), spy], metrics=[matrix], eval_every=eval_every)
    benchmark = blobs()
    for t, experience in enumerate(benchmark.train_stream):
        strategy.train(experience, eval_streams=[benchmark.valid_stream])
        if eval_every > -1:
            assert_same_weights(seen[-1], weights(model))
            assert len(matrix.result()) == t + 1
    assert bool(seen) == (eval_every > -1)


def test_stage_and_coefficient_reach_the_text_logger():
    text = io.StringIO()
    merge = BecameMergePlugin()
    strategy = stream_of([merge], loggers=[TextLogger(text)])
    strategy.eval(blobs().test_stream)
    assert "Stage/train_phase/train_stream/Exp001 = 2" in text.getvalue()
    for t, record in enumerate(merge.merges, start=1):
        assert f"Lambda/train_phase/train_stream/Exp00{t} = {record.coefficient:.4f}" in text.getvalue()


class FailureError(Exception):
    pass


@pytest.mark.parametrize("stage", [1, 2])
def test_nothing_of_the_wrapper_remains_after_an_error(stage):
    now = []

    def fail(strategy):
        if strategy.clock.train_exp_counter == 1 and now[-1] == stage:
            raise FailureError

    plugin, merge = GPMPlugin(), BecameMergePlugin(epochs=4)
    spy = Spy(on_stage_start=lambda s, current: now.append(current), before_update=fail)
    torch.manual_seed(0)
    strategy = naive(mlp(), [plugin, merge, spy])
    own = set(vars(strategy))
    first, second, third = blobs().train_stream
    strategy.train(first)
    assert set(vars(strategy)) == own
    with pytest.raises(FailureError):
        strategy.train(second)
    assert set(vars(strategy)) == own
    assert strategy.train_epochs == 2
    assert merge.t == plugin.experiences == 1

    now.append(0)
    spy.before_update = lambda strategy, **kwargs: None
    strategy.train(second)  # and the stream goes on
    strategy.train(third)
    assert [record.t for record in merge.merges] == [2, 3]
    assert set(vars(strategy)) == own


def test_a_wrapper_that_was_never_called_does_no_harm():
    fail = [True]

    def maybe(strategy):
        if fail.pop():
            fail.append(False)
            raise FailureError
        fail.append(False)

    merge = BecameMergePlugin()
    strategy = naive(mlp(), [merge, Spy(before_training_exp=maybe)])
    first, second, _ = blobs().train_stream
    with pytest.raises(FailureError):
        strategy.train(first)
    strategy.train(first)
    strategy.train(second)
    assert len(merge.merges) == 1
    assert "_train_exp" not in vars(strategy)


def test_state_goes_through_a_file_and_continues_to_the_same_weights():
    benchmark, results = blobs(), []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model, merge, memory = mlp(), BecameMergePlugin(), GPMPlugin()
        strategy = naive(model, [merge, memory])
        for t, experience in enumerate(benchmark.train_stream):
            torch.manual_seed(t)
            strategy.train(experience)
            if interrupted:
                file = io.BytesIO()
                torch.save([merge.state_dict(), memory.state_dict()], file)
                file.seek(0)
                merge, memory = BecameMergePlugin(), GPMPlugin()
                for plugin, state in zip((merge, memory), torch.load(file, weights_only=True), strict=True):
                    plugin.load_state_dict(state)
                strategy = naive(model, [merge, memory])
        results.append((weights(model), [record.coefficient for record in merge.merges]))
    assert_same_weights(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]
    assert isinstance(merge.merges[0], MergeRecord)


def test_growing_head_keeps_its_precision():
    merge = BecameMergePlugin()
    make = lambda: nn.Sequential(nn.Linear(6, 10), nn.ReLU(), IncrementalClassifier(10))  # noqa: E731
    torch.manual_seed(0)
    model = make()
    strategy = naive(model, [GPMPlugin(), merge])
    for classes in (2, 4, 6):
        strategy.train(blobs(n_tasks=1, classes=classes, task_labels=False, seed=classes).train_stream)
        assert merge.precision["2.classifier.weight"].shape == (classes, 10)
    assert (merge.precision["2.classifier.weight"] >= 0).all()
    assert [0 <= record.coefficient <= 1 for record in merge.merges] == [True, True]


def test_heads_made_by_evaluations_in_between_are_left_alone():
    heads = []
    spy = Spy(
        after_training_epoch=lambda s: heads.append(weights(s.model.classifier.classifiers["2"])),
        after_training_exp=lambda s: heads.append(weights(s.model.classifier.classifiers["2"])),
    )
    torch.manual_seed(0)
    strategy = naive(mlp(), [GPMPlugin(), BecameMergePlugin(), spy], eval_every=1)
    for experience in blobs().train_stream[:2]:
        strategy.train(experience, eval_streams=[blobs().test_stream])
    for head in heads:
        assert_same_weights(heads[0], head)


# ------------------------------------------------------------------------------------------------------------ errors


def test_what_cannot_work_is_refused_at_once():
    with pytest.raises(ValueError, match=r"epochs of stage 2.*got 0"):
        BecameMergePlugin(epochs=0)
    with pytest.raises(ValueError, match="staged by one plugin only; got BecameMergePlugin and BecameMergePlugin"):
        stream_of([BecameMergePlugin(), BecameMergePlugin()])
    with pytest.raises(ValueError, match="not the state of a BecameMergePlugin"):
        BecameMergePlugin().load_state_dict({"t": 1})
    model = Network(nn.Linear(6, 10), 10)
    before = weights(model)
    stream = split_online_stream(blobs().train_stream, experience_size=10)
    with pytest.raises(ValueError, match="BecameMergePlugin works on whole tasks, but got an online stream"):
        naive(model, [BecameMergePlugin()]).train(next(iter(stream)))
    assert_same_weights(before, weights(model))

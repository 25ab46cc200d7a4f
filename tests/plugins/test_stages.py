"""The second stage: what is restarted, what is not, and what remains after an error."""

import copy
import io
import re
import warnings
from functools import partial

import pytest
import torch
from avalanche.evaluation.metrics import accuracy_metrics, loss_metrics
from avalanche.logging import TextLogger
from avalanche.training.plugins import (
    EarlyStoppingPlugin,
    LRSchedulerPlugin,
)
from torch.nn import functional as F

from became_avalanche import (
    AccuracyMatrix,
    BecameMergePlugin,
    GPMPlugin,
    PlateauPlugin,
)
from tests.helpers import (
    CONV_SHAPE,
    Spy,
    Stages,
    assert_same_weights,
    batch_of,
    blobs,
    convnet,
    mlp,
    naive,
    stream_of,
    weights,
)

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
@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [("sgd", "step"), ("momentum", "cosine"), ("adam", "one cycle"), ("adam", "plateau"), ("momentum", "plateau")],
)
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
    """Avalanche itself cannot restart a SequentialLR between experiences, so the test has only one."""
    rates, merge = [], BecameMergePlugin()
    merge.t = 1  # so that the first experience has two stages
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spy = Spy(
        on_stage_start=lambda s, stage: rates.append([]),
        before_training_iteration=lambda s: rates[-1].append(s.optimizer.param_groups[0]["lr"]),
    )
    plugins = [SCHEDULES[schedule](optimizer), GPMPlugin(), merge, spy]
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
    make = partial(torch.optim.SGD, lr=2.0)  # too large a step: the loss soon rises
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
    naive(mlp(), [GPMPlugin(), BecameMergePlugin(), spy], train_epochs=2).train(blobs().train_stream)
    assert epochs == [2] * 5


def test_second_stage_starts_from_an_evaluation_of_its_first_weights():
    """Early stopping and plateau schedules compare with the last evaluation, which had other weights."""
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
    strategy = naive(
        mlp(), [GPMPlugin(), BecameMergePlugin(), spy], metrics=[loss_metrics(experience=True)], eval_every=1
    )
    strategy.plugins.append(late)  # after the periodic evaluation
    first, second, _ = blobs().train_stream
    strategy.train(first, eval_streams=[blobs().valid_stream[:2]])
    with pytest.warns(UserWarning, match=r"features\.0\.weight have moved although GPMPlugin protects them"):
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
    torch.manual_seed(0)
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = LRSchedulerPlugin(torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1))
    strategy = naive(model, [plugin, BecameMergePlugin(), schedule, stages.plugin(), spy], optimizer)
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
    strategy = stream_of([GPMPlugin(), BecameMergePlugin(epochs=3), spy], train_epochs=2)
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
    strategy = stream_of([GPMPlugin(), merge], loggers=[TextLogger(text)])
    strategy.eval(blobs().test_stream)
    epochs = re.findall(
        r"Epoch (\d) ended\.\n(?:\t.*\n)*\tStage/train_phase/train_stream/Exp00(\d) = (\d)", text.getvalue()
    )
    expected = [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2)]  # experience and stage
    assert epochs == [(str(epoch), str(t), str(stage)) for t, stage in expected for epoch in range(2)]
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
    strategy.train(second)  # training of the stream continues
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


@pytest.mark.parametrize("plateau", [True, False])
def test_stage_2_has_its_own_learning_rate(plateau):
    rates, restored = [], [PlateauPlugin(patience=1, factor=2)] if plateau else []
    spy = Spy(
        on_stage_start=lambda s, stage: rates.append((stage, s.optimizer.param_groups[0]["lr"])),
        after_training_exp=lambda s: rates.append(("end", s.optimizer.param_groups[0]["lr"])),
    )
    torch.manual_seed(0)
    model = mlp()
    plugins = [GPMPlugin(), BecameMergePlugin(rate=0.25), *restored, spy]
    naive(model, plugins, torch.optim.SGD(model.parameters(), lr=0.1)).train(blobs().train_stream)
    later = [(1, 0.1), (2, 0.025), ("end", 0.1)]
    assert rates == [(1, 0.1), ("end", 0.1), *later, *later]


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
def test_a_rate_that_would_have_no_effect_is_refused_before_the_training():
    with pytest.raises(ValueError, match="must be above 0; got -1"):
        BecameMergePlugin(rate=-1)
    model = mlp()
    optimizer, before = torch.optim.SGD(model.parameters(), lr=0.1), weights(model)
    for plugins, error in (
        ([], "without a projection plugin there is only one stage: leave out rate"),
        ([GPMPlugin(), SCHEDULES["step"](optimizer)], "which LRSchedulerPlugin sets: remove one of them"),
    ):
        with pytest.raises(ValueError, match=error):
            naive(model, [*plugins, BecameMergePlugin(rate=0.1)], optimizer).train(blobs().train_stream)
    assert_same_weights(before, weights(model))


@pytest.mark.parametrize(("rate", "unstable"), [(1, False), (200, True)])
def test_a_stage_2_that_loses_what_stage_1_has_learned_is_named(rate, unstable):
    torch.manual_seed(0)
    model = mlp()
    plugins = [GPMPlugin(), BecameMergePlugin(rate=rate)]
    strategy = naive(model, plugins, torch.optim.SGD(model.parameters(), lr=0.1), train_epochs=10, train_mb_size=5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy.train(blobs(n_tasks=2).train_stream)
    named = [str(warning.message) for warning in caught if "was unstable" in str(warning.message)]
    assert len(named) == unstable
    assert all(text.startswith("stage 2 of task 2") and text.endswith("BecameMergePlugin(rate=0.1)") for text in named)

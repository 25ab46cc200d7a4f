"""TRGP uses separate weights for each task."""

import copy
from unittest import mock

import pytest
import torch
from avalanche.models import SimpleMLP
from avalanche.training.plugins import LRSchedulerPlugin, LwFPlugin, ReplayPlugin
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from became_avalanche import BecameMergePlugin, GPMPlugin, PlateauPlugin, TRGPPlugin
from became_avalanche.layers.model import layers_of
from became_avalanche.plugins.trgp import _Scaling
from became_avalanche.subspace import backward
from tests.helpers import (
    CONV_SHAPE,
    Network,
    Spy,
    assert_same_weights,
    blobs,
    blobs_without_task_labels,
    convnet,
    logits_of,
    mlp,
    naive,
    weights,
)
from tests.layers.test_layers import layers_with_inputs


def trusting(**options):
    """A plugin that reuses old tasks wherever it can."""
    return TRGPPlugin(**{"trust_threshold": 0.0, "threshold": 0.9, "increment": 0, **options})


def conv_blobs(**kwargs):
    return blobs(shape=CONV_SHAPE, **kwargs)


def inputs_of(experience):
    return torch.stack([item[0] for item in experience.dataset])


def trained(plugin, model=None, benchmark=None, plugins=(), **kwargs):
    model = model or convnet()
    strategy = naive(model, [plugin, *plugins], **kwargs)
    for experience in (benchmark or conv_blobs()).train_stream:
        strategy.train(experience)
    return strategy


def effective(layer, spaces, scales):
    """``W + Σ W S (Q − I) Sᵀ`` of a layer without groups, by the formula in float64."""
    w = layer.weight.detach().double().flatten(1)
    total = w.clone()
    for s, q in zip(spaces, scales, strict=True):
        s, q = s[0].double(), q[0].double()
        total += w @ s @ (q - torch.eye(len(q))) @ s.T
    return total.reshape(layer.weight.shape)


def test_layers_compute_with_the_formula():
    plugin = trusting()
    strategy = trained(plugin, mlp(), blobs())
    model, layer = strategy.model, strategy.model.features[0]
    scales = plugin.scales[2]["features.0.weight"]
    assert set(scales) == {0, 1}
    assert all(not torch.equal(q[0], torch.eye(q.shape[-1])) for q in scales.values())
    x = torch.randn(5, 6)
    weight = effective(layer, [plugin.space("features.0.weight", i) for i in scales], scales.values())
    with plugin.task(2):
        torch.testing.assert_close(layer(x), F.linear(x.double(), weight).float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(layer(x), F.linear(x, layer.weight))  # as it is outside
    with plugin.task(0):  # the first task has nothing to reuse
        assert torch.equal(layer(x), F.linear(x, layer.weight))
    assert not model._forward_hooks


@given(layers_with_inputs(), st.integers(0, 4), st.booleans(), st.booleans(), st.integers(0, 2**16))
@example((nn.Linear(6, 4).double(), torch.ones(2, 6).double()), 3, False, True, 0)  # the input is scaled
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
def test_any_layer_computes_with_its_scaled_weight(case, rank, augmented, large, seed):
    layer, x = case
    generator = torch.Generator().manual_seed(seed)
    parameters = [layer.weight, layer.bias] if augmented and layer.bias is not None else [layer.weight]
    (own,) = layers_of(layer)
    rows, groups = own.rows([parameter.detach() for parameter in parameters]), own.groups
    d = rows.shape[-1]
    scaled, total = [], rows.clone()
    for _ in range(2):
        noise = torch.randn(groups, d, min(rank, d), generator=generator, dtype=torch.float64)
        space = torch.linalg.qr(noise).Q
        scale = torch.randn(groups, *[space.shape[-1]] * 2, generator=generator, dtype=torch.float64)
        scaled.append((space, scale))
        total += rows @ space @ (scale - torch.eye(space.shape[-1])) @ space.mT
    with mock.patch.object(backward, "WORTHWHILE", 0 if large else 2**62):
        detach = _Scaling(scaled).attach(own)
    actual = layer(x)
    detach()
    weight, *bias = own.from_rows(total, parameters)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias:
            layer.bias.copy_(bias[0])
        torch.testing.assert_close(actual, layer(x))


@pytest.mark.parametrize("bias", ["freeze", "augment"])
def test_identity_changes_no_output(bias):
    """Groups, stride, padding and biases included."""
    outputs = []

    def compare(strategy):
        if strategy.clock.train_exp_iterations == 0 and strategy.clock.train_exp_counter > 0:
            with torch.no_grad():
                plugin._activate(strategy.model, None)
                plain = strategy.forward()
                plugin._activate(strategy.model, strategy.experience.task_label)
                assert plugin._undo
                outputs.append(torch.equal(plain, strategy.forward()))

    plugin = trusting(bias=bias)
    trained(plugin, plugins=[Spy(before_backward=compare)])
    assert outputs == [True, True]


def test_augmented_bias_is_scaled_too():
    plugin = trusting(bias="augment")
    layer = trained(plugin, mlp(bias=True), blobs(n_tasks=2)).model.features[0]
    ((task, q),) = plugin.scales[1]["features.0.weight"].items()
    s = plugin.space("features.0.weight", task)[0].double()
    assert s.shape[0] == 7
    whole = torch.cat([layer.weight, layer.bias[:, None]], dim=1).detach().double()
    whole = whole + whole @ s @ (q[0].double() - torch.eye(len(q[0]))) @ s.T
    x = torch.randn(4, 6)
    with plugin.task(1):
        expected = F.linear(x.double(), whole[:, :6], whole[:, 6]).float()
        torch.testing.assert_close(layer(x), expected, rtol=1e-4, atol=1e-5)


def test_the_nearest_tasks_are_trusted():
    plugin = TRGPPlugin(threshold=0.9, trust_threshold=0.1, top_k=1)
    plugin.memory["w"] = {
        "directions": torch.eye(3).unsqueeze(0),
        "protected": torch.ones(1, 3, dtype=torch.bool),
        "spaces": torch.eye(3, dtype=torch.bool).unsqueeze(1),
    }
    for nearest in range(3):
        gradient = torch.full((1, 1, 3), 0.5)
        gradient[..., nearest] = 1.0
        assert plugin._trusted("w", gradient) == [nearest]


def test_nothing_trusted_gives_the_gradients_of_gpm():
    """Compares until the end of the second task, since later TRGP extends its basis by another rule."""
    results = []
    for plugin in (GPMPlugin(0.9), TRGPPlugin(threshold=0.9, top_k=0), TRGPPlugin(1.0, threshold=0.9)):
        torch.manual_seed(0)
        results.append(weights(trained(plugin, benchmark=conv_blobs(n_tasks=2)).model))
    assert_same_weights(results[0], results[1])
    assert_same_weights(results[0], results[2])


@pytest.mark.parametrize("reference", [False, True])
def test_old_subspaces_keep_their_outputs(reference):
    """``W S_i`` does not change in later tasks. With the bug of the published code the strongest new direction does."""
    plugin, drift = trusting(reference=reference, n_samples=None), []
    name = "features.0.weight"
    kept = {}

    def keep(strategy):
        weight = strategy.model.features[0].weight.detach()
        for task, (space, output) in kept.items():
            drift.append(float((weight @ space - output).norm() / output.norm()))
            assert torch.equal(space, plugin.space(name, task)[0])
        task = len(plugin.memory[name]["spaces"]) - 1
        space = plugin.space(name, task)[0]
        kept[task] = (space, weight @ space)

    wide = Network(nn.Sequential(nn.Linear(30, 12, bias=False), nn.ReLU()), 12)
    benchmark = blobs(n_tasks=4, samples=8, shape=(30,))
    trained(plugin, wide, benchmark, [Spy(after_training_exp=keep)])
    assert len(drift) == 6
    if reference:
        assert max(drift) > 1e-3
    else:
        assert max(drift) < 1e-5


def test_published_gate_needs_trust_in_the_first_layer():
    free, gated = trusting(), trusting(reference=True)
    for plugin in (free, gated):
        torch.manual_seed(0)
        strategy = naive(mlp(), [plugin])
        first, second, _ = blobs().train_stream
        strategy.train(first)
        memory = plugin.memory["features.0.weight"]
        memory["spaces"] = torch.zeros_like(memory["spaces"])  # nothing to trust in the first layer
        strategy.train(second)
    assert set(free.scales[1]) == {"features.2.weight"}
    assert gated.scales[1] == {}


@pytest.mark.parametrize("reference", [False, True])
def test_memory_is_made_with_the_scaling_of_the_task(reference):
    seen = []
    plugin = trusting(reference=reference)
    update = plugin.update_memory
    plugin.update_memory = lambda name, observed: (seen.append((name, bool(plugin._undo))), update(name, observed))
    trained(plugin, mlp(), blobs(n_tasks=2))
    assert [scaled for name, scaled in seen if name == "features.2.weight"] == [False, not reference]


# -------------------------------------------------------------------------------------------- in a strategy


def test_model_is_left_alone():
    plugin, model = trusting(), convnet()
    names = set(model.state_dict())
    trained(plugin, model)
    assert {name for name in model.state_dict() if "classifier" not in name} == {
        name for name in names if "classifier" not in name
    }
    fresh = copy.deepcopy(model)
    fresh.load_state_dict(model.state_dict())
    assert not any(module._forward_hooks for module in model.modules())


def test_task_of_a_loaded_plugin_needs_the_model():
    plugin, other = trusting(), trusting()
    strategy = trained(plugin)
    other.load_state_dict(plugin.state_dict())
    x = inputs_of(conv_blobs().test_stream[2])
    model = strategy.model.eval()
    with pytest.raises(ValueError, match="not seen a model yet"), other.task(2):
        pass
    with pytest.raises(ValueError, match=r"no task 7 has been learned; choose one of: \[0, 1, 2\]"), plugin.task(7):
        pass
    with plugin.task(2):
        expected = model(x, 2)
    with other.task(2, model):
        assert torch.equal(model(x, 2), expected)
        with other.task(0):
            assert not torch.equal(model(x, 2), expected)
        assert torch.equal(model(x, 2), expected)
    assert not torch.equal(model(x, 2), expected)


@pytest.mark.parametrize("when", ["training", "evaluation"])
def test_mixed_batches_are_refused(when):
    plugin = trusting()
    if when == "training":
        with pytest.raises(ValueError, match=r"a batch mixes the tasks \[0, 1\]"):
            trained(plugin, plugins=[ReplayPlugin(mem_size=20)])
    else:
        strategy = trained(plugin, eval_mb_size=15)
        experience, other = conv_blobs().test_stream[:2]
        experience.dataset = experience.dataset.concat(other.dataset)
        with pytest.raises(ValueError, match=r"a batch mixes the tasks \[0, 1\]"):
            strategy.eval(experience)


def test_tasks_need_labels_of_their_own():
    with pytest.raises(ValueError, match="the label 0 comes a second time"):
        trained(trusting(), mlp(), blobs(task_labels=False))
    model = SimpleMLP(num_classes=2, input_size=6, hidden_size=12, drop_rate=0)
    with pytest.raises(ValueError, match="needs one task label; got none"):
        trained(trusting(), model, blobs_without_task_labels())


@pytest.mark.parametrize("merged", [False, True])
def test_scales_come_and_go_with_the_experience(merged):
    plugin, groups = trusting(), []
    spy = Spy(
        before_training_epoch=lambda s: groups.append(len(s.optimizer.param_groups)),
        after_training=lambda s: groups.append(len(s.optimizer.param_groups)),
    )
    merge = BecameMergePlugin()
    strategy = trained(plugin, plugins=[*([merge] if merged else []), spy], train_epochs=1)
    assert groups == [1, 1, 2, *([2] if merged else []), 1, 2, *([2] if merged else []), 1]
    assert not any(name.startswith("TRGP") for name in merge.precision)
    assert len(strategy.optimizer.state) <= len(list(strategy.model.parameters()))


SCHEDULES = {
    "step": lambda o: lr_scheduler.StepLR(o, 1, 0.5),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.LambdaLR(o, lambda epoch: 0.5**epoch)], milestones=[1]
    ),
}


@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("first", [True, False])
def test_schedules_reach_the_scales(schedule, first):
    model, plugin, rates = convnet(), trusting(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = SCHEDULES[schedule](optimizer)
    schedule_plugin = LRSchedulerPlugin(scheduler, reset_scheduler=schedule != "sequence", reset_lr=True)
    spy = Spy(before_training_epoch=lambda s: rates.append([group["lr"] for group in s.optimizer.param_groups]))
    plugins = [plugin, schedule_plugin] if first else [schedule_plugin, plugin]
    strategy = naive(model, [*plugins, BecameMergePlugin(), spy], optimizer, train_epochs=2)
    n_tasks = 2 if schedule == "sequence" else 3  # Avalanche cannot restart a sequence for another experience
    for experience in conv_blobs().train_stream[:n_tasks]:
        strategy.train(experience)
    scaled = [pair for pair in rates if len(pair) == 2]
    assert len(scaled) == 4 * (n_tasks - 1)
    assert all(one == two for one, two in scaled)
    assert len({one for one, _ in scaled}) > 1
    assert len(scheduler.base_lrs) == 1


def test_best_weights_and_their_scales_belong_together():
    """The plateau recipe restores the scales of its best epoch, too."""
    plugin, kept = trusting(), []

    class Scripted(PlateauPlugin):
        losses = iter([1.0, 0.5, 2.0] * 2)

        def loss(self, strategy):
            return next(self.losses)

    def keep(strategy):
        kept.append({name: scale.detach().clone() for name, scale in plugin.own_parameters().items()})

    trained(
        plugin, benchmark=conv_blobs(n_tasks=2), plugins=[Spy(after_training_epoch=keep), Scripted()], train_epochs=3
    )
    second = kept[4]
    assert len(second) == 3
    for name, scales in plugin.scales[1].items():
        for k, scale in enumerate(scales.values()):
            assert torch.equal(scale, second[f"TRGP:{name}.{k}"])


def test_scales_are_merged_with_the_weights():
    plugin, merge, stages = trusting(), BecameMergePlugin(), []

    def keep(strategy):
        stages.append({name: scale.detach().clone() for name, scale in plugin.own_parameters().items()})

    spy = Spy(after_training_epoch=keep)
    trained(plugin, benchmark=conv_blobs(n_tasks=2), plugins=[merge, spy], train_epochs=1)
    _, gp, hat = stages
    (record,) = merge.merges
    assert 0 < record.coefficient < 1
    for name, scales in plugin.scales[1].items():
        for k, scale in enumerate(scales.values()):
            key = f"TRGP:{name}.{k}"
            assert not torch.equal(gp[key], hat[key])  # stage 2 trains them, from where stage 1 left them
            assert torch.equal(scale, torch.lerp(gp[key], hat[key], record.coefficient))


@pytest.mark.parametrize("train_own", [True, False])
def test_without_training_scales_in_stage_2_the_weights_of_the_task_move_on_a_line(train_own):
    """The task computes with ``W + Σ W S (Q − I) Sᵀ``, which is linear in λ only if ``Q`` stays where it is."""
    plugin, merge = trusting(), BecameMergePlugin(train_own=train_own, keep_last_merge=True)
    model = convnet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    trained(plugin, model, conv_blobs(n_tasks=2, samples=40), [merge], optimizer=optimizer)
    inputs, (record,) = merge.last_merge, merge.merges
    assert plugin.scales[1]
    off_the_line = []
    for name, scales in plugin.scales[1].items():
        spaces, keys = [plugin.space(name, task) for task in scales], [f"TRGP:{name}.{k}" for k in range(len(scales))]
        gp, hat = (
            effective(mock.Mock(weight=ends[name]), spaces, [ends[key] for key in keys])
            for ends in (inputs.base, inputs.candidate)
        )
        merged = effective(mock.Mock(weight=model.get_parameter(name)), spaces, scales.values())
        off_the_line.append(float((merged - torch.lerp(gp, hat, record.coefficient)).norm() / (hat - gp).norm()))
        for key, scale in zip(keys, scales.values(), strict=True):
            assert torch.equal(inputs.candidate[key], inputs.base[key]) != train_own
            assert torch.equal(scale, inputs.base[key]) != train_own
            assert inputs.fisher[key].any()  # the Fisher information looks at them again
    assert (max(off_the_line) > 1e-3) == train_own
    assert train_own or max(off_the_line) < 1e-5

    counted = [name for name in inputs.fisher if train_own or ":" not in name]
    form = {
        part: sum(float((getattr(inputs, part)[n] * inputs.delta[n] ** 2).sum()) for n in counted)
        for part in ("fisher", "precision")
    }
    assert record.coefficient == pytest.approx(form["fisher"] / sum(form.values()), rel=1e-6)


def test_evaluation_serves_each_task_with_its_own_weights():
    plugin = trusting()
    strategy = trained(plugin)
    model = strategy.model
    for label, experience in enumerate(conv_blobs().test_stream):
        actual = logits_of(strategy, experience)
        model.eval()
        plain = model(inputs_of(experience), label)
        with plugin.task(label):
            assert torch.equal(actual, model(inputs_of(experience), label))
        assert torch.equal(actual, plain) == (label == 0)


def test_evaluation_in_the_middle_of_a_training_changes_nothing():
    results = []
    for eval_every in (-1, 1):
        torch.manual_seed(0)
        plugin = trusting()
        spy = Spy(before_training_epoch=lambda s: torch.manual_seed(s.clock.train_exp_epochs))
        strategy = naive(convnet(), [plugin, spy], eval_every=eval_every)
        strategy.eval(conv_blobs().test_stream)  # makes the heads
        for t, experience in enumerate(conv_blobs().train_stream):
            strategy.train(experience, eval_streams=[conv_blobs().test_stream[: t + 1]])
        results.append((weights(strategy.model), plugin.scales))
    assert_same_weights(results[0][0], results[1][0])
    for name, scales in results[0][1][2].items():
        for task, scale in scales.items():
            assert torch.equal(scale, results[1][1][2][name][task])


def test_merge_after_an_evaluation_of_another_task_looks_at_its_own():
    """The Fisher information and the memory use the scales of the trained task, even after evaluating another."""
    results = []
    for eval_every in (-1, 1):
        torch.manual_seed(0)
        plugin, merge = trusting(), BecameMergePlugin()
        spy = Spy(before_training_epoch=lambda s: torch.manual_seed(s.clock.train_exp_epochs))
        strategy = naive(convnet(), [plugin, merge, spy], eval_every=eval_every, train_mb_size=40, train_epochs=4)
        strategy.eval(conv_blobs().test_stream)  # makes the heads
        for experience in conv_blobs().train_stream:
            strategy.train(experience, eval_streams=[conv_blobs().test_stream[:1]])
        results.append([record.plasticity for record in merge.merges])
    assert results[0] == pytest.approx(results[1], rel=1e-3)


def test_an_experience_that_was_broken_off_can_be_trained_again():
    class BreakError(Exception):
        pass

    def fail(strategy):
        if strategy.clock.train_exp_counter == 1 and not failed:
            failed.append(True)
            raise BreakError

    failed = []
    plugin = trusting()
    strategy = naive(convnet(), [plugin, Spy(after_training_epoch=fail)])
    first, second, third = conv_blobs().train_stream
    strategy.train(first)
    with pytest.raises(BreakError):
        strategy.train(second)
    strategy.train(second)
    assert len(strategy.optimizer.param_groups) == 1
    strategy.train(third)
    assert set(plugin.scales) == {0, 1, 2}


def test_plugins_that_copy_the_model_keep_the_task_they_copied():
    plugin = trusting()
    strategy = trained(plugin, plugins=[LwFPlugin(alpha=1, temperature=2)])
    assert len(plugin.scales) == 3
    assert strategy.clock.train_exp_counter == 3

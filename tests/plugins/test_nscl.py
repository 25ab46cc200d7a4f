"""Adam-NSCL apart from its null space: updates of Adam, normalisation layers, learning rates."""

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from became_avalanche import BecameMergePlugin, LaterTaskLR, NSCLPlugin, nscl_groups
from tests.helpers import CONV_SHAPE, Network, Spy, blobs, convnet, mlp, naive, resnet, weights


def conv_blobs(**kwargs):
    return blobs(shape=CONV_SHAPE, **kwargs)


def trained(model, plugins, benchmark, optimizer=None, **kwargs):
    strategy = naive(model, plugins, optimizer, **kwargs)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    return strategy


def published_adam(gradients, start, transform, lr=0.01, decay=0.1, steps=3):
    """The optimizer of the released code, in float64: epsilon before the bias correction, the update transformed."""
    w, m, v = start.double(), torch.zeros_like(start).double(), torch.zeros_like(start).double()
    for t, raw in enumerate(gradients, start=1):
        g = raw.double() + decay * w
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        step = lr * (1 - 0.999**t) ** 0.5 / (1 - 0.9**t)
        w = w - (step * m / (v.sqrt() + 1e-8)).flatten(1) @ transform
    return w


def test_update_of_adam_is_projected_and_its_state_is_not():
    model, plugin, seen = mlp(), NSCLPlugin(3), []

    def keep(strategy):
        layer = strategy.model.features[0]
        state = strategy.optimizer.state[layer.weight]
        seen.append((layer.weight.grad.clone(), layer.weight.detach().clone(), state.get("exp_avg_sq", torch.zeros(1))))

    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    strategy = naive(model, [plugin], optimizer, train_epochs=1)
    first, second, _ = blobs().train_stream
    strategy.train(first)
    c = plugin.memory["features.0.weight"]["inputs"][0].double()
    values, vectors = torch.linalg.eigh(c @ c.T)
    null = vectors[:, values <= 3 * values.min()]
    assert 0 < null.shape[1] < 6
    start = model.features[0].weight.detach().clone()
    strategy.plugins.append(Spy(after_update=keep))
    strategy.train(second)
    gradients = [gradient for gradient, _, _ in seen]
    expected = published_adam(gradients, start, null @ null.T)
    torch.testing.assert_close(seen[-1][1].double(), expected.reshape(start.shape), rtol=1e-3, atol=1e-4)
    second_moment, w = torch.zeros_like(start), start  # Adam's state knows nothing of the projection
    for gradient, after, _ in seen:
        second_moment = 0.999 * second_moment + 0.001 * (gradient + 0.1 * w) ** 2
        w = after
    torch.testing.assert_close(seen[-1][2], second_moment, rtol=1e-3, atol=1e-8)


def test_reference_averages_the_inputs_of_a_batch_first():
    """The released code takes the mean feature map of each batch, then its patches."""
    plugin = NSCLPlugin(reference=True)
    model = Network(nn.Sequential(nn.Conv2d(2, 3, 3, bias=False), nn.Flatten(), nn.Linear(48, 5, bias=False)), 5)
    (experience,) = conv_blobs(n_tasks=1).train_stream
    naive(model, [plugin], train_mb_size=40).train(experience)
    x = torch.stack([item[0] for item in experience.dataset])
    mean = x.double().mean(0, keepdim=True)
    columns = F.unfold(mean, 3)[0]
    kept = plugin.memory["features.0.weight"]["inputs"][0].double()
    torch.testing.assert_close(kept @ kept.T, columns @ columns.T, rtol=1e-4, atol=1e-5)
    assert plugin.memory["features.2.weight"]["inputs"].shape[-1] == 1  # one batch, one mean


def test_layers_whose_inputs_fill_their_space_evenly_are_named_once():
    """Three layers: one with inputs of rank 1, one with evenly spread inputs, and one with only zero inputs."""

    class Inputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.flat, self.even, self.dead = (nn.Linear(6, 5, bias=False) for _ in range(3))

        def forward(self, x):
            return self.flat(x[:, :1] * torch.ones(6)) + self.even(x) + self.dead(torch.zeros_like(x))

    def said_by(plugin, **options):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trained(Network(Inputs(), 5), [plugin], blobs(n_tasks=3, samples=40), **options)
        return [str(warning.message) for warning in caught if "NSCLPlugin" in str(warning.message)]

    for reference in (False, True):
        plugin = NSCLPlugin(1e6, reference=reference)
        (message,) = said_by(plugin)
        assert "NSCLPlugin does not protect features.even.weight: " in message
        assert "a = 1e+06" in message
        ranks = plugin.ranks()
        assert ranks["features.even.weight"] == ranks["features.dead.weight"] == 0 < ranks["features.flat.weight"]
    assert said_by(NSCLPlugin(1)) == []
    assert said_by(NSCLPlugin(float("inf"))) == []  # the user has asked for it


# ------------------------------------------------------------------------------------------------ normalisation


def importance_oracle(model, experience, batches, task):
    """Mean over batches of ``B g²``, with ``g`` the gradient of the mean loss against the predicted labels."""
    x = torch.stack([item[0] for item in experience.dataset])
    model.eval()
    names = ["features.1.weight", "features.1.bias"]
    totals = dict.fromkeys(names, 0)
    for batch in batches(x):
        logits = model(batch, task)
        loss = F.cross_entropy(logits, logits.argmax(1))
        for name in names:
            (g,) = torch.autograd.grad(loss, model.get_parameter(name), retain_graph=True)
            totals[name] = totals[name] + len(batch) * g**2
    return {name: total / len(batches(x)) for name, total in totals.items()}


def test_importance_is_that_of_predicted_labels():
    plugin, model = NSCLPlugin(), convnet()
    (experience,) = conv_blobs(n_tasks=1).train_stream
    naive(model, [plugin], train_mb_size=40).train(experience)
    expected = importance_oracle(model, experience, lambda x: [x], 0)
    for name, importance in expected.items():
        torch.testing.assert_close(plugin.normalisation[name]["importance"], importance, rtol=1e-3, atol=1e-9)
        assert torch.equal(plugin.normalisation[name]["anchor"], model.get_parameter(name))


def test_penalty_is_that_of_all_tasks_in_both_stages():
    """Its gradient is ``2 coefficient Σ importance (θ − anchor)``, zero at a single anchor."""
    plugin, tasks, seen = NSCLPlugin(coefficient=50), [], []
    name = "features.1.weight"

    def keep(strategy):
        model = strategy.model
        before = {n: p.grad for n, p in model.named_parameters()}
        expected = torch.zeros_like(model.get_parameter(name))
        for importance, anchor in tasks:
            expected += 2 * 50 * importance * (model.get_parameter(name).detach() - anchor)
        (raw,) = torch.autograd.grad(strategy.criterion(), model.get_parameter(name), retain_graph=True)
        (whole,) = torch.autograd.grad(strategy.loss, model.get_parameter(name), retain_graph=True)
        torch.testing.assert_close(whole - raw, expected, rtol=1e-3, atol=1e-6)
        others = [p for n, p in model.named_parameters() if "features.1" not in n and "classifier" not in n]
        for one, other in zip(
            torch.autograd.grad(strategy.criterion(), others, retain_graph=True),
            torch.autograd.grad(strategy.loss, others, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(one, other)
        assert before == {n: p.grad for n, p in model.named_parameters()}
        seen.append((strategy.clock.train_exp_counter, float(expected.abs().sum())))

    def keep_task(strategy):
        experience = strategy.experience
        model = convnet()
        strategy_copy = weights(strategy.model)
        for t in range(experience.current_experience):
            model.classifier.adaptation(conv_blobs().train_stream[t])
        model.classifier.adaptation(experience)
        model.load_state_dict(strategy_copy)
        importance = importance_oracle(model, experience, lambda x: [x], experience.task_label)[name]
        tasks.append((importance.detach(), model.get_parameter(name).detach().clone()))

    before_backward, after = Spy(before_backward=keep), Spy(after_training_exp=keep_task)
    trained(convnet(), [plugin, before_backward, after, BecameMergePlugin()], conv_blobs(), train_mb_size=40)
    # with one batch per epoch: 2 epochs, then 2 in each of two stages
    assert [task for task, _ in seen] == [0, 0, 1, 1, 1, 1, 2, 2, 2, 2]
    assert all(size == 0 for task, size in seen if task == 0)
    assert seen[2][1] == 0  # at the anchor
    assert seen[4][1] > 0  # in the free stage, too
    assert seen[-1][1] > 0


def test_normalisation_trains_after_the_first_task_held_by_its_penalty():
    moved = []
    for coefficient in (0, 100):
        torch.manual_seed(0)
        model, states = convnet(), []
        spy = Spy(after_training_exp=lambda s, states=states: states.append(weights(s.model)))
        trained(model, [NSCLPlugin(coefficient=coefficient), spy], conv_blobs(), train_epochs=4)
        moved.append(float((states[2]["features.1.weight"] - states[0]["features.1.weight"]).norm()))
    assert moved[0] > moved[1] > 0


# ------------------------------------------------------------------------------------------------------- recipe


@pytest.mark.parametrize("network", [convnet, resnet])
def test_groups_hold_every_parameter_once(network):
    model = network()
    groups = nscl_groups(model, lr=1, head_lr=2, normalisation_lr=3, weight_decay=4)
    assert [group["lr"] for group in groups] == [1, 2, 3]
    assert [group["weight_decay"] for group in groups] == [4, 0, 4]
    ids = [id(parameter) for group in groups for parameter in group["params"]]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(parameter) for parameter in model.parameters()}
    assert {id(p) for p in model.classifier.parameters()} == {id(p) for p in groups[1]["params"]}
    assert len(groups[2]["params"]) == 2 * sum(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert len(nscl_groups(mlp())) == 2  # no normalisation, no group


@pytest.mark.parametrize("first", [True, False])
def test_backbone_rate_drops_after_the_first_task(first):
    model, rates = convnet(), []
    later, spy = LaterTaskLR(0.5), Spy(before_training_epoch=lambda s: rates.append(rate_of(s)))
    optimizer = torch.optim.Adam(nscl_groups(model, lr=1e-4))
    plugins = [later, NSCLPlugin(), BecameMergePlugin()]
    trained(model, [*(plugins if first else plugins[::-1]), spy], conv_blobs(), optimizer, train_epochs=1)
    assert rates == [[1e-4, 1e-3, 5e-4]] + [[0.5, 1e-3, 5e-4]] * 4
    with pytest.raises(ValueError, match="rate must be above 0; got 0"):
        LaterTaskLR(0)


def rate_of(strategy):
    return [group["lr"] for group in strategy.optimizer.param_groups]


def test_heads_of_later_tasks_join_their_group():
    model = convnet()
    optimizer = torch.optim.Adam(nscl_groups(model))
    trained(model, [NSCLPlugin(), BecameMergePlugin()], conv_blobs(), optimizer)
    heads = {id(parameter) for parameter in model.classifier.parameters()}
    assert {id(parameter) for parameter in optimizer.param_groups[1]["params"]} == heads

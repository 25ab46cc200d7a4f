"""Projecting in the backward pass equals projecting gradients, is used where it should be, and protects."""

from copy import deepcopy

import pytest
import torch
from avalanche.training.plugins import AGEMPlugin, EWCPlugin, LwFPlugin
from avalanche.training.supervised import Naive
from torch import nn

from became_avalanche import GPMPlugin, SGPPlugin, TRGPPlugin
from became_avalanche.layers.model import layers_of
from became_avalanche.plugins.guard import Guard, Step, gradients_are_private
from became_avalanche.subspace import backward
from became_avalanche.subspace.basis import Projector
from tests.helpers import Network, Spy, blobs, naive, weights
from tests.plugins.test_projection import OPTIMIZERS, InputStore, excess_drift

EVERYWHERE, NOWHERE = -float("inf"), float("inf")


def wide(bias=True):
    return Network(nn.Sequential(nn.Linear(30, 24, bias=bias), nn.ReLU(), nn.Linear(24, 10, bias=bias), nn.ReLU()), 10)


class Twice(nn.Module):
    """Uses one layer twice, and another layer with the same weight."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(30, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.third.weight = self.second.weight

    def forward(self, x):
        return self.third(self.second(self.second(self.first(x).relu()).relu()).relu()).relu()


class Functional(nn.Module):
    """Uses the weight of a layer in the layer and outside of it."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(30, 24, bias=False), nn.Linear(24, 24, bias=False)

    def forward(self, x):
        x = self.second(self.first(x).relu()).relu()
        return nn.functional.linear(x, self.second.weight).relu()


class Accumulating(Naive):
    """Makes a step after every second batch."""

    def training_epoch(self, **kwargs):
        self.optimizer.zero_grad()
        for number, batch in enumerate(self.dataloader):
            self.mbatch = batch
            self._unpack_minibatch()
            self._before_forward(**kwargs)
            self.mb_output = self.forward()
            self._after_forward(**kwargs)
            self.loss = self.criterion()
            self.backward()
            if number % 2:
                self._before_update(**kwargs)
                self.optimizer_step()
                self._after_update(**kwargs)
                self.optimizer.zero_grad()


class Autocast(nn.Sequential):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


def clip(strategy):
    nn.utils.clip_grad_norm_(strategy.model.parameters(), 0.1)


def scale_by_hooks(strategy):
    """A hook on each weight, which sees gradients in the backward pass."""
    for parameter in strategy.model.features.parameters():
        parameter.register_hook(lambda gradient: gradient.sign() * 0.01)


# Other plugins in the list, the strategy, the model, and whether the backward pass may project.
COMPANIONS = {
    "nothing": (lambda: [], Naive, wide, True),
    "ewc": (lambda: [EWCPlugin(10.0)], Naive, wide, False),
    "lwf": (lambda: [LwFPlugin(1.0, 2.0)], Naive, wide, True),
    "a-gem": (lambda: [AGEMPlugin(20, 20)], Naive, wide, False),
    "clipping after the backward pass": (lambda: [Spy(after_backward=clip)], Naive, wide, False),
    "clipping before the update": (lambda: [Spy(before_update=clip)], Naive, wide, False),
    "gradient hooks": (lambda: [Spy(before_training_exp=scale_by_hooks)], Naive, wide, False),
    "accumulation": (lambda: [], Accumulating, wide, False),
    "autocast": (lambda: [], Naive, lambda: Network(Autocast(nn.Linear(30, 24), nn.ReLU()), 24), False),
    "shared weights": (lambda: [], Naive, lambda: Network(Twice(), 24), True),
    "weight used outside its layer": (lambda: [], Naive, lambda: Network(Functional(), 24), False),
}


def trained(monkeypatch, worthwhile, make_plugin, optimizer="sgd", companion="nothing"):
    """Return the final weights, the inputs of all experiences, and whether the backward pass projected gradients."""
    others, strategy_class, model, _ = COMPANIONS[companion]
    answers = []
    explains = backward.ProjectedBackward.explains
    with monkeypatch.context() as patch:
        patch.setattr(backward, "WORTHWHILE", worthwhile)
        patch.setattr(
            backward.ProjectedBackward, "explains", lambda *args: answers.append(explains(*args)) or answers[-1]
        )
        torch.manual_seed(0)
        model, store = model(), InputStore()
        strategy = naive(model, [make_plugin(), *others(), store], OPTIMIZERS[optimizer](model.parameters()))
        strategy.__class__ = strategy_class
        for experience in blobs(samples=8, shape=(30,)).train_stream:
            strategy.train(experience)
    return weights(model), store, answers


PLUGINS = {
    "gpm": lambda: GPMPlugin(0.95, 0.0),
    "gpm, most directions": lambda: GPMPlugin(1, n_samples=None),
    "gpm, biases too": lambda: GPMPlugin(0.95, bias="augment"),
    "sgp": lambda: SGPPlugin(2),
    "trgp": lambda: TRGPPlugin(),
}


@pytest.mark.parametrize(
    ("plugin", "companion"),
    [*(("gpm", companion) for companion in COMPANIONS), ("sgp", "ewc"), ("sgp", "shared weights")],
)
def test_projecting_batches_equals_projecting_gradients_beside(plugin, companion, monkeypatch):
    fast, _, answers = trained(monkeypatch, EVERYWHERE, PLUGINS[plugin], companion=companion)
    slow, _, none = trained(monkeypatch, NOWHERE, PLUGINS[plugin], companion=companion)
    for name, tensor in slow.items():
        torch.testing.assert_close(fast[name], tensor, atol=2e-5, rtol=1e-3)
    assert not none
    assert bool(answers and all(answers)) == COMPANIONS[companion][3]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_projecting_batches_equals_projecting_gradients_with(optimizer, plugin, monkeypatch):
    fast, _, answers = trained(monkeypatch, EVERYWHERE, PLUGINS[plugin], optimizer)
    slow, _, _ = trained(monkeypatch, NOWHERE, PLUGINS[plugin], optimizer)
    for name, tensor in slow.items():
        torch.testing.assert_close(fast[name], tensor, atol=2e-5, rtol=1e-3)
    decays = optimizer in ("decay", "momentum and decay")
    taken = "adam" not in optimizer and not (plugin == "sgp" and decays)
    assert bool(answers) == taken
    assert all(answers)


@pytest.mark.parametrize("companion", [name for name in COMPANIONS if name != "autocast"])
def test_old_outputs_stay_beside(companion, monkeypatch):
    _, store, _ = trained(monkeypatch, EVERYWHERE, lambda: GPMPlugin(1, n_samples=None), companion=companion)
    assert excess_drift(store, 1) < 1e-4


def test_every_step_of_a_large_layer_is_taken_from_the_backward_pass(monkeypatch):
    _, _, answers = trained(monkeypatch, EVERYWHERE, PLUGINS["gpm"])
    assert answers == [True] * (2 * 2 * 2)  # later tasks, epochs of one batch, layers


def test_small_layers_are_projected_as_ever(monkeypatch):
    _, _, answers = trained(monkeypatch, backward.WORTHWHILE, PLUGINS["gpm"])
    assert not answers


def test_layers_compute_as_usual_after_a_failure_in_the_forward_pass(monkeypatch):
    monkeypatch.setattr(backward, "WORTHWHILE", EVERYWHERE)
    model = wide()
    strategy = naive(model, [GPMPlugin()])
    first, second, _ = blobs(samples=8, shape=(30,)).train_stream
    strategy.train(first)

    def fail(*args):
        raise ZeroDivisionError

    hook = model.features[3].register_forward_hook(fail)
    with pytest.raises(ZeroDivisionError):
        strategy.train(second)
    hook.remove()
    strategy.train(second)
    assert not any("forward" in vars(module) for module in model.modules())


def test_steps_without_projection_do_not_return_through_the_momentum():
    """After a suspended step the momentum of SGD holds an unprojected gradient, which must not change old outputs."""
    model = wide(bias=False)
    plugin = GPMPlugin(1, n_samples=None)
    strategy = naive(model, [plugin], torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), train_mb_size=4)
    first, second, _ = blobs(samples=8, shape=(30,)).train_stream
    strategy.train(first)
    basis = plugin.memory["features.0.weight"]["basis"][0]
    seen = []

    def alternate(strategy):
        seen.append(model.features[0].weight.detach() @ basis)
        if len(seen) == 1:
            contexts.append(plugin.suspended())
            contexts[0].__enter__()
        elif len(seen) == 2:
            contexts[0].__exit__(None, None, None)

    contexts = []
    strategy.plugins.append(Spy(before_training_iteration=alternate))
    strategy.train(second)
    seen.append(model.features[0].weight.detach() @ basis)
    assert (seen[1] - seen[0]).abs().max() > 1e-3  # the suspended step
    for later in seen[2:]:
        assert (later - seen[1]).abs().max() < 1e-5


# ------------------------------------------------------------------------------------ gradients that are not final


class Closure(Naive):
    """Passes a closure to the optimizer that computes the gradients again, as LBFGS needs it."""

    def optimizer_step(self):
        def closure():
            self.optimizer.zero_grad()
            loss = self._criterion(self.forward(), self.mb_y)
            loss.backward()
            return loss

        self.optimizer.step(closure)


class ClosureInEpoch(Closure):
    """Overrides the training loop and passes a closure in it."""

    optimizer_step = Naive.optimizer_step

    def training_epoch(self, **kwargs):
        for batch in self.dataloader:
            self.mbatch = batch
            self._unpack_minibatch()
            self.mb_output = self.forward()
            self._before_update(**kwargs)
            Closure.optimizer_step(self)
            self._after_update(**kwargs)


class ByHand(Naive):
    """Makes the steps without an optimizer."""

    @torch.no_grad()
    def optimizer_step(self):
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                parameter -= 0.1 * parameter.grad


def disturb(strategy):
    for parameter in strategy.model.features.parameters():
        parameter.grad += 0.1 * torch.randn_like(parameter)


UNUSUAL = {
    "closure": (Closure, []),
    "closure in a loop of its own": (ClosureInEpoch, []),
    "steps by hand": (ByHand, []),
    "a later plugin": (Naive, [Spy(before_update=disturb)]),
    "a later plugin that clips": (Naive, [Spy(before_update=clip)]),
}


@pytest.mark.parametrize("optimizer", ["sgd", "momentum and decay"])
@pytest.mark.parametrize("case", UNUSUAL)
def test_old_outputs_stay_when_gradients_are_not_final(case, optimizer):
    kind, others = UNUSUAL[case]
    torch.manual_seed(0)
    model, store = wide(), InputStore()
    plugins = [GPMPlugin(1, n_samples=None), *others, store]
    strategy = naive(model, plugins, OPTIMIZERS[optimizer](model.parameters()))
    strategy.__class__ = kind
    for experience in blobs(samples=8, shape=(30,)).train_stream:
        strategy.train(experience)
    assert excess_drift(store, 1) < 1e-4
    first, last = store.experiences[0], store.experiences[-1]
    assert not torch.equal(first["features.0"][1]["weight"], last["features.0"][1]["weight"])


class Silent(ClosureInEpoch):
    """Does not call the callbacks of its plugins."""

    def _before_update(self, **kwargs):
        pass

    _after_update = _before_update


def test_a_strategy_that_does_not_call_its_plugins_is_noticed():
    strategy = naive(wide(), [GPMPlugin()])
    strategy.__class__ = Silent
    first, second, _ = blobs(samples=8, shape=(30,)).train_stream
    strategy.train(first)
    with pytest.warns(UserWarning, match=r"Silent has trained without calling before_update.*not protect"):
        strategy.train(second)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_channels_last_weights_are_projected_where_they_lie(optimizer, monkeypatch):
    torch.manual_seed(0)
    weight = nn.Conv2d(3, 4, 2, dtype=torch.float64)
    projector = Projector.away_from(torch.linalg.qr(torch.randn(1, 12, 5, dtype=torch.float64)).Q)
    views, results = [], []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(torch.Tensor, "copy_", lambda own, other: (views.append(own.data_ptr()), copy(own, other))[1])
    for memory_format in (torch.contiguous_format, torch.channels_last):
        module = deepcopy(weight).to(memory_format=memory_format)
        (layer,) = layers_of(module)
        guard = Guard("weight", [module.weight], projector, [layer])
        own = optimizer([module.weight], lr=0.1)
        module(torch.linspace(-1, 1, 2 * 3 * 4 * 4, dtype=torch.float64).reshape(2, 3, 4, 4)).square().sum().backward()
        views.clear()
        with torch.no_grad():
            guard.before_update(Step(optimizer is torch.optim.SGD, momentum=False, fresh=True, decays={}))
            assert views == ([module.weight.grad.data_ptr()] if optimizer is torch.optim.SGD else [])
            own.step()
            guard.after_update()
        results.append(module.weight.detach() - weight.weight.detach())
    torch.testing.assert_close(*results)
    rows = results[0].reshape(1, 4, 12)
    torch.testing.assert_close(projector(rows), rows)
    assert rows.norm() > 0


def test_a_forward_that_somebody_has_set_stays(monkeypatch):
    monkeypatch.setattr(backward, "WORTHWHILE", EVERYWHERE)
    model, calls = wide(), []
    layer = model.features[0]

    def own(x):
        calls.append(x)
        return type(layer).forward(layer, x)

    layer.forward = own
    strategy = naive(model, [GPMPlugin()], train_epochs=1)
    for experience in blobs(n_tasks=2, samples=8, shape=(30,)).train_stream:
        before = len(calls)
        strategy.train(experience)
        assert layer.forward is own
        assert len(calls) > before


def test_gradients_that_processes_share_are_not_private(monkeypatch):
    plugin = GPMPlugin()
    strategy = naive(wide(), [plugin])
    assert gradients_are_private(strategy, plugin)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    assert not gradients_are_private(strategy, plugin)


def test_weights_that_are_set_between_epochs_decay_as_they_are():
    """With weight decay and all inputs protected, outputs stay as the replaced weights give them."""
    model = wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    first, second, _ = blobs(samples=8, shape=(30,)).train_stream
    x, layer, set_to = torch.stack([item[0] for item in first.dataset]), model.features[0], []

    def change(strategy):
        if strategy.clock.train_exp_counter == 1 and strategy.clock.train_exp_epochs == 1:
            with torch.no_grad():
                layer.weight.mul_(3)
            set_to.append(layer(x).detach())

    spy = Spy(before_training_epoch=change)
    strategy = naive(model, [spy, GPMPlugin(threshold=1, n_samples=None)], optimizer, train_epochs=2)
    strategy.train(first)
    with pytest.warns(UserWarning, match="features.0.weight have moved although GPMPlugin protects them"):
        strategy.train(second)
    torch.testing.assert_close(layer(x), set_to[0], rtol=1e-3, atol=1e-3)

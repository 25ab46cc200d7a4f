"""Uses that a newcomer tries: each either works as docs/faults.md promises, or there is an error or a warning."""

import warnings
from copy import deepcopy

import pytest
import torch
from avalanche.benchmarks.scenarios.deprecated.generic_benchmark_creation import (
    create_generic_benchmark_from_tensor_lists,
)
from avalanche.models import MultiTaskModule
from avalanche.training.supervised import Naive
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from became_avalanche import AccuracyMatrix, BecameMergePlugin, GPMPlugin, measure_drift
from became_avalanche.layers.model import layers_of
from became_avalanche.subspace import backward
from became_avalanche.subspace.inputs import recorded_inputs
from tests.helpers import Network, Spy, batch_of, naive

INPUTS, HIDDEN, WIDTH = 20, 14, 8


def stream(n_tasks=2, task_labels=None):
    """Tasks whose inputs span 5 of the 20 dimensions, so that later tasks have room to learn."""
    generator = torch.Generator().manual_seed(0)

    def task():
        span, means = torch.randn(5, INPUTS, generator=generator), torch.randn(2, 5, generator=generator)
        y = torch.arange(30) % 2
        return (means[y] + 0.5 * torch.randn(30, 5, generator=generator)) @ span / 2, y

    tasks = [task() for _ in range(n_tasks)]
    return create_generic_benchmark_from_tensor_lists(tasks, tasks, task_labels=task_labels or list(range(n_tasks)))


def mlp():
    return Network(nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH), nn.ReLU()), WIDTH)


def gpm(**options):
    return GPMPlugin(threshold=0.9999, n_samples=None, **options)


def drift(model, plugins=None, optimizer=None, host=Naive, between=lambda model: None):
    """Return the largest drift of a layer on the inputs of task 1 while task 2 is trained."""
    strategy = naive(model, [gpm()] if plugins is None else plugins, optimizer)
    strategy.__class__ = host
    first, second = stream().train_stream
    strategy.train(first)
    before = deepcopy(model)
    between(model)
    strategy.train(second)
    pairs = zip(before.features.parameters(), model.features.parameters(), strict=True)
    assert any(not torch.equal(*pair) for pair in pairs)
    return max(measure_drift(before, model, first).values())


def test_without_a_plugin_layers_drift():
    assert drift(mlp(), []) > 0.05


# ---------------------------------------------------------------------------------------------------- optimizer steps


class OnlyClosure(Naive):
    """Computes gradients in the closure of the optimizer, and nowhere else."""

    def training_epoch(self, **kwargs):
        for batch in self.dataloader:
            self.mbatch = batch
            self._unpack_minibatch()
            self.optimizer.zero_grad()
            self._before_update(**kwargs)
            self.optimizer.step(self.closure)
            self._after_update(**kwargs)

    def closure(self):
        self.optimizer.zero_grad()
        self.mb_output = self.forward()
        self.loss = self.criterion()
        self.loss.backward()
        return self.loss


def test_gradients_that_only_a_closure_computes():
    assert drift(mlp(), host=OnlyClosure) < 0.01


def add_noise(optimizer, args, kwargs):
    for parameter in optimizer.param_groups[0]["params"]:
        if parameter.grad is not None:
            parameter.grad += 0.3 * torch.randn_like(parameter.grad)


@torch.no_grad()
def clip_weights(optimizer, args, kwargs):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.clamp_(-0.1, 0.1)


@pytest.mark.parametrize(("when", "hook"), [("pre", add_noise), ("post", clip_weights)])
def test_hooks_of_the_optimizer(when, hook):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    getattr(optimizer, f"register_step_{when}_hook")(hook)
    assert drift(model, optimizer=optimizer) < 0.01


def test_weight_and_bias_with_different_learning_rates():
    model = mlp()
    groups = {"weight": [], "bias": []}
    for name, parameter in model.features.named_parameters():
        groups[name.rpartition(".")[2]].append(parameter)
    optimizer = torch.optim.SGD(
        [
            {"params": groups["weight"], "lr": 0.1},
            {"params": groups["bias"], "lr": 3.0},
            {"params": model.classifier.parameters(), "lr": 0.1},
        ]
    )
    assert drift(model, [gpm(bias="augment")], optimizer) < 0.01


class UnusedBias(nn.Module):
    """Uses the weight of a layer, but not its bias."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(INPUTS, WIDTH)

    def forward(self, x):
        return F.linear(x, self.layer.weight)


def test_a_bias_that_is_not_used():
    model = Network(UnusedBias(), WIDTH)
    strategy = naive(model, [gpm(bias="augment")])
    first, second = stream().train_stream
    strategy.train(first)
    x, before = batch_of(first)[0], deepcopy(model.features)
    strategy.train(second)
    torch.testing.assert_close(model.features(x), before(x), rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------------------------- weights changed elsewhere

MOVED = "have moved although GPMPlugin protects them"


@torch.no_grad()
def shrink(strategy):
    if strategy.clock.train_exp_counter == 1:
        for parameter in strategy.model.features.parameters():
            parameter.data.mul_(0.9)


def replace_parameter(strategy):
    if strategy.clock.train_exp_counter == 1:
        layer = strategy.model.features[0]
        layer.weight = nn.Parameter(layer.weight.detach().clone())
        strategy.make_optimizer()


@pytest.mark.parametrize("callback", ["after_update", "after_training_epoch", "before_training_exp"])
@pytest.mark.parametrize("first", [False, True])
def test_weights_that_another_plugin_changes(callback, first):
    other = Spy(**{callback: shrink})
    with pytest.warns(UserWarning, match=MOVED):
        drift(mlp(), [other, gpm()] if first else [gpm(), other])


def test_a_parameter_that_is_replaced_in_training():
    with pytest.warns(UserWarning, match=MOVED):
        drift(mlp(), [gpm(), Spy(before_training_epoch=replace_parameter)])


def test_an_optimizer_in_the_backward_pass():
    model = mlp()
    for parameter in model.features.parameters():
        own = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(lambda parameter, own=own: own.step())
    with pytest.warns(UserWarning, match=MOVED):
        drift(model)


def test_the_merge_moves_weights_on_purpose():
    assert drift(mlp(), [gpm(), BecameMergePlugin()]) > 0.01  # no warning: those are errors in these tests


# --------------------------------------------------------------------------------------------------- inputs of layers


def test_pre_hooks_that_change_inputs():
    model = mlp()
    model.features[0].register_forward_pre_hook(lambda module, args: (args[0].roll(5, 1) + 0.5,))
    assert drift(model) < 0.01


def test_recorded_inputs_have_the_changes_of_pre_hooks_but_not_the_scales_of_trgp():
    layer, x = nn.Linear(INPUTS, WIDTH), torch.randn(3, INPUTS)

    def scale(module, args):
        return (2 * args[0],)

    scale.scales_weight = True
    layer.register_forward_pre_hook(scale)
    layer.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    with recorded_inputs({"weight": layers_of(layer)}) as inputs:
        layer(x)
    torch.testing.assert_close(inputs["weight"].energy(), (x.double() + 1).square().sum().reshape(1))


def test_a_plugin_that_changes_inputs_is_noticed_in_evaluation():
    def normalise(strategy):
        strategy.mbatch[0] = strategy.mbatch[0].roll(5, 1) + 0.5

    strategy, benchmark = naive(mlp(), [gpm(), Spy(before_forward=normalise, before_eval_forward=normalise)]), stream()
    strategy.train(benchmark.train_stream[0])
    with pytest.warns(UserWarning, match="a plugin has changed the inputs of an evaluation batch: GPMPlugin computes"):
        strategy.eval(benchmark.test_stream[0])


class Vmapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(INPUTS // 2, WIDTH)

    def forward(self, x):
        return torch.vmap(self.layer, in_dims=1, out_dims=1)(x.reshape(len(x), 2, -1)).sum(1)


def test_a_layer_inside_vmap_is_named():
    with pytest.raises(ValueError, match=r"features\.layer\.weight is used inside torch\.vmap"):
        drift(Network(Vmapped(), WIDTH))


class Late(nn.Module):
    """Creates its second layer in the first forward pass."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(INPUTS, HIDDEN)

    def forward(self, x):
        x = self.first(x).relu()
        if not hasattr(self, "second"):
            self.second = nn.Linear(HIDDEN, WIDTH)
        return self.second(x)


def test_a_layer_that_is_created_in_the_forward_pass():
    assert drift(Network(Late(), WIDTH)) < 0.01


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, INPUTS) / 5)

    def forward(self, x):
        return F.linear(x, self.matrix)


UNFROZEN = {
    "layers": lambda: mlp().features,
    "weight normalisation": lambda: parametrizations.weight_norm(nn.Linear(INPUTS, WIDTH)),
    "a bare matrix": lambda: nn.Sequential(Bare(), nn.Linear(WIDTH, WIDTH)),
}


@pytest.mark.parametrize("kind", UNFROZEN)
def test_a_backbone_that_is_frozen_in_the_first_task_only(kind):
    model = Network(UNFROZEN[kind]().requires_grad_(False), WIDTH)
    assert drift(model, between=lambda model: model.requires_grad_(True)) < 0.01


def test_the_merge_notices_a_backbone_that_is_frozen_in_the_first_task_only():
    model = mlp()
    model.features.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"features\.0\.weight, \.\.\. was frozen in earlier tasks and trains now"):
        drift(model, [gpm(), BecameMergePlugin()], between=lambda model: model.requires_grad_(True))


class OwnStatistics(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(HIDDEN))
        self.register_buffer("var", torch.ones(HIDDEN))

    def forward(self, x):
        return F.batch_norm(x, self.mean, self.var, training=self.training)


def test_running_statistics_of_a_module_of_the_user_are_named():
    model = Network(nn.Sequential(nn.Linear(INPUTS, HIDDEN), OwnStatistics(), nn.Linear(HIDDEN, WIDTH)), WIDTH)
    with pytest.warns(UserWarning, match=r"the buffers features\.1\.mean, features\.1\.var have changed in training"):
        drift(model)


# --------------------------------------------------------------------------------------------------- kinds of weights


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated", "ignore:the buffers")
@pytest.mark.parametrize(
    "compute",
    [lambda layer: prune.l1_unstructured(layer, "weight", 0.5), nn.utils.spectral_norm, nn.utils.weight_norm],
    ids=["prune", "spectral_norm", "weight_norm"],
)
def test_weights_that_a_hook_computes_are_named(compute):
    model = mlp()
    compute(model.features[0])
    with pytest.warns(UserWarning, match=r"features\.0 \(Linear whose weight a hook computes\)"):
        drift(model)


def test_a_pruned_bias():
    model = mlp()
    prune.l1_unstructured(model.features[0], "bias", 0.5)
    with pytest.warns(UserWarning, match=r"features\.0\.bias_orig \(of Linear\) have parameters of a kind"):
        drift(model)


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(INPUTS, HIDDEN, dtype=torch.cfloat), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x):
        return self.second(self.first(torch.fft.fft(x)).abs())


def test_complex_weights_are_named_and_not_merged():
    with pytest.warns(UserWarning, match=r"features\.first \(Linear\) have parameters of a kind"):
        drift(Network(Complex(), WIDTH))
    with pytest.raises(ValueError, match=r"cannot merge complex parameters, such as features\.first\.weight"):
        drift(Network(Complex(), WIDTH), [BecameMergePlugin()])


class ByHand(MultiTaskModule):
    """Heads in a ModuleDict, one per task label."""

    def __init__(self):
        super().__init__()
        self.features = nn.Linear(INPUTS, WIDTH)
        self.heads = nn.ModuleDict({str(task): nn.Linear(WIDTH, 2) for task in range(2)})

    def forward_single_task(self, x, task_label):
        return self.heads[str(int(task_label))](self.features(x).relu())


def test_heads_by_hand():
    model = ByHand()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1)
    optimizer.zero_grad = lambda: torch.optim.Optimizer.zero_grad(optimizer, set_to_none=False)
    assert drift(model, optimizer=optimizer) < 0.01  # no warning of heads that have gradients of zeros


# ------------------------------------------------------------------------------------------------------- autograd


class Checkpointed(nn.Module):
    def __init__(self, reentrant=False):
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, WIDTH), reentrant

    def forward(self, x):
        x = x.detach().requires_grad_()
        return checkpoint(lambda x: self.second(self.first(x).relu()), x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant, monkeypatch):
    monkeypatch.setattr(backward, "WORTHWHILE", -float("inf"))  # as if the layers were large
    assert drift(Network(Checkpointed(reentrant), WIDTH)) < 0.01


def test_gradient_checkpointing_with_per_sample_gradients():
    fishers = []
    for wrapped in (True, False):
        torch.manual_seed(0)
        features = Checkpointed()
        chain = features if wrapped else nn.Sequential(features.first, nn.ReLU(), features.second)
        merge = BecameMergePlugin(fisher="exact")
        naive(Network(chain, WIDTH), [merge]).train(stream().train_stream[0])
        fishers.append(list(merge.precision.values()))
    for one, other in zip(*fishers, strict=True):
        torch.testing.assert_close(one, other)
    with pytest.raises(ValueError, match=r"called without gradients, as .* with use_reentrant=True"):
        drift(Network(Checkpointed(reentrant=True), WIDTH), [BecameMergePlugin(fisher="exact")])


class GradientPenalty(Naive):
    """Adds the squared gradient of the outputs to the loss, which needs a second backward pass."""

    def forward(self):
        self.x = self.mb_x.detach().requires_grad_()
        return self.model(self.x, self.mb_task_id)

    def criterion(self):
        loss = super().criterion()
        if self.is_training and torch.is_grad_enabled():
            (gradient,) = torch.autograd.grad(self.mb_output.sum(), self.x, create_graph=True)
            loss = loss + 0.1 * gradient.square().sum(1).mean()
        return loss


def test_a_gradient_penalty(monkeypatch):
    monkeypatch.setattr(backward, "WORTHWHILE", -float("inf"))
    assert drift(mlp(), host=GradientPenalty) < 0.01


# ------------------------------------------------------------------------------------------- per-sample gradients


class Tokens(nn.Module):
    """Treats each image as five tokens, with the tokens first or in one axis with the samples."""

    def __init__(self, tokens_first):
        super().__init__()
        self.layer, self.tokens_first = nn.Linear(INPUTS // 5, WIDTH), tokens_first

    def forward(self, x):
        x = x.reshape(len(x), 5, -1)
        if self.tokens_first:
            return self.layer(x.transpose(0, 1)).relu().sum(0)
        return self.layer(x.flatten(0, 1)).relu().reshape(len(x), 5, -1).sum(1)


@pytest.mark.parametrize("tokens_first", [False, True])
def test_per_sample_gradients_need_the_sample_first(tokens_first):
    model = Network(Tokens(tokens_first), WIDTH)
    with pytest.raises(ValueError, match="in a batch of 10 samples, so its per-sample gradients cannot be computed"):
        drift(model, [BecameMergePlugin(fisher="exact")])


@pytest.mark.parametrize("fisher", ["empirical", "exact", "batched-sampled"])
def test_ignored_labels_need_the_batched_estimator(fisher):
    strategy = naive(nn.Linear(INPUTS, 2), [BecameMergePlugin(fisher=fisher)])

    def ignore(strategy):
        strategy.mbatch[1][::3] = -100

    strategy._unpack_minibatch = lambda: ignore(strategy)
    with pytest.raises(ValueError, match="needs class labels from 0 to 1, but got labels from -100 to 1"):
        strategy.train(stream(task_labels=[0, 0]).train_stream[0])


# -------------------------------------------------------------------------------------------------------- measures


def test_drift_of_layers_with_pre_hooks_and_of_other_models():
    before = nn.Sequential(nn.Linear(3, 4))
    before[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    after = deepcopy(before)
    assert measure_drift(before, after, torch.randn(5, 3)) == {"0": 0.0}
    with pytest.raises(ValueError, match="has no module '0', which the one before has"):
        measure_drift(before, nn.Linear(3, 4), torch.randn(5, 3))


def test_accuracy_matrix_of_tasks_in_another_order():
    """ACC and BWT of three of four tasks, trained as 2, 0, 3, equal a computation by hand."""
    benchmark, matrix, model = stream(4), AccuracyMatrix(), mlp()
    strategy, order, accuracies = naive(model, [gpm()], metrics=[matrix]), [2, 0, 3], []
    for task in order:
        strategy.train(benchmark.train_stream[task])
        strategy.eval(benchmark.test_stream)
        model.eval()
        batches = [batch_of(experience) for experience in benchmark.test_stream]
        accuracies.append(
            [
                float((model(x, torch.full_like(y, i)).argmax(1) == y).double().mean())
                for i, (x, y) in enumerate(batches)
            ]
        )
    last = [accuracies[-1][task] for task in order]
    changes = [last[row] - accuracies[row][task] for row, task in enumerate(order[:-1])]
    assert matrix.acc == pytest.approx(sum(last) / 3)
    assert matrix.bwt == pytest.approx(sum(changes) / 2)


def test_training_without_epochs():
    plugins = [gpm(), BecameMergePlugin()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        naive(mlp(), plugins, train_epochs=0).train(stream().train_stream)
    assert [merge.coefficient for merge in plugins[1].merges] == [0]

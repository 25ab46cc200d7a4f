"""Every method in complete trainings: alone, with BECAME, with its control, on different networks."""

import io
from functools import cache

import pytest
import torch
from torch import nn

from became_avalanche import (
    BecameMergePlugin,
    ConnectorPlugin,
    DivergenceError,
    EqualTrainingPlugin,
    GPCNSPlugin,
    GPMPlugin,
    MultiHeadMLP,
    NSCLPlugin,
    OWMPlugin,
    PlateauPlugin,
    SGPPlugin,
    TRGPPlugin,
    permuted_digits,
    split_digits,
)
from tests.helpers import (
    CONV_SHAPE,
    Network,
    assert_same_weights,
    blobs,
    convnet,
    logits_of,
    mlp,
    naive,
    resnet,
    weights,
)

PROJECTIONS = {
    "gpm": lambda: [GPMPlugin(0.9)],
    "sgp": lambda: [SGPPlugin(threshold=0.9)],
    "trgp": lambda: [TRGPPlugin(threshold=0.9, trust_threshold=0.1)],
    "gpcns": lambda: [GPCNSPlugin(threshold=0.9)],
    "nscl": lambda: [NSCLPlugin(100)],
    "owm": lambda: [OWMPlugin()],
}
FAMILY = {**PROJECTIONS, "connector": lambda: [NSCLPlugin(100), ConnectorPlugin()]}
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}
NETWORKS = {"conv net": (convnet, OPTIMIZERS["sgd"]), "resnet": (resnet, OPTIMIZERS["adam"])}
"""Each network with another optimizer: gradients are projected under the first, updates under the second."""


def trained(plugins, make_model, make_optimizer, benchmark=None, **kwargs):
    """The weights after each experience."""
    torch.manual_seed(0)
    model = make_model()
    strategy = naive(model, plugins, make_optimizer(model.parameters()), **kwargs)
    states = []
    for experience in (benchmark or blobs(samples=20, shape=CONV_SHAPE)).train_stream:
        strategy.train(experience)
        states.append(weights(model))
    return states


@cache
def plainly_trained(network):
    return trained([], *NETWORKS[network], train_epochs=1)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("method", FAMILY)
def test_alone_and_merged_in_either_order(method, network):
    make_model, make_optimizer = NETWORKS[network]
    alone = trained(FAMILY[method](), make_model, make_optimizer, train_epochs=1)
    plain = plainly_trained(network)
    merge = BecameMergePlugin()
    merged = trained([*FAMILY[method](), merge], make_model, make_optimizer, train_epochs=1)
    if make_model is convnet:
        reversed_order = [BecameMergePlugin(), *FAMILY[method]()[::-1]]
        assert_same_weights(merged[-1], trained(reversed_order, make_model, make_optimizer, train_epochs=1)[-1])
    assert_same_weights(plain[0], alone[0])  # an empty memory is plain training
    assert_same_weights(plain[0], merged[0])
    assert not torch.equal(plain[-1]["features.0.weight"], alone[-1]["features.0.weight"])
    assert not torch.equal(alone[-1]["features.0.weight"], merged[-1]["features.0.weight"])
    assert len(merge.merges) == 2
    assert all(0 <= record.coefficient <= 1 for record in merge.merges)
    assert all(tensor.isfinite().all() for tensor in merged[-1].values())


@pytest.mark.parametrize(
    ("method", "stream", "optimizer", "order"),
    [*((method, split_digits, "sgd", 1) for method in FAMILY), ("gpm", permuted_digits, "adam", -1)],
)
def test_digits_merged(method, stream, optimizer, order):
    plugins, merge, model = FAMILY[method](), BecameMergePlugin(), MultiHeadMLP()
    strategy = naive(
        model,
        [*plugins, merge, PlateauPlugin(patience=1)][::order],
        OPTIMIZERS[optimizer](model.parameters()),
        train_epochs=1,
        train_mb_size=64,
    )
    strategy.train(stream(0).train_stream[:3])
    assert plugins[0].experiences == 3
    assert plugins[0].memory_bytes() > 0
    assert len(merge.merges) == 2


@pytest.mark.parametrize(
    ("method", "second"), [*((method, BecameMergePlugin) for method in FAMILY), ("gpm", EqualTrainingPlugin)]
)
def test_state_goes_through_a_file_and_continues_to_the_same_weights(method, second):
    def make():
        return [*FAMILY[method](), second()]

    benchmark, results, logits = blobs(samples=20, shape=CONV_SHAPE), [], []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model, plugins = convnet(), make()
        strategy = naive(model, plugins, train_epochs=1)
        for t, experience in enumerate(benchmark.train_stream):
            torch.manual_seed(t)
            strategy.train(experience)
            if interrupted:
                file = io.BytesIO()
                torch.save([plugin.state_dict() for plugin in plugins], file)
                file.seek(0)
                plugins = make()
                for plugin, state in zip(plugins, torch.load(file, weights_only=True), strict=True):
                    plugin.load_state_dict(state)
                strategy = naive(model, plugins, train_epochs=1)
        results.append(weights(model))
        logits.append([logits_of(strategy, experience) for experience in benchmark.test_stream])
    assert_same_weights(*results)
    for first, again in zip(*logits, strict=True):
        assert torch.equal(first, again)


@pytest.mark.parametrize("method", FAMILY)
def test_evaluations_do_not_change_each_other(method):
    plugins = [*FAMILY[method](), BecameMergePlugin()]
    benchmark, model = blobs(samples=20, shape=CONV_SHAPE), convnet()
    strategy = naive(model, plugins, train_epochs=1)
    strategy.train(benchmark.train_stream)
    before = weights(model)
    states = [plugin.state_dict() for plugin in plugins]
    first = [logits_of(strategy, experience) for experience in benchmark.test_stream]
    again = [logits_of(strategy, experience) for experience in reversed(benchmark.test_stream)][::-1]
    for one, other in zip(first, again, strict=True):
        assert torch.equal(one, other)
    assert_same_weights(before, weights(model))
    assert str([plugin.state_dict() for plugin in plugins]) == str(states)


# ---------------------------------------------------------------------------------------------- unusual networks


@pytest.mark.parametrize("method", PROJECTIONS)
def test_shortcuts_have_their_own_memory(method):
    (plugin,) = PROJECTIONS[method]()
    trained([plugin], resnet, OPTIMIZERS["sgd"], train_epochs=1)
    protected = {name for name, memory in plugin.memory.items() if "anchor" not in memory}
    assert protected == {
        "features.0.weight",
        "features.3.conv1.weight",
        "features.3.conv2.weight",
        "features.3.shortcut.weight",
    }
    first = next(iter(plugin.memory["features.3.shortcut.weight"].values()))
    assert first.shape[:2] == (1, 4)


class Twice(nn.Module):
    """Calls one layer twice and shares its weight with another."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
        self.other.weight = self.layer.weight

    def forward(self, x):
        return self.other(self.layer(self.layer(x).relu()).relu()).relu()


@pytest.mark.parametrize("method", FAMILY)
def test_shared_weights_have_one_memory_of_all_their_inputs(method):
    plugins = FAMILY[method]()
    states = trained(plugins, lambda: Network(Twice(), 6), OPTIMIZERS["sgd"], blobs(n_tasks=2))
    assert set(plugins[0].memory) == {"features.layer.weight"}
    assert torch.equal(states[-1]["features.layer.weight"], states[-1]["features.other.weight"])


def test_a_layer_that_is_called_twice_adds_all_its_inputs():
    plugin = OWMPlugin()
    trained([plugin], lambda: Network(Twice(), 6), OPTIMIZERS["sgd"], blobs(n_tasks=1, samples=40))
    model = Network(Twice(), 6)
    seen = []
    for layer in (model.features.layer, model.features.other):
        layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    torch.manual_seed(0)
    states = trained([], lambda: Network(Twice(), 6), OPTIMIZERS["sgd"], blobs(n_tasks=1, samples=40))
    model.load_state_dict(states[-1])
    experience = blobs(n_tasks=1, samples=40).train_stream[0]
    model(torch.stack([item[0] for item in experience.dataset]), 0)
    columns = torch.cat(seen).double().T
    assert columns.shape[1] == 3 * 40
    kept = plugin.memory["features.layer.weight"]["inputs"][0].double()
    torch.testing.assert_close(kept @ kept.T, columns @ columns.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", FAMILY)
def test_frozen_parameters_stay_frozen(method):
    def model():
        network = resnet()
        network.features[0].weight.requires_grad_(False)
        network.features[1].weight.requires_grad_(False)
        return network

    torch.manual_seed(0)
    start = weights(model())
    states = trained([*FAMILY[method](), BecameMergePlugin()], model, OPTIMIZERS["adam"], train_epochs=1)
    for name in ("features.0.weight", "features.1.weight"):
        assert torch.equal(start[name], states[-1][name])
    assert not torch.equal(start["features.3.conv1.weight"], states[-1]["features.3.conv1.weight"])


@pytest.mark.parametrize("method", FAMILY)
def test_batches_of_one_and_biases_in_the_memory(method):
    plugins = FAMILY[method]()
    plugins[0].bias = "augment"
    states = trained(plugins, lambda: mlp(bias=True), OPTIMIZERS["sgd"], blobs(samples=3), train_mb_size=1)
    assert not torch.equal(states[0]["features.0.bias"], states[-1]["features.0.bias"])


@pytest.mark.parametrize("method", [GPMPlugin, SGPPlugin, TRGPPlugin, GPCNSPlugin, NSCLPlugin])
def test_the_published_quirks_run_too(method):
    plugin = method(reference=True)
    states = trained([plugin, BecameMergePlugin()], resnet, OPTIMIZERS["adam"], train_epochs=1)
    robust = trained([method(), BecameMergePlugin()], resnet, OPTIMIZERS["adam"], train_epochs=1)
    assert plugin.experiences == 3
    assert not torch.equal(states[-1]["features.3.conv1.weight"], robust[-1]["features.3.conv1.weight"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_nscl_with_infinite_a_is_training_without_projection(optimizer):
    """With the optimizer's state reset for each experience, as under any method."""
    plain, free = (
        trained([plugin], mlp, OPTIMIZERS[optimizer], blobs())[-1]
        for plugin in (GPMPlugin(threshold=0, increment=0), NSCLPlugin(float("inf")))
    )
    for name, tensor in plain.items():
        torch.testing.assert_close(tensor, free[name])


def test_merge_plugin_holds_as_much_as_the_parameters():
    plugin = BecameMergePlugin()
    assert plugin.memory_bytes() == 0
    model = convnet()
    naive(model, [GPMPlugin(), plugin]).train(blobs(shape=CONV_SHAPE).train_stream)
    assert plugin.memory_bytes() == 4 * sum(parameter.numel() for parameter in model.parameters())


def test_heads_outside_the_parameter_groups_are_explained():
    model = mlp()
    for groups in (
        [{"params": model.features[0].parameters()}, {"params": model.features[2].parameters()}],
        [
            {"params": [p for n, p in model.named_parameters() if n.endswith("weight")]},
            {"params": [p for n, p in model.named_parameters() if n.endswith("bias")]},
        ],
    ):
        strategy = naive(model, [GPMPlugin()], torch.optim.SGD(groups, lr=0.1))
        with pytest.raises(
            ValueError, match=r"'classifier' are in (none of them|groups \[0, 1\]).*model\.classifier\.par"
        ):
            strategy.train(blobs().train_stream)
    groups = [{"params": model.features.parameters()}, {"params": model.classifier.parameters(), "lr": 0.2}]
    strategy = naive(model, [GPMPlugin(), BecameMergePlugin()], torch.optim.SGD(groups, lr=0.1))
    strategy.train(blobs().train_stream)
    assert [group["lr"] for group in strategy.optimizer.param_groups] == [0.1, 0.2]


@pytest.mark.parametrize("network", [mlp, convnet])
@pytest.mark.parametrize("method", PROJECTIONS)
def test_divergence_is_an_error_that_writes_nothing(method, network):
    (plugin,) = PROJECTIONS[method]()
    benchmark = blobs(n_tasks=1) if network is mlp else blobs(n_tasks=1, shape=CONV_SHAPE)
    with pytest.raises(
        DivergenceError,
        match=r"(the loss of the last batch|features\.\d\.weight) is not finite.*lower the learning rate",
    ):
        trained([plugin], network, lambda parameters: torch.optim.SGD(parameters, lr=1e30), benchmark)
    assert plugin.memory == {}

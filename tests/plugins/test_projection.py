import io

import numpy as np
import pytest
import torch
from avalanche.benchmarks.scenarios.online import split_online_stream
from avalanche.models import SimpleMLP
from torch import nn
from torch.nn import functional as F

from became_avalanche import GPMPlugin, GradientProjectionPlugin
from tests.helpers import CONV_SHAPE, Network, Spy, assert_same_weights, blobs, convnet, mlp, naive, weights

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum and decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


class InputStore(Spy):
    """Keeps all inputs and the weight of each Linear and Conv2d layer outside the heads at the end of experiences."""

    def __init__(self):
        super().__init__(after_training_exp=self.store)
        self.experiences = []

    def store(self, strategy):
        model, inputs, hooks = strategy.model, {}, []
        layers = {
            name: module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | nn.Conv2d) and not name.startswith("classifier")
        }
        for name, module in layers.items():
            hooks.append(module.register_forward_hook(lambda m, args, out, name=name: inputs.update({name: args[0]})))
        batch = [
            torch.stack(list(values)) for values in zip(*[d[:1] for d in strategy.experience.dataset], strict=True)
        ]
        model.eval()
        with torch.no_grad():
            model(batch[0], strategy.experience.task_label) if isinstance(model, Network) else model(batch[0])
        model.train()
        for hook in hooks:
            hook.remove()
        self.experiences.append({n: (inputs[n], weights(m), m) for n, m in layers.items()})


def output(module, x, state):
    """Return the module's output on ``x`` with the weights ``state``, in float64."""
    x = x.double()
    state = {key: tensor.double() for key, tensor in state.items()}
    if isinstance(module, nn.Linear):
        return F.linear(x, state["weight"], state.get("bias"))
    return F.conv2d(
        x, state["weight"], state.get("bias"), module.stride, module.padding, module.dilation, module.groups
    )


def excess_drift(store, threshold):
    """Return how far outputs on old inputs moved beyond the bound of the residual energy, relative to the outputs.

    With ΔW orthogonal to a basis that holds the fraction ``threshold`` of the energy of A, ``‖ΔW A‖ <= ‖ΔW‖ ‖Â‖`` and
    ``‖Â‖² <= (1 − threshold) ‖A‖²``. ``‖A‖`` is taken from the unfolded inputs.
    """
    worst = -np.inf
    for old, experience in enumerate(store.experiences):
        for later in store.experiences[old + 1 :]:
            for name, (x, state, module) in experience.items():
                before, now = output(module, x, state), output(module, x, later[name][1])
                step = later[name][1]["weight"].double() - state["weight"].double()
                columns = (
                    x.double()
                    if isinstance(module, nn.Linear)
                    else F.unfold(x.double(), module.kernel_size, padding=module.padding, stride=module.stride)
                )
                allowed = torch.linalg.matrix_norm(step.flatten(1), 2) * columns.norm() * (1 - threshold) ** 0.5
                worst = max(worst, float(((now - before).norm() - allowed) / before.norm()))
    return worst


def trained_store(plugins, make_optimizer, make_model=convnet, benchmark=None):
    torch.manual_seed(0)
    model, store = make_model(), InputStore()
    strategy = naive(model, [*plugins, store], make_optimizer(model.parameters()), train_epochs=3)
    for experience in (benchmark or blobs(shape=CONV_SHAPE)).train_stream:
        strategy.train(experience)
    return store


def wide_mlp():
    return Network(nn.Sequential(nn.Linear(30, 24), nn.ReLU(), nn.Linear(24, 10), nn.ReLU()), 10)


# Most directions protected (the projector is a basis of the complement), and few of them (it is the basis itself).
STREAMS = {
    "many directions": (0.999, convnet, lambda: blobs(shape=CONV_SHAPE)),
    "few directions": (1, wide_mlp, lambda: blobs(samples=8, shape=(30,))),
}


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_old_outputs_stay_with_any_optimizer(name, stream):
    threshold, model, benchmark = STREAMS[stream]
    plugin = GPMPlugin(threshold=threshold, increment=0, n_samples=None)
    store = trained_store([plugin], OPTIMIZERS[name], model, benchmark())
    assert excess_drift(store, threshold) < 1e-4


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_old_outputs_move_without_the_plugin(name, stream):
    threshold, model, benchmark = STREAMS[stream]
    assert excess_drift(trained_store([], OPTIMIZERS[name], model, benchmark()), threshold) > 1e-2


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_outputs_stay_with_biases_as_weights_of_a_constant_input(name):
    plugin = GPMPlugin(threshold=1, n_samples=None, bias="augment")
    store = trained_store([plugin], OPTIMIZERS[name], wide_mlp, blobs(samples=8, shape=(30,)))
    assert excess_drift(store, 1) < 1e-3
    first, last = store.experiences[0], store.experiences[-1]
    assert all(not torch.equal(first[n][1]["bias"], last[n][1]["bias"]) for n in first)


def test_a_bias_that_is_frozen_is_not_protected_as_a_weight():
    plugin, model = GPMPlugin(bias="augment"), mlp(bias=True)
    model.features[0].bias.requires_grad_(False)
    start = weights(model)
    train_stream(model, [plugin], blobs())
    assert plugin.memory["features.0.weight"]["basis"].shape[-2] == 6
    assert plugin.memory["features.2.weight"]["basis"].shape[-2] == 12 + 1
    assert torch.equal(start["features.0.bias"], model.features[0].bias)
    assert not torch.equal(start["features.0.weight"], model.features[0].weight)


def test_free_biases_do_not_protect_outputs():
    plugin = GPMPlugin(threshold=1, n_samples=None, bias="free")
    store = trained_store([plugin], OPTIMIZERS["sgd"], wide_mlp, blobs(samples=8, shape=(30,)))
    assert excess_drift(store, 1) > 1e-2


def train_stream(model, plugins, benchmark, optimizer=None, **kwargs):
    strategy = naive(model, plugins, optimizer, **kwargs)
    states = []
    for experience in benchmark.train_stream:
        strategy.train(experience)
        states.append(weights(model))
    return states


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_normalisation_and_biases_freeze_after_the_first_experience(name):
    model = convnet()
    start = weights(model)
    states = train_stream(model, [GPMPlugin()], blobs(shape=CONV_SHAPE), OPTIMIZERS[name](model.parameters()))
    for key in ("features.3.bias", "features.1.weight", "features.1.bias", "features.6.bias"):
        assert not torch.equal(start[key], states[0][key])
        assert torch.equal(states[0][key], states[2][key])
    assert not torch.equal(states[0]["features.1.running_mean"], states[2]["features.1.running_mean"])
    assert not torch.equal(states[0]["features.0.weight"], states[2]["features.0.weight"])


def test_gradient_and_update_are_the_same_projection_under_plain_sgd():
    class Subclass(torch.optim.SGD):
        pass

    results = []
    for make in (torch.optim.SGD, Subclass):
        torch.manual_seed(0)
        model = mlp()
        results.append(train_stream(model, [GPMPlugin(0.9)], blobs(), make(model.parameters(), lr=0.1))[-1])
    for key, tensor in results[0].items():
        torch.testing.assert_close(tensor, results[1][key], atol=1e-5, rtol=1e-4)


def test_threshold_zero_is_plain_training():
    results = []
    for plugins in ([], [GPMPlugin(threshold=0, increment=0)]):
        torch.manual_seed(0)
        results.append(train_stream(mlp(), plugins, blobs())[-1])
    assert_same_weights(*results)


def test_full_memory_stops_the_layers_but_not_the_heads():
    plugin, heads = GPMPlugin(threshold=1, n_samples=None), []
    spy = Spy(before_training_exp=lambda s: heads.append(weights(s.model.classifier)))
    states = train_stream(mlp(), [plugin, spy], blobs(samples=200))
    assert plugin.memory["features.0.weight"]["basis"].shape == (1, 6, 6)
    assert torch.equal(states[0]["features.0.weight"], states[2]["features.0.weight"])
    fresh = heads[2]["classifiers.2.classifier.weight"]
    assert not torch.equal(fresh, states[2]["classifier.classifiers.2.classifier.weight"])


def test_memory_holds_bases_of_the_layers_in_their_dtype():
    plugin = GPMPlugin()
    train_stream(convnet(), [plugin], blobs(shape=CONV_SHAPE))
    assert set(plugin.memory) == {"features.0.weight", "features.3.weight", "features.6.weight"}
    dimensions = {"features.0.weight": (1, 18), "features.3.weight": (2, 18), "features.6.weight": (1, 32)}
    for name, tensors in plugin.memory.items():
        assert tensors["basis"].shape[:2] == dimensions[name]
        assert tensors["basis"].dtype == torch.float32
    assert plugin.experiences == 3


def test_only_the_first_samples_count():
    plugin = GPMPlugin(threshold=1, n_samples=2)
    train_stream(mlp(), [plugin], blobs(n_tasks=1))
    assert plugin.memory["features.0.weight"]["basis"].shape[-1] == 2


def test_optimizer_state_does_not_survive_the_experience():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sizes = []
    spy = Spy(before_training_epoch=lambda s: sizes.append(len(s.optimizer.state)))
    train_stream(model, [GPMPlugin(), spy], blobs(), optimizer, train_epochs=1)
    assert sizes == [0, 0, 0]


def test_single_head_without_task_labels_is_protected_too():
    plugin = GPMPlugin()
    model = SimpleMLP(num_classes=2, input_size=6, hidden_size=12, drop_rate=0)
    train_stream(model, [plugin], blobs(task_labels=False))
    assert set(plugin.memory) == {"features.0.weight", "classifier.weight"}


def test_excluded_layers_train_freely():
    plugin = GPMPlugin(threshold=1, n_samples=None, exclude=["classifier"])
    model = SimpleMLP(num_classes=2, input_size=6, hidden_size=12, drop_rate=0)
    states = train_stream(model, [plugin], blobs(task_labels=False))
    assert set(plugin.memory) == {"features.0.weight"}
    assert not torch.equal(states[0]["classifier.bias"], states[2]["classifier.bias"])
    assert torch.equal(states[0]["features.0.bias"], states[2]["features.0.bias"])


def test_several_plugins_share_a_model():
    first, second = GPMPlugin(exclude=["features.2"]), GPMPlugin(threshold=1, exclude=["features.0"])
    train_stream(mlp(), [first, second], blobs())
    assert (set(first.memory), set(second.memory)) == ({"features.0.weight"}, {"features.2.weight"})


def test_suspended_plugin_does_nothing_even_after_an_error():
    plugin, model = GPMPlugin(threshold=1, n_samples=None), mlp()
    strategy = naive(model, [plugin])
    first, second, third = blobs(samples=200).train_stream
    strategy.train(first)
    before = weights(model)
    with plugin.suspended():
        with plugin.suspended():
            pass
        strategy.train(second)
    assert not torch.equal(before["features.0.weight"], model.state_dict()["features.0.weight"])
    with pytest.raises(ZeroDivisionError), plugin.suspended():
        raise ZeroDivisionError
    before = weights(model)
    strategy.train(third)
    assert torch.equal(before["features.0.weight"], model.state_dict()["features.0.weight"])


def test_the_pass_over_the_data_leaves_no_trace():
    """The batches and the dropout of the next experience are those of a training without the plugin."""

    def random_states(plugins):
        torch.manual_seed(0)
        states, model = [], mlp()
        spy = Spy(before_training_exp=lambda s: states.append((torch.get_rng_state(), s.model.training, s.mbatch)))
        train_stream(model, [*plugins, spy], blobs())
        return states

    for (state, training, _), (other, also, _) in zip(random_states([]), random_states([GPMPlugin()]), strict=True):
        assert torch.equal(state, other)
        assert training == also


def test_state_goes_through_a_file_and_continues_to_the_same_weights():
    benchmark, results = blobs(), []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model, plugin = mlp(), GPMPlugin(0.9)
        strategy = naive(model, [plugin])
        for t, experience in enumerate(benchmark.train_stream):
            torch.manual_seed(t)
            strategy.train(experience)
            if interrupted:
                file = io.BytesIO()
                torch.save(plugin.state_dict(), file)
                file.seek(0)
                plugin = GPMPlugin(0.9)
                plugin.load_state_dict(torch.load(file, weights_only=True))
                strategy = naive(model, [plugin])
        results.append(weights(model))
    assert_same_weights(*results)


def only_biases_and_normalisation():
    model = convnet()
    for name, parameter in model.features.named_parameters():
        parameter.requires_grad_(name.endswith("bias") or name.startswith("1."))
    return model


def test_a_model_that_would_freeze_altogether_is_noticed():
    """As with fine-tuning methods that train biases alone."""
    with pytest.warns(
        UserWarning, match=r"only biases.*train outside the heads \(.*GPMPlugin freezes them after"
    ) as caught:
        train_stream(only_biases_and_normalisation(), [GPMPlugin()], blobs(shape=CONV_SHAPE))
    assert len(caught) == 1
    train_stream(
        only_biases_and_normalisation(), [GPMPlugin(bias="free", exclude=["features.1"])], blobs(shape=CONV_SHAPE)
    )


# ------------------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"threshold": 1.5}, "threshold.*1.5"),
        ({"threshold": float("nan")}, "threshold.*nan"),
        ({"increment": -0.1}, "increment.*-0.1"),
        ({"n_samples": 0}, "n_samples.*0"),
        ({"bias": "thaw"}, "bias.*'thaw'"),
        ({"exclude": "classifier"}, "exclude.*list"),
    ],
)
def test_nonsense_is_refused_at_construction(arguments, message):
    with pytest.raises(ValueError, match=message):
        GPMPlugin(**arguments)


def test_unknown_excluded_name_gets_the_nearest():
    with pytest.raises(ValueError, match=r"'feature\.0'.*did you mean 'features\.0'"):
        train_stream(mlp(), [GPMPlugin(exclude=["feature.0"])], blobs())


def test_model_with_nothing_to_protect_is_refused():
    with pytest.raises(ValueError, match="found nothing to protect in Network"):
        train_stream(Network(nn.Identity(), 6), [GPMPlugin()], blobs())


def test_online_stream_is_refused():
    stream = split_online_stream(blobs().train_stream, experience_size=10)
    with pytest.raises(ValueError, match="GPMPlugin works on whole tasks"):
        naive(mlp(), [GPMPlugin()]).train(next(iter(stream)))


class Bypassed(nn.Module):
    """Uses the weight of a layer without calling the layer."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(6, 10), nn.Linear(10, 10)

    def forward(self, x):
        return self.other(F.linear(x, 2 * self.layer.weight))


def test_unprotectable_layer_is_named_once():
    model = Network(nn.Sequential(nn.Linear(6, 10), nn.PReLU()), 10)
    with pytest.warns(UserWarning, match=r"features\.1 \(PReLU\).*train freely") as caught:
        train_stream(model, [GPMPlugin()], blobs())
    assert len(caught) == 1
    with pytest.raises(ValueError, match=r"features\.1 \(PReLU\)"):
        train_stream(model, [GPMPlugin(strict=True)], blobs())


def test_layer_that_is_not_called_is_named():
    with pytest.warns(UserWarning, match=r"features\.layer\.weight.*never called"):
        train_stream(Network(Bypassed(), 10), [GPMPlugin()], blobs())


def test_memory_of_another_model_is_refused():
    plugin, other = GPMPlugin(), GPMPlugin()
    train_stream(Network(nn.Sequential(nn.Flatten(), nn.Linear(7, 5)), 5), [plugin], blobs(shape=(7,)))
    other.load_state_dict(plugin.state_dict())
    with (
        pytest.warns(UserWarning, match="not those that the state of GPMPlugin was saved with"),
        pytest.raises(ValueError, match=r"memory of features\.1\.weight does not fit"),
    ):
        train_stream(Network(nn.Sequential(nn.Flatten(), nn.Linear(6, 5)), 5), [other], blobs())
    with pytest.raises(ValueError, match="not the state of a GPMPlugin"):
        other.load_state_dict({"weights": 1})


def test_a_method_must_say_what_it_remembers():
    with pytest.raises(TypeError, match="abstract"):
        GradientProjectionPlugin()

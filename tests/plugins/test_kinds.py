"""Every kind of layer under every method, in a stream of tasks."""

import io
import math
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torchvision.models import VisionTransformer
from torchvision.models.swin_transformer import ShiftedWindowAttention

from became_avalanche import (
    BecameMergePlugin,
    GPCNSPlugin,
    GPMPlugin,
    NSCLPlugin,
    OWMPlugin,
    SGPPlugin,
    TRGPPlugin,
    measure_drift,
)
from became_avalanche.layers.model import map_layers
from tests.helpers import Network, assert_same_weights, batch_of, blobs, naive, weights

TOKENS = (4, 6)


class Tokens(nn.Module):
    """Tokens from numbers, and their embeddings."""

    def __init__(self, **options):
        super().__init__()
        self.embedding = nn.Embedding(16, 8, **options)

    def forward(self, x):
        return self.embedding((2 * x.flatten(1)).long().clamp(-8, 7) + 8).mean(1)


class First(nn.Module):
    """The mean over the steps of a module whose first output is a sequence."""

    def __init__(self, module, *copies):
        super().__init__()
        self.module, self.copies = module, len(copies)

    def forward(self, x):
        output = self.module(*[x] * (1 + self.copies))
        return (output if isinstance(output, torch.Tensor) else output[0]).mean(1)


class CrossAttention(nn.Module):
    """Attention with queries, keys and values of different sizes, and constant parameters."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, kdim=6, vdim=2, add_bias_kv=True, batch_first=True)

    def forward(self, x):
        return self.attention(x[..., :4], x, x[..., :2], need_weights=False)[0].mean(1)


class Steps(nn.Module):
    """A recurrent cell."""

    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(6, 8)

    def forward(self, x):
        state = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state


class Windows(nn.Module):
    """The attention of a Swin transformer, whose modules are never called, and a constant."""

    def __init__(self):
        super().__init__()
        self.attention = ShiftedWindowAttention(6, [2, 2], [0, 0], 2)

    def forward(self, x):
        return self.attention(x.reshape(-1, 2, 2, 6)).mean((1, 2))


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = Tokens()
        self.encoder = nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)
        self.recurrent = nn.LSTM(6, 8, batch_first=True)
        self.transposed = nn.ConvTranspose1d(4, 2, 2, stride=2)

    def forward(self, x):
        y = self.encoder(x)
        return torch.cat([self.tokens(x), self.recurrent(y)[0].mean(1), self.transposed(y).mean(-1).relu()], dim=-1)


class SameForward(nn.Linear):
    """A subclass that computes as its parent."""


class Adapted(nn.Linear):
    """A low-rank adapter of bare parameters next to a weight that trains, too."""

    def __init__(self, inputs, outputs, rank=2):
        super().__init__(inputs, outputs)
        self.a, self.b = nn.Parameter(torch.randn(rank, inputs) / 4), nn.Parameter(torch.randn(outputs, rank) / 4)

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias) + nn.functional.linear(x @ self.a.T, self.b)


class Twice(nn.Module):
    """A layer that is called, and whose weight a function uses on other inputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(24, 8)

    def forward(self, x):
        x = x.flatten(1)
        return self.layer(x) + nn.functional.linear(x.sin(), self.layer.weight)


KINDS = {
    "embedding": (Tokens, 8),
    "attention": (lambda: First(nn.MultiheadAttention(6, 2, batch_first=True), 1, 2), 6),
    "separate attention": (CrossAttention, 4),
    "encoder": (lambda: First(nn.TransformerEncoderLayer(6, 2, 12, dropout=0.0, batch_first=True)), 6),
    "lstm": (lambda: First(nn.LSTM(6, 8, 2, batch_first=True, bidirectional=True, proj_size=3)), 6),
    "gru": (lambda: First(nn.GRU(6, 8, batch_first=True)), 8),
    "rnn": (lambda: First(nn.RNN(6, 8, batch_first=True)), 8),
    "cell": (Steps, 8),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose1d(4, 3, 3, stride=2, padding=1), nn.Flatten()), 33),
    "bare adapter": (lambda: nn.Sequential(nn.Flatten(), Adapted(24, 8)), 8),
    "function": (Twice, 8),
    "swin": (Windows, 6),
    "weight norm": (lambda: nn.Sequential(nn.Flatten(), parametrizations.weight_norm(nn.Linear(24, 8))), 8),
    "subclass": (lambda: nn.Sequential(nn.Flatten(), SameForward(24, 8)), 8),
}
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.3, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.02),
}


def network(kind):
    torch.manual_seed(0)
    make, width = KINDS[kind]
    return Network(make(), width)


def drift(model, plugins, optimizer, tasks=2):
    """How far the outputs of layers have moved on the inputs of the first task after the last."""
    stream = blobs(n_tasks=tasks, samples=24, shape=TOKENS).train_stream
    strategy = naive(model, plugins, optimizer(model.parameters()), train_epochs=3)
    strategy.train(stream[0])
    before = deepcopy(model)
    for experience in stream[1:]:
        strategy.train(experience)
    return measure_drift(before, model, stream[0])


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_of_every_kind_stay(kind, optimizer):
    table = ["features.attention.relative_position_bias_table"] if kind == "swin" else []
    plugin = GPMPlugin(threshold=0.9999, increment=0, n_samples=None, strict=True, freeze=table)
    moved = drift(network(kind), [plugin], OPTIMIZERS[optimizer])
    free = drift(network(kind), [], OPTIMIZERS[optimizer])
    assert moved.keys() == free.keys()
    assert max(moved.values()) < 0.02
    assert max(free.values()) > 0.04


METHODS = {
    "gpm": lambda **options: GPMPlugin(threshold=0.9999, **options),
    "gpm with biases": lambda **options: GPMPlugin(threshold=0.9999, bias="augment", **options),
    "sgp": lambda **options: SGPPlugin(threshold=0.9999, alpha=1e9, **options),
    "trgp": lambda **options: TRGPPlugin(threshold=0.9999, trust_threshold=0.0, **options),
    "nscl": lambda **options: NSCLPlugin(a=1, coefficient=1, **options),
    "owm": lambda **options: OWMPlugin(alpha=1e-6, **options),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_protects_every_kind(method, optimizer):
    torch.manual_seed(0)
    plugin = METHODS[method](n_samples=None, strict=True)
    moved = drift(Network(Everything(), 18), [plugin], OPTIMIZERS[optimizer])
    if method == "nscl":  # leaves the direction with the smallest energy free, and normalisation to a penalty
        assert max(moved[name] for name in moved if "norm" not in name) < 0.15
    else:
        assert max(moved.values()) < 0.02


def test_without_a_method_every_kind_moves():
    torch.manual_seed(0)
    assert max(drift(Network(Everything(), 18), [], OPTIMIZERS["adam"]).values()) > 0.5


def test_common_null_space_removes_the_old_gradients_of_every_kind():
    """A projected step along the gradient of the first task hardly changes the outputs."""
    torch.manual_seed(0)
    model, plugin = Network(Everything(), 18), GPCNSPlugin(threshold=1, alpha=1e9, n_samples=None, strict=True)
    strategy = naive(model, [plugin])
    stream = blobs(n_tasks=2, samples=24, shape=TOKENS).train_stream
    strategy.train(stream[0])
    layers = map_layers(model.features, skip=["classifier"])
    assert {f"features.{name}" for name in layers.protected} == plugin.memory.keys()
    x, y = batch_of(stream[0])
    model.zero_grad()
    nn.functional.cross_entropy(model.eval()(x, torch.zeros(len(x), dtype=torch.long)), y).backward()
    for name, (layer, *_) in layers.protected.items():
        rows = layer.rows([layer.weight.grad])
        assert plugin.projector(f"features.{name}")(rows).norm() < 1e-2 * rows.norm()


def test_rows_that_old_tasks_looked_up_stay_and_others_train():
    class Halves(Tokens):
        """The first half of the table for the first task, all of it for the second."""

        def forward(self, x):
            tokens = (2 * x.flatten(1)).long().clamp(-8, 7) + 8
            return self.embedding(tokens if self.later else tokens // 2).mean(1)

    model = Network(Halves(), 8)
    model.features.later = False
    table = model.features.embedding.weight
    strategy = naive(model, [GPMPlugin(n_samples=None)], torch.optim.Adam(model.parameters(), lr=0.1))
    first, second = blobs(n_tasks=2, samples=40, shape=TOKENS).train_stream
    strategy.train(first)
    before, model.features.later = table.detach().clone(), True
    strategy.train(second)
    assert torch.equal(table[:8], before[:8])
    assert (table[8:] != before[8:]).any(1).all()


def works_without_state(optimizer):
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    probe = optimizer([parameter], lr=0.1)
    probe.state.clear()
    try:
        probe.step()
    except KeyError:
        return False
    return True


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients_of_an_embedding(optimizer):
    """With the projection, and with the Fisher information of the merge."""
    torch.manual_seed(0)
    plugin, merge = GPMPlugin(threshold=1, n_samples=None), BecameMergePlugin(epochs=1)
    model = Network(Tokens(sparse=True), 8)
    stream = blobs(n_tasks=2, samples=24, shape=TOKENS).train_stream
    if not works_without_state(optimizer):
        pytest.skip("Avalanche clears the state of an optimizer, which Adagrad of this torch cannot do without")
    strategy = naive(model, [plugin, merge], optimizer(model.parameters(), lr=0.1))
    for experience in stream:
        strategy.train(experience)
    assert len(merge.merges) == 1
    assert 0 <= merge.merges[0].coefficient <= 1


@pytest.mark.parametrize("kind", ["encoder", "embedding", "gru", "transposed"])
def test_state_and_merge(kind):
    """A run that is saved and loaded between the tasks ends at the same weights, with the merge on top."""
    results = []
    for interrupted in (False, True):
        model = network(kind)
        plugins = [GPMPlugin(0.95), BecameMergePlugin(epochs=1)]
        strategy = naive(model, plugins, train_epochs=1)
        for t, experience in enumerate(blobs(n_tasks=2, samples=24, shape=TOKENS).train_stream):
            torch.manual_seed(t)
            strategy.train(experience)
            if interrupted and t == 0:
                file = io.BytesIO()
                torch.save([plugin.state_dict() for plugin in plugins], file)
                file.seek(0)
                plugins = [GPMPlugin(0.95), BecameMergePlugin(epochs=1)]
                for plugin, state in zip(plugins, torch.load(file, weights_only=True), strict=True):
                    plugin.load_state_dict(state)
                strategy = naive(model, plugins, train_epochs=1)
        results.append(weights(model))
        assert math.isfinite(plugins[1].merges[0].coefficient)
    assert_same_weights(*results)


def test_a_weight_that_a_function_uses_on_other_inputs_is_protected_for_these_too():
    model, plugin = network("function"), GPMPlugin(threshold=0.9999, increment=0, n_samples=None)
    stream = blobs(n_tasks=2, samples=8, shape=TOKENS).train_stream
    strategy = naive(model, [plugin], OPTIMIZERS["adam"](model.parameters()), train_epochs=3)
    strategy.train(stream[0])
    x = batch_of(stream[0])[0].flatten(1).sin()
    weight = model.features.layer.weight
    before = weight.detach().clone()
    strategy.train(stream[1])
    assert (weight - before).norm() > 0.1 * before.norm()
    assert (x @ (weight - before).T).norm() < 0.02 * (x @ before.T).norm()


def test_another_use_of_a_weight_is_named():
    class Scaled(Twice):
        def forward(self, x):
            return super().forward(x) + nn.functional.linear(x.flatten(1), 2 * self.layer.weight)

    model = Network(Scaled(), 8)
    with pytest.warns(UserWarning, match=r"features\.layer\.weight \(by \w*mul\w*\).*on inputs that are unknown"):
        drift(model, [GPMPlugin()], OPTIMIZERS["sgd"])


def test_constants_of_a_vision_transformer_are_named_and_can_be_frozen():
    def transformer():
        torch.manual_seed(0)
        vit = VisionTransformer(image_size=8, patch_size=4, num_layers=1, num_heads=2, hidden_dim=8, mlp_dim=8)
        vit.heads = nn.Identity()
        return Network(vit, 8)

    benchmark = blobs(n_tasks=2, samples=10, shape=(3, 8, 8))
    names = ["features.class_token", "features.encoder.pos_embedding"]
    with pytest.warns(UserWarning, match=r"features\.class_token|features \(VisionTransformer\)") as caught:
        naive(transformer(), [GPMPlugin()], train_epochs=1).train(benchmark.train_stream[0])
    assert len(caught) == 1
    model = transformer()
    strategy = naive(model, [GPMPlugin(strict=True, freeze=names)], train_epochs=1)
    before = []
    for experience in benchmark.train_stream:
        before.append(weights(model))
        strategy.train(experience)
    for name in names:
        assert not torch.equal(before[0][name], before[1][name])
        assert torch.equal(before[1][name], weights(model)[name])


def test_lazy_modules_work_and_the_merge_says_what_it_needs():
    def lazy():
        return Network(nn.Sequential(nn.Flatten(), nn.LazyLinear(8)), 8)

    assert max(drift(lazy(), [GPMPlugin(0.9999, n_samples=None)], OPTIMIZERS["sgd"]).values()) < 0.02
    with pytest.raises(ValueError, match=r"features\.1\.weight.*call the model once on a batch"):
        drift(lazy(), [GPMPlugin(), BecameMergePlugin()], OPTIMIZERS["sgd"])


def test_a_computed_weight_is_named():
    for wrap, rule in (
        (parametrizations.orthogonal, "_Orthogonal"),
        (parametrizations.spectral_norm, "_SpectralNorm"),
    ):
        model = Network(nn.Sequential(nn.Flatten(), nn.Linear(24, 8), wrap(nn.Linear(8, 8, bias=False))), 8)
        with pytest.warns(UserWarning, match=rf"features\.2\.weight \(computed from other parameters by {rule}\)"):
            drift(model, [GPMPlugin()], OPTIMIZERS["sgd"])


def test_a_normalised_weight_trains_and_keeps_its_form():
    """Its direction and norm change, but not its outputs on old inputs. Other methods protect it or raise an error."""

    def normalised():
        torch.manual_seed(0)
        return Network(nn.Sequential(nn.Flatten(), parametrizations.weight_norm(nn.Linear(24, 8))), 8)

    stream = blobs(n_tasks=2, samples=8, shape=TOKENS).train_stream
    for plugin in (GPMPlugin(0.9999, n_samples=None), TRGPPlugin(threshold=0.9999, n_samples=None)):
        model = normalised()
        strategy = naive(model, [plugin], torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, weight_decay=0.1))
        strategy.train(stream[0])
        layer, x = model.features[1], batch_of(stream[0])[0].flatten(1)
        before = layer.weight.detach().clone()
        strategy.train(stream[1])
        update = layer.weight.detach() - before
        assert update.norm() > 0.05 * before.norm()
        assert (x @ update.T).norm() < 0.01 * (x @ before.T).norm()
    with pytest.warns(UserWarning, match=r"weight\.original1.*no gradients: GPCNSPlugin lets them train freely"):
        naive(normalised(), [GPCNSPlugin()]).train(stream[0])

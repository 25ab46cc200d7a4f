import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from became_avalanche.merging import persample
from became_avalanche.merging.fisher import (
    ESTIMATORS,
    Batch,
    Fisher,
    accumulate,
    batched_fisher,
    curvature_along,
    zero_padded,
)


def oracle(model, batches):
    """Mean over batches of B times the squared gradient of the batch's mean loss, one parameter entry at a time."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x, y in batches:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                total[name] += len(y) * p.grad**2
    return {name: value / len(batches) for name, value in total.items()}


@given(
    sizes=st.lists(st.integers(2, 5), min_size=1, max_size=4),
    normalised=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_batched_equals_the_loop(sizes, normalised, seed):
    torch.manual_seed(seed)
    norm = nn.BatchNorm1d(6, track_running_stats=False) if normalised else nn.Identity()
    model = nn.Sequential(nn.Linear(3, 6), norm, nn.Tanh(), nn.Linear(6, 4)).double()
    batches = [(torch.randn(n, 3).double(), torch.randint(4, (n,))) for n in sizes]
    losses = ((F.cross_entropy(model(x), y), len(y)) for x, y in batches)
    fisher = batched_fisher(losses, dict(model.named_parameters()))
    for name, expected in oracle(model, batches).items():
        torch.testing.assert_close(fisher[name], expected)
        assert not fisher[name].requires_grad


def test_parameter_without_gradient_has_no_information():
    used, unused = torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)
    fisher = batched_fisher([((used**2).mean(), 4)], {"used": used, "unused": unused})
    assert torch.equal(fisher["used"], torch.full((2,), 4.0))
    assert torch.equal(fisher["unused"], torch.zeros(3))
    assert used.grad is None


def test_no_data_is_refused():
    with pytest.raises(ValueError, match="no samples"):
        batched_fisher([], {"w": torch.ones(1, requires_grad=True)})


def test_precision_accumulates_by_name():
    precision = {"shared": torch.tensor([1.0, 2.0]), "old head": torch.tensor([5.0])}
    fisher = {"shared": torch.tensor([3.0, 4.0]), "new head": torch.tensor([6.0])}
    result = accumulate(precision, fisher)
    assert {name: tensor.tolist() for name, tensor in result.items()} == {
        "shared": [4.0, 6.0],
        "old head": [5.0],
        "new head": [6.0],
    }
    assert precision["shared"].tolist() == [1.0, 2.0]


def test_a_head_that_grew_is_padded():
    grown = zero_padded(torch.ones(2, 3), torch.zeros(4, 3))
    assert grown.sum() == 6
    assert grown[:2].all()
    assert accumulate({"head": torch.ones(2, 3)}, {"head": torch.ones(4, 3)})["head"].sum() == 18


def test_precision_and_fisher_information_may_each_be_the_larger():
    total = accumulate({"scale": torch.ones(3, 1)}, {"scale": torch.ones(1, 4)})["scale"]
    assert total.tolist() == [[2, 1, 1, 1], [1, 0, 0, 0], [1, 0, 0, 0]]
    assert zero_padded(torch.arange(4.0).reshape(2, 2), torch.zeros(1, 3)).tolist() == [[0, 1, 0]]


# -------------------------------------------------------------------------------------------------------- per sample


class Tokens(nn.Module):
    """Tokens, a layer that is called twice, a shared weight, and layers without a closed form."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)
        self.second.weight = self.first.weight
        self.norm, self.slope = nn.LayerNorm(4), nn.PReLU()

    def forward(self, x):
        x = self.first(F.relu(self.first(x)))
        return self.last(self.slope(self.norm(self.second(x))).mean(1))


class Once(nn.Module):
    """Tokens, with one call of each layer."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        return self.last(self.first(x).tanh()).mean(1)


class Heads(nn.Module):
    """Computes all heads and uses one."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 6), nn.ReLU(inplace=True))
        self.heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])

    def forward(self, x):
        features = self.body(x)
        return [head(features) for head in self.heads][1]


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, stride=2), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, groups=2, padding_mode="reflect"), nn.GroupNorm(2, 4)
        self.head = nn.Linear(4, 5)

    def forward(self, x):
        x = self.stem(x)
        return self.head((x + self.norm(self.conv(x)).relu_()).mean((2, 3)))


class Doubling(nn.BatchNorm1d):
    """A subclass that computes something else."""

    def forward(self, x):
        return 2 * super().forward(x).tanh()


class Tokenised(nn.Module):
    """Embeddings of rounded numbers, so that some tokens occur several times."""

    def __init__(self, padding_idx=None):
        super().__init__()
        self.embedding = nn.Embedding(4, 3, padding_idx=padding_idx)

    def forward(self, x):
        return self.embedding(x.round().long().clamp(-1, 2) + 1)


MODELS = {
    "other normalisation": (lambda: nn.Sequential(nn.Linear(4, 6), Doubling(6), nn.Linear(6, 3)), (4,)),
    "linear": (lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=False)), (4,)),
    "tokens": (Tokens, (5, 4)),
    "tokens once": (Once, (5, 4)),
    "heads": (Heads, (4,)),
    "residual": (Residual, (2, 6, 6)),
    "1-d": (lambda: nn.Sequential(nn.Conv1d(2, 3, 2, dilation=2), nn.Flatten(), nn.Linear(15, 3)), (2, 7)),
    "3-d": (lambda: nn.Sequential(nn.Conv3d(1, 2, 2, bias=False), nn.Flatten(), nn.Linear(54, 3)), (1, 4, 4, 4)),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose1d(4, 6, 3, stride=2, groups=2), nn.Flatten(), nn.Linear(54, 3)),
        (4, 4),
    ),
    "embedding": (lambda: nn.Sequential(Tokenised(), nn.Flatten(), nn.Linear(15, 3)), (5,)),
    "depthwise": (lambda: nn.Sequential(nn.Conv2d(3, 6, 2, groups=3), nn.Flatten(), nn.Linear(54, 4)), (3, 4, 4)),
}


def model_and_data(name, samples=7):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().double()
    model(torch.randn(20, *shape).double())  # statistics of normalisation layers
    model.eval()
    x = torch.randn(samples, *shape).double()
    return model, x, torch.randint(3, (samples,))


def sample_oracle(model, x, y, labels):
    """One backward pass per sample and label."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for i in range(len(x)):
        log_p = model(x[i : i + 1]).log_softmax(-1)[0]
        for label, weight in labels(log_p.detach().exp(), y[i]):
            gradients = torch.autograd.grad(
                -log_p[label], [p for _, p in model.named_parameters()], retain_graph=True, allow_unused=True
            )
            for name, gradient in zip(total, gradients, strict=True):
                if gradient is not None:
                    total[name] += weight * gradient**2 / len(x)
    return total


def passes(model, x, y, size):
    for part, labels in zip(x.split(size), y.split(size), strict=True):
        logits = model(part)
        yield Batch(F.cross_entropy(logits, labels), logits, labels)


def estimate(model, x, y, *arguments, size=4):
    return Fisher(*arguments)(passes(model, x, y, size), model, dict(model.named_parameters()))


@pytest.mark.parametrize("budget", [1, 100, persample.BUDGET])
@pytest.mark.parametrize("name", MODELS)
def test_empirical_and_exact_equal_the_loop(name, budget, monkeypatch):
    monkeypatch.setattr(persample, "BUDGET", budget)
    model, x, y = model_and_data(name)
    for estimator, labels in (
        ("empirical", lambda p, label: [(label, 1)]),
        ("exact", lambda p, label: list(enumerate(p))),
    ):
        expected = sample_oracle(model, x, y, labels)
        actual = estimate(model, x, y, estimator)
        assert actual.keys() == expected.keys()
        for key, diagonal in expected.items():
            torch.testing.assert_close(actual[key], diagonal, rtol=1e-9, atol=1e-14)
            assert not actual[key].requires_grad
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("name", MODELS)
def test_batches_of_one_make_batched_empirical(name):
    model, x, y = model_and_data(name)
    batched, empirical = (estimate(model, x, y, estimator, size=1) for estimator in ("batched", "empirical"))
    for key, diagonal in empirical.items():
        torch.testing.assert_close(batched[key], diagonal, rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("name", MODELS)
def test_batched_and_sampled_equal_the_loop(name):
    model, x, y = model_and_data(name)
    batches = list(zip(x.split(4), y.split(4), strict=True))
    batched = estimate(model, x, y, "batched")
    torch.manual_seed(1)
    sampled = estimate(model, x, y, "sampled")
    torch.manual_seed(1)
    drawn = torch.cat([torch.multinomial(model(part).detach().softmax(-1), 1)[:, 0] for part, _ in batches])
    expected = sample_oracle(model, x, drawn, lambda p, label: [(label, 1.0)])
    torch.manual_seed(1)
    batched_sampled = estimate(model, x, y, "batched-sampled")
    for key, diagonal in oracle(model, list(zip(x.split(4), drawn.split(4), strict=True))).items():
        torch.testing.assert_close(batched_sampled[key], diagonal.detach(), rtol=1e-5, atol=1e-14)
    for key, diagonal in oracle(model, batches).items():
        torch.testing.assert_close(batched[key], diagonal.detach(), rtol=1e-5, atol=1e-14)
        torch.testing.assert_close(sampled[key], expected[key], rtol=1e-5, atol=1e-14)


def argmax_oracle(model, batches):
    """Mean over batches of B g² at the most likely labels, with one pass for labels and gradient."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for x in batches:
        logits = model(x)
        model.zero_grad()
        F.cross_entropy(logits, logits.argmax(-1)).backward()
        for name, p in model.named_parameters():
            total[name] += len(x) * p.grad**2
    return {name: value / len(batches) for name, value in total.items()}


@pytest.mark.parametrize("training", [False, True])
@given(sizes=st.lists(st.integers(2, 5), min_size=1, max_size=4), seed=st.integers(0, 2**16))
def test_argmax_equals_the_loop(training, sizes, seed):
    torch.manual_seed(seed)
    layers = [nn.Linear(3, 6), nn.BatchNorm1d(6, track_running_stats=False), nn.Dropout(0.5), nn.Linear(6, 4)]
    model = nn.Sequential(*layers).double().train(training)
    batches = [torch.randn(n, 3).double() for n in sizes]
    y = [torch.zeros(n, dtype=torch.long) for n in sizes]  # not used
    torch.manual_seed(seed)  # the same dropout masks
    passes = (Batch(torch.zeros(()), model(x), labels) for x, labels in zip(batches, y, strict=True))
    parameters = dict(model.named_parameters())
    fisher = Fisher("batched-argmax", reduction="batches")(passes, model, parameters)
    torch.manual_seed(seed)
    for name, expected in argmax_oracle(model, batches).items():
        torch.testing.assert_close(fisher[name], expected * len(sizes) / sum(sizes))


def test_the_mean_over_batches_is_for_batched_estimators_alone():
    with pytest.raises(ValueError, match="needs a batched estimator, such as 'batched'; got 'exact'"):
        Fisher("exact", reduction="batches")
    with pytest.raises(ValueError, match="mode must be 'train', 'eval' or None; got 'test'"):
        Fisher(mode="test")


def test_batched_estimators_see_the_model_as_in_training():
    modes = {name: Fisher(name).mode for name in ESTIMATORS}
    assert {name for name, mode in modes.items() if mode == "train"} == {"batched", "batched-sampled", "batched-argmax"}
    assert Fisher("batched", mode="eval").mode == "eval"
    assert Fisher("exact", mode="train").mode == "train"


@pytest.mark.parametrize(("name", "batch"), [("sampled", 4), ("batched-sampled", 7)])
def test_sampled_tends_to_exact(name, batch):
    model, x, y = model_and_data("linear")
    exact = estimate(model, x, y, "exact")
    draws = [estimate(model, x, y, name, size=batch) for _ in range(400)]
    for key, diagonal in exact.items():
        mean = torch.stack([draw[key] for draw in draws]).mean(0)
        assert (mean - diagonal).norm() < 0.15 * diagonal.norm()
        assert not torch.equal(draws[0][key], draws[1][key])


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_sum_is_the_mean_times_the_samples(estimator):
    model, x, y = model_and_data("residual")
    torch.manual_seed(1)
    mean = estimate(model, x, y, estimator)
    torch.manual_seed(1)
    total = estimate(model, x, y, estimator, None, "sum")
    for key, diagonal in mean.items():
        torch.testing.assert_close(total[key], 7 * diagonal)


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(6), nn.BatchNorm1d(6, affine=False, track_running_stats=False)])
def test_coupled_samples_are_refused(norm):
    model = nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 3))
    if norm.track_running_stats:
        model.train()
    else:
        model.eval()
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    with pytest.raises(ValueError, match=r"1 \(BatchNorm1d\).*couples its samples.*'batched'"):
        estimate(model, x, y, "empirical")
    estimate(model, x, y, "batched")
    estimate(model, x, y, "batched-sampled")


class Bypassed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(4, 3), nn.Bilinear(4, 4, 4)

    def forward(self, x):
        return F.linear(x, self.layer.weight)


def test_what_cannot_be_told_apart_is_refused():
    x, y = torch.randn(5, 4), torch.randint(3, (5,))
    with pytest.raises(ValueError, match=r"layer\.weight is used outside the module that owns it.*'batched'"):
        estimate(Bypassed(), x, y, "exact")
    model = Bypassed()
    model.forward = lambda x: model.other(x, x)
    with pytest.raises(ValueError, match=r"Bilinear does not map one tensor to one tensor.*'batched'"):
        estimate(model, x, y, "exact")


NOT_CLASSES = {
    "regression": (nn.Linear(3, 2), lambda n: torch.randn(n, 2), F.mse_loss),
    "one output": (nn.Sequential(nn.Linear(3, 1), nn.Flatten()), lambda n: torch.randn(n, 1), F.mse_loss),
    "binary with one logit": (nn.Linear(3, 1), lambda n: torch.rand(n, 1).round(), F.binary_cross_entropy_with_logits),
    "several labels": (nn.Linear(3, 4), lambda n: torch.rand(n, 4).round(), F.binary_cross_entropy_with_logits),
    "dense labels": (
        nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 4, 1)),
        lambda n: torch.randint(4, (n, 3)),
        F.cross_entropy,
    ),
}


@pytest.mark.parametrize("case", NOT_CLASSES)
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_what_are_not_class_logits_is_refused_but_by_batched(estimator, case):
    model, make_labels, loss = NOT_CLASSES[case]
    x, y = torch.randn(5, 3), make_labels(5)
    parameters = dict(model.named_parameters())

    def batches():
        logits = model(x)
        yield Batch(loss(logits, y), logits, y)

    if estimator == "batched":
        assert all(diagonal.any() for diagonal in Fisher(estimator)(batches(), model, parameters).values())
    else:
        with pytest.raises(ValueError, match=r"class logits.*shape.*use fisher='batched'"):
            Fisher(estimator)(batches(), model, parameters)


def test_unknown_estimators_are_refused():
    with pytest.raises(
        ValueError,
        match="unknown Fisher estimator 'true'; choose one of: batched, batched-sampled, batched-argmax, empirical, ",
    ):
        Fisher("true")
    with pytest.raises(ValueError, match="reduction must be 'mean', 'sum' or 'batches'; got 'max'"):
        Fisher(reduction="max")
    with pytest.raises(ValueError, match=r"n_samples must be at least 1.*got 0"):
        Fisher(n_samples=0)
    with pytest.raises(ValueError, match="no samples"):
        Fisher("exact")([], nn.Linear(1, 1), {})


# ---------------------------------------------------------------------------------- the budget, and the full matrix


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that is created."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (lambda: nn.Conv2d(3, 8, 3), (3, 12, 12)),  # columns are larger than the gradient
        (lambda: nn.Conv2d(16, 32, 3, groups=2), (16, 4, 4)),  # the gradient is larger
        (lambda: nn.BatchNorm2d(3), (3, 12, 12)),
    ],
)
def test_per_sample_gradients_stay_within_the_budget(layer, shape, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(layer(), nn.Flatten(), nn.LazyLinear(3)).eval()
    samples = 64
    x = torch.randn(samples, *shape)
    model(x)
    parameters = {"weight": model[0].weight}
    with persample.recorded_calls(model, parameters) as calls:
        loss = -model(x).log_softmax(-1)[:, 0].sum()
        gradients = torch.autograd.grad(loss, [call.output for call in calls])
    use = [("weight", calls[0], gradients[0])]
    budget = 10000
    monkeypatch.setattr(persample, "BUDGET", budget)
    with Largest() as largest:
        squares = persample._sum_of_squares(model[0].weight, use)
    assert largest.elements <= budget
    monkeypatch.setattr(persample, "BUDGET", 10**9)
    with Largest() as unlimited:
        whole = persample._sum_of_squares(model[0].weight, use)
    assert unlimited.elements > budget
    torch.testing.assert_close(squares, whole)


@pytest.mark.parametrize("name", MODELS)
def test_curvature_along_a_direction_equals_the_dense_fisher_information(name):
    model, x, _ = model_and_data(name)
    theta = {key: parameter.detach() for key, parameter in model.named_parameters()}
    delta = {key: torch.randn_like(parameter) for key, parameter in theta.items()}
    curvature = curvature_along(lambda weights: functional_call(model, weights, (x,)), theta, delta)
    for i in range(len(x)):
        logits = model(x[i : i + 1])[0]
        p = logits.detach().softmax(-1)
        expected = 0.0
        for c in range(len(p)):
            gradients = torch.autograd.grad(
                logits.log_softmax(-1)[c], list(model.parameters()), retain_graph=True, allow_unused=True
            )
            along = sum(float((g * d).sum()) for g, d in zip(gradients, delta.values(), strict=True) if g is not None)
            expected += p[c].item() * along**2
        assert float(curvature[i]) == pytest.approx(expected, rel=1e-6)


def test_curvature_is_of_the_whole_batch_where_samples_are_coupled():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 4)).double()
    x = torch.randn(6, 3).double()
    theta = {key: parameter.detach() for key, parameter in model.named_parameters()}
    delta = {key: torch.randn_like(parameter) for key, parameter in theta.items()}

    def logits_at(weights):
        return functional_call(model, weights, (x,))

    step = 1e-6
    ahead, behind = ({key: theta[key] + sign * step * delta[key] for key in theta} for sign in (1, -1))
    j = (logits_at(ahead) - logits_at(behind)) / (2 * step)
    p = logits_at(theta).detach().softmax(-1)
    expected = [float(j[i] @ (p[i].diag() - p[i].outer(p[i])) @ j[i]) for i in range(6)]
    assert curvature_along(logits_at, theta, delta).tolist() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "module",
    [nn.MultiheadAttention(4, 2, batch_first=True), nn.LSTM(4, 4, batch_first=True), nn.GRU(4, 4, batch_first=True)],
    ids=lambda module: type(module).__name__,
)
def test_modules_of_many_tensors_are_refused_with_the_way_out(module):
    class First(nn.Module):
        def __init__(self):
            super().__init__()
            self.module, self.last = module, nn.Linear(4, 3)

        def forward(self, x):
            arguments = [x] * (3 if isinstance(self.module, nn.MultiheadAttention) else 1)
            return self.last(self.module(*arguments)[0].mean(1))

    model, x, y = First(), torch.randn(4, 5, 4), torch.randint(3, (4,))
    with pytest.raises(ValueError, match=r"does not map one tensor to one tensor.*use fisher='batched'"):
        estimate(model, x, y, "empirical")
    assert all(diagonal.isfinite().all() for diagonal in estimate(model, x, y, "batched").values())


def test_padding_has_no_information():
    model = nn.Sequential(Tokenised(padding_idx=1), nn.Flatten(), nn.Linear(15, 3)).double()
    x, y = torch.randn(7, 5).double(), torch.randint(3, (7,))
    expected = sample_oracle(model, x, y, lambda p, label: [(label, 1)])
    for name, diagonal in estimate(model, x, y, "empirical").items():
        torch.testing.assert_close(diagonal, expected[name])
    assert not expected["0.embedding.weight"][1].any()
    assert expected["0.embedding.weight"].any()

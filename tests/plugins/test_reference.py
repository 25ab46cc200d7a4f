"""``BecameMergePlugin(reference=True)`` against a loop written from a description of the published merge."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from became_avalanche import BecameMergePlugin, Fisher, GPMPlugin, PlateauPlugin, RunningStatistics, TRGPPlugin
from became_avalanche.plugins.merge import REFERENCE
from tests.helpers import Network, Spy, Stages, assert_same_weights, batch_of, blobs, convnet, naive, stream_of, weights

BATCH, EPOCHS = 7, 3


@pytest.fixture
def float64():
    torch.set_default_dtype(torch.float64)
    blobs.cache_clear()
    yield
    torch.set_default_dtype(torch.float32)
    blobs.cache_clear()


class SeededDropout(nn.Module):
    """Dropout whose mask depends only on the shape of the batch, so that every pass has the same mask."""

    def forward(self, x):
        generator = torch.Generator().manual_seed(len(x))
        return x * (torch.rand(x.shape, generator=generator) < 0.5) * 2 if self.training else x


def network():
    """Dropout, and normalisation with running statistics."""
    hidden = [nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), SeededDropout()]
    return Network(nn.Sequential(*hidden, nn.Linear(12, 10, bias=False), nn.ReLU()), 10)


class Worsening(PlateauPlugin):
    """Gets a validation loss that grows in each stage, so that the weights of the first epoch are the best."""

    def loss(self, strategy):
        return float(strategy.clock.train_exp_epochs)


def published_fisher(state, experience):
    """Return Σ B g² / n with unshuffled data, dropout, and the labels that the model predicts."""
    model = network()
    for task in range(experience.task_label + 1):
        model.classifier.adaptation(blobs().train_stream[task])
    model.load_state_dict(state)
    model.train()
    x, _ = batch_of(experience)
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for start in range(0, len(x), BATCH):
        batch = x[start : start + BATCH]
        logits = model(batch, torch.full((len(batch),), experience.task_label))
        model.zero_grad()
        F.cross_entropy(logits, logits.argmax(-1)).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                total[name] += len(batch) * p.grad**2
    return {name: value / len(x) for name, value in total.items()}


@pytest.mark.parametrize("projected", [True, False])
@pytest.mark.usefixtures("float64")
def test_the_reference_merges_as_the_published_code_does(projected):
    stages, last, merge = Stages(), [], BecameMergePlugin(reference=True)
    watch = Spy(after_training_iteration=lambda s: last.append((s.clock.train_exp_epochs, weights(s.model))))
    plugins = [GPMPlugin(0.9)] if projected else []
    stream_of(
        [*plugins, merge, Worsening(patience=10), stages.plugin(), watch],
        network,
        blobs(n_tasks=2, samples=40),
        train_mb_size=BATCH,
        train_epochs=EPOCHS,
    )
    first, second = blobs(n_tasks=2, samples=40).train_stream
    precision = published_fisher(stages.merged[0], first)
    assert_same_weights(stages.merged[0], [state for epoch, state in last if epoch == 0][5])  # the best of task 1
    start = stages.starts[-1][2]  # θ_GP; without projection θ*_1, with the new head as it was made
    hat, merged = last[-1][1], stages.merged[1]
    assert len(stages.starts) == (3 if projected else 2)

    fisher = published_fisher(hat, second)
    delta = {name: hat[name] - start[name] for name in fisher}
    plasticity = sum(float((fisher[name] * delta[name] ** 2).sum()) for name in fisher)
    stability = sum(float((precision[name] * delta[name] ** 2).sum()) for name in precision)
    coefficient = plasticity / (plasticity + stability)
    assert 0.05 < coefficient < 0.95
    assert merge.merges[0].coefficient == pytest.approx(coefficient, rel=1e-9)
    for name in fisher:  # the new head, too
        torch.testing.assert_close(merged[name], start[name] + coefficient * delta[name], rtol=1e-9, atol=1e-12)
    for name in merged.keys() - fisher.keys():  # buffers
        assert torch.equal(merged[name], start[name]), name
    assert not torch.equal(start["features.1.running_mean"], hat["features.1.running_mean"])
    for name, value in published_fisher(merged, second).items():
        expected = precision.get(name, 0) + value
        torch.testing.assert_close(merge.precision[name], expected, rtol=1e-9, atol=1e-15)


@pytest.mark.parametrize(("name", "value"), REFERENCE.items())
def test_each_part_is_an_option_of_its_own(name, value):
    alone, all_parts = BecameMergePlugin(**{name: value}), BecameMergePlugin(reference=True)
    assert getattr(alone, name) == getattr(all_parts, name) != getattr(BecameMergePlugin(), name)
    with pytest.raises(ValueError, match=f"reference=True sets {name} itself; got {name}="):
        BecameMergePlugin(reference=True, **{name: value})
    one_by_one, reference = BecameMergePlugin(**REFERENCE), BecameMergePlugin(reference=True)
    assert vars(one_by_one).keys() == vars(reference).keys()
    assert [getattr(one_by_one, part) for part in REFERENCE] == [getattr(reference, part) for part in REFERENCE]


def test_unknown_parts_are_refused():
    for name in ("candidate", "buffers", "new_head"):
        with pytest.raises(ValueError, match=f"{name} must be one of: .*; got 'first'"):
            BecameMergePlugin(**{name: "first"})


def test_a_pass_in_train_mode_leaves_no_trace():
    """Running statistics, modes and the random state are as before, so stage 1 of the next task is the same."""
    ends = []
    for mode in ("eval", "train"):
        stages, merge = Stages(), BecameMergePlugin(rule=lambda merge: 0.5, fisher=Fisher("batched-argmax", mode=mode))
        stream_of([GPMPlugin(0.9), merge, stages.plugin()], convnet, blobs(shape=(2, 6, 6), n_tasks=2))
        ends.append((stages.ends[1], merge.precision))
    assert_same_weights(ends[0][0], ends[1][0])
    assert not torch.equal(ends[0][1]["features.0.weight"], ends[1][1]["features.0.weight"])


class Watching(BecameMergePlugin):
    """Notes the mode of each layer, and the batch sizes, in all passes for the Fisher information."""

    def estimate_fisher(self, strategy, names, num_workers):
        layers = strategy.model.features
        hooks = [layer.register_forward_pre_hook(self.note) for layer in layers]
        self.modes, self.sizes = {}, []
        try:
            return super().estimate_fisher(strategy, names, num_workers)
        finally:
            for hook in hooks:
                hook.remove()

    def note(self, layer, inputs):
        self.modes[type(layer).__name__] = layer.training
        self.sizes.append(len(inputs[0]))


@pytest.mark.parametrize("frozen", [False, True])
def test_layers_that_train_in_eval_mode_stay_in_it_for_the_fisher_information(frozen):
    merge = Watching()
    stream_of([GPMPlugin(0.9), merge, *([RunningStatistics("freeze")] if frozen else [])], network, blobs(n_tasks=2))
    assert merge.modes["SeededDropout"]
    assert merge.modes["BatchNorm1d"] is not frozen
    merge = Watching(fisher=Fisher(mode="eval"))
    stream_of([GPMPlugin(0.9), merge], network, blobs(n_tasks=2))
    assert not any(merge.modes.values())


@pytest.mark.parametrize(("samples", "sizes"), [(15, {7}), (16, {7, 2}), (14, {7})])
def test_a_last_batch_of_one_sample_is_left_out_in_train_mode(samples, sizes):
    """Batch normalisation would refuse it. Training leaves it out with ``drop_last``."""
    torch.manual_seed(0)
    merge, benchmark = Watching(), blobs(n_tasks=2, classes=1, samples=samples)
    strategy = naive(network(), [GPMPlugin(0.9), merge], train_mb_size=7)
    for experience in benchmark.train_stream:
        assert len(experience.dataset) == samples
        strategy.train(experience, drop_last=True)
        assert set(merge.sizes) == sizes


def test_the_precision_of_scales_meets_those_of_later_tasks():
    seen = []

    def watched(merge):
        seen.append(merge)
        return 0.5

    merge = BecameMergePlugin(rule=watched, own_precision=True)
    precisions = []
    keep = Spy(after_training_exp=lambda s: precisions.append(dict(merge.precision)))
    trgp = TRGPPlugin(0.0, threshold=0.8, increment=0.08, n_samples=None)
    stream_of([trgp, merge, keep], benchmark=blobs(n_tasks=4))
    names = sorted(name for name in seen[-1].fisher if name.startswith("TRGP:"))
    assert names
    differ = 0
    for merged, before in zip(seen, precisions, strict=False):
        for name in names:
            if name in merged.fisher and name in before:
                have, want = before[name], merged.precision[name]
                common = tuple(slice(min(sizes)) for sizes in zip(have.shape, want.shape, strict=True))
                assert torch.equal(want[common], have[common])
                assert want.count_nonzero() == have[common].count_nonzero()
                assert have.any()
                differ += have.shape != want.shape
    assert differ  # subspaces of tasks differ in size
    without = BecameMergePlugin(rule=lambda merge: 0.5)
    stream_of([TRGPPlugin(0.0), without])
    assert not any(name.startswith("TRGP:") for name in without.precision)

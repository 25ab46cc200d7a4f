import math
from copy import deepcopy
from functools import partial

import pytest
import torch
from torchvision.models.resnet import BasicBlock, ResNet

from became_avalanche import (
    AlexNet,
    BecameMergePlugin,
    GPMPlugin,
    Heads,
    LeNet,
    MultiHeadMLP,
    MultiHeadNetwork,
    PreActResNet18,
    ReducedResNet18,
)
from became_avalanche.strategy.heads import load_model_state, model_state
from tests.helpers import blobs, naive


def count(module):
    return sum(parameter.numel() for parameter in module.parameters())


def test_preactivation_resnet_has_the_published_number_of_parameters():
    assert count(PreActResNet18().features) + 10 * (512 * 10 + 10) == 11_218_340


def test_lenet_has_the_published_layers():
    model = LeNet()
    shapes = [tuple(parameter.shape) for parameter in model.features.parameters()]
    assert shapes == [(20, 3, 5, 5), (50, 20, 5, 5), (800, 3200), (500, 800)]
    maps = []
    for layer in model.features:
        layer.register_forward_hook(lambda _, __, output: maps.append(tuple(output.shape[1:])))
    model.features(torch.zeros(1, 3, 32, 32))
    assert maps[0] == (20, 32, 32)
    assert maps[4] == (50, 16, 16)
    bounds = [(6 / shape[1:].numel()) ** 0.5 for shape in map(torch.Size, shapes)]
    for parameter, bound in zip(model.features.parameters(), bounds, strict=True):
        assert 0.9 * bound < parameter.abs().max() <= bound


def test_a_shortcut_starts_after_normalisation_and_relu():
    torch.manual_seed(0)
    block = PreActResNet18().features[3].eval()
    assert block.shortcut is not None
    with torch.no_grad():
        block.conv2.weight.zero_()
        x = torch.randn(1, 64, 8, 8)
        active = torch.relu(torch.nn.functional.batch_norm(x, torch.zeros(64), torch.ones(64)))
        torch.testing.assert_close(block(x), block.shortcut(active))


@pytest.mark.parametrize("make", [AlexNet, LeNet, MultiHeadMLP, partial(ReducedResNet18, width=2, image_size=9)])
def test_heads_without_bias_are_trained_and_have_none(make):
    shape = (64,) if make is MultiHeadMLP else (3, 9, 9) if isinstance(make, partial) else (3, 32, 32)
    model = make(head_bias=False)
    merge = BecameMergePlugin()
    strategy = naive(model, [GPMPlugin(n_samples=4), merge], train_epochs=1)
    for experience in blobs(n_tasks=2, classes=3, samples=9, shape=shape).train_stream:
        strategy.train(experience)
    assert 0 <= merge.merges[0].coefficient <= 1
    for name, head in model.classifier.classifiers.items():
        assert head.classifier.out_features == 3
        assert not head.classifier.bias.any(), name
        assert head.classifier.weight.grad is None or head.classifier.weight.requires_grad
    state, other = model_state(model), make(head_bias=False)
    load_model_state(other, state)
    assert not any(p.requires_grad for name, p in other.named_parameters() if name.endswith("classifier.bias"))


def test_heads_drawn_by_kaimings_rule_keep_what_was_learned_when_they_grow():
    torch.manual_seed(0)
    width, stream = 400, blobs(n_tasks=2, classes=50, samples=50, shape=(4,)).train_stream
    heads, default = Heads(width, bias=False, kaiming=True), Heads(width)
    for experience in stream:
        learned = {task: head.classifier.weight.clone() for task, head in heads.classifiers.items()}
        for own in (heads, default):
            own.adaptation(experience)
        for task, old in learned.items():
            assert torch.equal(heads.classifiers[task].classifier.weight[: len(old)], old)
    assert [head.classifier.out_features for head in heads.classifiers.values()] == [50, 50]
    for task, head in heads.classifiers.items():
        bound = math.sqrt(6 / width)  # uniform between -bound and bound: variance 2 / width
        for rows in (head.classifier.weight[:2], head.classifier.weight[2:]):
            assert rows.abs().max() <= bound
            assert rows.var().item() == pytest.approx(2 / width, rel=0.15)
        assert not head.classifier.bias.any()
        assert default.classifiers[task].classifier.weight.var().item() == pytest.approx(1 / 3 / width, rel=0.15)


def torchvision_network():
    backbone = ResNet(BasicBlock, [1, 1, 1, 1])
    backbone.fc = torch.nn.Identity()
    return MultiHeadNetwork(backbone, 512)


def shape_for(make):
    """Return the shape of images for a network: the usual one, or small images if it pools over all positions."""
    return (3, 32, 32) if make in (AlexNet, LeNet) else (3, 12, 12)


@pytest.mark.parametrize("make", [PreActResNet18, torchvision_network])  # the others are trained above
def test_networks_train_with_projection_and_merge(make):
    torch.manual_seed(0)
    merge = BecameMergePlugin()
    benchmark = blobs(n_tasks=2, samples=4, shape=shape_for(make))
    strategy = naive(make(), [GPMPlugin(n_samples=2), merge], train_epochs=1, train_mb_size=4)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    strategy.eval(benchmark.test_stream)
    assert 0 <= merge.merges[0].coefficient <= 1


@pytest.mark.parametrize("make", [AlexNet, LeNet, PreActResNet18])
def test_only_the_heads_of_a_batch_are_computed(make):
    strategy = naive(make(), train_epochs=1, train_mb_size=8)
    benchmark = blobs(n_tasks=3, samples=8, shape=shape_for(make))
    strategy.eval(benchmark.test_stream)  # adds all heads
    called = []
    for name, head in strategy.model.classifier.classifiers.items():
        head.register_forward_hook(lambda *_, name=name: called.append(name))
    x = torch.zeros(4, *shape_for(make))
    strategy.model(x, torch.tensor([2, 0, 2, 0]))
    assert sorted(called) == ["0", "2"]


@pytest.mark.parametrize("make", [AlexNet, LeNet, ReducedResNet18])
def test_feature_maps_are_channels_last_in_training_and_in_copies(make):
    """Pooling and normalisation are faster in this format. A single module that breaks it would undo the gain."""
    size = 84 if make is ReducedResNet18 else 32
    model = deepcopy(make())
    kept = []
    for layer in model.features.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_hook(
                lambda _, __, y: kept.append(y.is_contiguous(memory_format=torch.channels_last))
            )
    model.features(torch.randn(2, 3, size, size))
    assert kept
    assert all(kept)

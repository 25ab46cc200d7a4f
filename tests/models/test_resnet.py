import importlib.util
import json
from pathlib import Path

import pytest
import torch
from torch import nn

from became_avalanche import GPMPlugin, ReducedResNet18
from tests.helpers import blobs, naive

ROOT = Path(__file__).parents[2]
LAYERS = [  # name, channels in, d, stride; the stride of the first is that for 84 x 84
    ("conv1", 3, 27, 2),
    ("layer1.0.conv1", 20, 180, 1),
    ("layer1.0.conv2", 20, 180, 1),
    ("layer1.1.conv1", 20, 180, 1),
    ("layer1.1.conv2", 20, 180, 1),
    ("layer2.0.conv1", 20, 180, 2),
    ("layer2.0.conv2", 40, 360, 1),
    ("layer2.0.downsample.0", 20, 20, 2),
    ("layer2.1.conv1", 40, 360, 1),
    ("layer2.1.conv2", 40, 360, 1),
    ("layer3.0.conv1", 40, 360, 2),
    ("layer3.0.conv2", 80, 720, 1),
    ("layer3.0.downsample.0", 40, 40, 2),
    ("layer3.1.conv1", 80, 720, 1),
    ("layer3.1.conv2", 80, 720, 1),
    ("layer4.0.conv1", 80, 720, 2),
    ("layer4.0.conv2", 160, 1440, 1),
    ("layer4.0.downsample.0", 80, 80, 2),
    ("layer4.1.conv1", 160, 1440, 1),
    ("layer4.1.conv2", 160, 1440, 1),
]


def convolutions(model):
    return [(name, layer) for name, layer in model.features.named_modules() if isinstance(layer, nn.Conv2d)]


def test_layers_are_those_of_the_papers():
    found = [
        (name, conv.in_channels, conv.weight[0].numel(), conv.stride[0])
        for name, conv in convolutions(ReducedResNet18())
    ]
    assert found == LAYERS
    for name, conv in convolutions(ReducedResNet18()):
        assert conv.bias is None
        assert (conv.kernel_size, conv.padding) == (((1, 1), (0, 0)) if "downsample" in name else ((3, 3), (1, 1)))


def test_small_images_are_not_halved_by_the_first_convolution():
    strides = [conv.stride[0] for _, conv in convolutions(ReducedResNet18(image_size=32))]
    assert strides == [1] + [stride for *_, stride in LAYERS[1:]]


@pytest.mark.parametrize(("image_size", "sides"), [(84, [42, 42, 21, 11, 6]), (32, [32, 32, 16, 8, 4])])
def test_maps_have_the_sizes_of_the_papers(image_size, sides):
    x, seen = torch.randn(2, 3, image_size, image_size), []
    for name, module in ReducedResNet18(image_size).features.named_children():
        x = module(x)
        if name == "conv1" or name.startswith("layer"):
            seen.append(x.shape[-1])
    assert seen == sides


def test_numbers_of_parameters_are_those_of_the_papers():
    parameters = list(ReducedResNet18().features.parameters())
    assert sum(p.numel() for p in parameters if p.dim() == 4) == 1_090_140
    assert sum(p.numel() for p in parameters if p.dim() == 1) == 3_000


@pytest.mark.parametrize(
    ("image_size", "width", "features"),
    [(84, 20, 1440), (32, 20, 640), (64, 20, 640), (33, 4, 32), (9, 4, 32), (31, 4, 128), (97, 4, 288)],
)
def test_heads_get_the_features_that_there_are(image_size, width, features):
    model = ReducedResNet18(image_size, width)
    assert model.features(torch.randn(2, 3, image_size, image_size)).shape == (2, features)
    assert model.classifier.in_features == features


def test_each_sample_has_the_logits_of_the_head_of_its_task():
    model = ReducedResNet18(image_size=9, width=2)
    for experience in blobs(n_tasks=3, classes=5, samples=10, shape=(3, 9, 9)).train_stream:
        model.train()
        for module in (model, model.classifier):
            module.adaptation(experience)
    x, labels = torch.randn(6, 3, 9, 9), torch.tensor([0, 1, 2, 2, 1, 0])
    logits = model(x, labels)
    assert logits.shape == (6, 5)
    for row, features, label in zip(logits, model.features(x), labels.tolist(), strict=True):
        torch.testing.assert_close(row, model.classifier.classifiers[str(label)](features))


def test_a_batch_is_normalised_by_itself_at_evaluation_too():
    model, x = ReducedResNet18(image_size=9, width=2), torch.randn(4, 3, 9, 9)
    training = model.train().features(x)
    assert torch.equal(model.eval().features(x), training)
    assert not any("running" in name for name in model.state_dict())


@pytest.mark.parametrize(("options", "message"), [({"image_size": 8}, "at least 9.*got 8"), ({"width": 0}, "got 0")])
def test_impossible_sizes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ReducedResNet18(**options)


def test_gpm_protects_all_convolutions_and_nothing_else():
    benchmark, plugin = blobs(n_tasks=2, samples=4, shape=(3, 32, 32)), GPMPlugin(n_samples=2, strict=True)
    strategy = naive(ReducedResNet18(image_size=32), [plugin], train_epochs=1, train_mb_size=2)
    for experience in benchmark.train_stream:
        strategy.train(experience)
    sides = {name: memory["basis"].shape[1] for name, memory in plugin.memory.items()}
    assert sides == {f"features.{name}.weight": d for name, _, d, _ in LAYERS}


# ---------------------------------------------------------------------------------------------- docs/memory.md


@pytest.fixture(scope="module")
def memory():
    spec = importlib.util.spec_from_file_location("memory", ROOT / "experiments" / "memory.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def record():
    return json.loads((ROOT / "experiments" / "results" / "memory.json").read_text())


def test_table_in_the_docs_is_that_of_the_recorded_results(memory, record):
    assert memory.table(record) in (ROOT / "docs" / "memory.md").read_text()
    assert tuple(record["methods"]) == memory.METHODS
    assert record["settings"] == memory.SETTINGS


def test_no_method_holds_more_than_it_can(record):
    for method, run in [*record["methods"].items(), *record["low rate"].items()]:
        assert run["stages"][0] <= run["at_most"], method
        assert sum(run["parts"].values()) == sum(run["stages"]), method

import pytest
import torch

from became_avalanche import AlexNet


def count(parameters):
    return sum(parameter.numel() for parameter in parameters)


def test_layers_and_sizes_are_those_of_the_papers():
    model = AlexNet()
    shapes = [tuple(p.shape) for name, p in model.named_parameters() if p.dim() > 1 and name.startswith("features")]
    assert shapes == [(64, 3, 4, 4), (128, 64, 3, 3), (256, 128, 2, 2), (2048, 1024), (2048, 2048)]
    normalised = 64 + 128 + 256 + 2048 + 2048
    assert count(model.features.parameters()) == sum(torch.Size(s).numel() for s in shapes) + 2 * normalised
    maps = []
    for layer in model.features:
        if isinstance(layer, torch.nn.Conv2d):
            layer.register_forward_hook(lambda _, __, output: maps.append(tuple(output.shape[2:])))
    assert model.features(torch.zeros(2, 3, 32, 32)).shape == (2, 2048)
    assert maps == [(29, 29), (12, 12), (5, 5)]


@pytest.mark.parametrize("running", [False, True])
def test_with_running_statistics_samples_do_not_depend_on_each_other(running):
    torch.manual_seed(0)
    model = AlexNet(running_statistics=running)
    model.features(torch.randn(8, 3, 32, 32))
    model.eval()
    x = torch.randn(4, 3, 32, 32)
    together, apart = model.features(x), model.features(x[[0, 1, 1, 1]])
    assert torch.allclose(together[0], apart[0], atol=1e-5) == running


def papers_order(features):
    """The same modules with each ReLU right after its normalisation."""
    modules = list(features)
    for start in (0, 5, 10):
        weights, norm, dropout, pool, relu = modules[start : start + 5]
        modules[start : start + 5] = [weights, norm, relu, dropout, pool]
    return torch.nn.Sequential(*modules)


def test_values_and_gradients_are_those_of_the_papers_order():
    torch.manual_seed(0)
    model, x = AlexNet(), torch.randn(4, 3, 32, 32)
    results = []
    for features in (model.features, papers_order(model.features)):
        torch.manual_seed(1)
        y = features(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), list(model.features.parameters()))))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)

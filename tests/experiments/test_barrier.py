import pytest
import torch

from became_avalanche import LeNet, PathScan
from became_avalanche.models.lrn import LocalResponseNorm
from experiments import barrier
from experiments.barrier import VARIANTS, BatchNormLeNet, CentredLeNet, table


def scan(loss, accuracy):
    return PathScan(t=2, coefficients=[0, 0.5, 1], loss=loss, accuracy=accuracy, chosen=0.25, plasticity=1)


def test_a_barrier_is_the_rise_above_the_straight_line_between_both_ends():
    old, accuracy = [1.0, 2.0, 3.0], [[0.9, 0.8, 0.1], [0.6, 0.4, 0.8]]
    assert barrier.barrier(scan([old, [2.0, 3.0, 1.0]], accuracy)) == pytest.approx(3.0 - (2.0 + 1.0) / 2)
    assert barrier.barrier(scan([old, [2.0, 1.0, 1.0]], accuracy)) == 0
    line = table({"right-images.seed2": scan([old, [2.0, 3.0, 1.0]], accuracy)}).splitlines()[-1]
    assert line == "| right images | 2 | 0.25 | 60.0 | 50.0 | 80.0 | 1.50 | 90.0 | 85.0 |"


def test_variants_of_lenet_change_one_layer():
    x, plain, centred = torch.rand(2, 3, 32, 32), LeNet(head_bias=False), CentredLeNet(head_bias=False)
    for own, other in zip(centred.parameters(), plain.parameters(), strict=True):
        own.data.copy_(other)
    torch.testing.assert_close(centred.features(x), plain.features(x - 0.478))
    normalised = BatchNormLeNet(head_bias=False)
    assert normalised.features(x).shape == (2, 500)
    assert not any(isinstance(layer, LocalResponseNorm) for layer in normalised.modules())


def test_variants_differ_in_one_setting():
    specs = {name: variant(1).completed().model_dump() for name, variant in VARIANTS.items()}
    for name, spec in specs.items():
        other = specs["preset" if name == "plain-heads" else "plain-heads"]
        changed = {key for key in spec if spec[key] != other[key]} - {"benchmark"}
        assert len(changed) == 1, name
        assert name not in ("preset", "plain-heads") or changed == {"network"}


def test_the_figure_shows_the_path_with_and_without_the_published_heads():
    own = scan([[1.0, 2.0, 3.0]] * 2, [[0.9, 0.8, 0.1]] * 2)
    figure = barrier.draw({f"{name}.seed0": own for name in VARIANTS})
    assert [axes.get_title() for axes in figure.axes] == ["plain heads", "preset"]

import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from became_avalanche import LaterTaskLR, NSCLPlugin, NSCLRecipe, PlateauPlugin, Recipe, find_benchmark, train
from became_avalanche.benchmarks import cifar, five, imagenet
from became_avalanche.benchmarks.tensors import image_stream, normalise
from became_avalanche.runs import catalogue
from became_avalanche.runs.catalogue import BENCHMARKS, GPM_FAMILY, NSCL_FAMILY, SOURCES, untuned
from became_avalanche.runs.compare import Comparison
from became_avalanche.runs.describe import describe_source, list_presets, show_preset
from became_avalanche.runs.figures import comparison_figure
from became_avalanche.runs.methods import make_plugins
from became_avalanche.runs.presets import BenchmarkPreset
from tests.helpers import Spy, blobs, convnet, mlp

TABLE = """
          10-split-cifar100                 20-split-miniimagenet
          gpm     trgp    sgp     gpcns     gpm     trgp    sgp     gpcns
lr        0.01    0.01    0.05    0.05      0.1     0.1     0.1     0.1
lr_min    1e-5    1e-5    5e-5    5e-5      1e-3    1e-3    1e-3    1e-3
patience  6       6       6       6         5       5       5       5
factor    2       2       2       2         3       3       3       3
epochs    200     200     200     200       10      100     10      200
batch     64      64      64      64        10      64      10      64
eps       0.97    0.97    0.97    0.97      0.985   0.985   0.985   0.98
increment 3e-3    3e-3    3e-3    3e-3      3e-4    3e-4    3e-4    1e-3
alpha     -       -       10      5         -       -       1       3
"""
"""The paper's table of hyperparameters, as it is printed."""


def row(preset, method):
    recipe, (plugin,) = preset.recipe_of(method), make_plugins(method, preset.strengths)
    return {
        "lr": recipe.learning_rate,
        "lr_min": recipe.lr_min,
        "patience": recipe.patience,
        "factor": recipe.factor,
        "epochs": recipe.epochs,
        "batch": recipe.batch_size,
        "eps": plugin.threshold,
        "increment": plugin.increment,
        "alpha": getattr(plugin, "alpha", None),
    }


def test_presets_are_the_cells_of_the_table():
    benchmarks, methods, *lines = [line.split() for line in TABLE.strip().splitlines()]
    for k, method in enumerate(methods):
        expected = {name: None if values[k] == "-" else float(values[k]) for name, *values in lines}
        for name in ("10-split-cifar100", "20-split-cifar100") if k < 4 else ("20-split-miniimagenet",):
            assert row(BENCHMARKS[name], method) == expected
    assert benchmarks == ["10-split-cifar100", "20-split-miniimagenet"]


def test_presets_of_the_further_benchmarks():
    for method, alpha in {"gpm": None, "trgp": None, "sgp": 3, "gpcns": 4.5}.items():
        expected = {"lr": 0.01, "lr_min": 1e-5, "patience": 6, "factor": 2, "epochs": 50, "batch": 64}
        expected |= {"eps": 0.98, "increment": 0.001, "alpha": alpha}
        assert row(BENCHMARKS["cifar100-superclass"], method) == expected
        values = row(BENCHMARKS["5-datasets"], method)
        expected = {"lr": 0.1, "lr_min": 1e-3, "patience": 5, "factor": 3, "epochs": 100, "batch": 64}
        assert {name: values[name] for name in expected} == expected
        assert (values["eps"], values["increment"]) == (0.965, 0)
    for name in ("10-split-cifar100", "20-split-miniimagenet", "5-datasets"):
        (trgp,) = make_plugins("trgp", BENCHMARKS[name].strengths)
        assert (trgp.trust_threshold, trgp.top_k) == (0.5, 2)
        assert trgp.n_samples == (125 if name == "10-split-cifar100" else 100)


@pytest.mark.parametrize(
    ("name", "a", "batch"),
    [("10-split-cifar100-nscl", 10, 32), ("20-split-cifar100-nscl", 30, 16), ("25-split-tinyimagenet", 10, 16)],
)
def test_presets_of_nscl(name, a, batch):
    preset = BENCHMARKS[name]
    plugin = make_plugins("nscl", preset.strengths)[0]
    assert isinstance(plugin, NSCLPlugin)
    assert (plugin.a, plugin.coefficient, plugin.reference) == (a, 100, True)
    recipe = preset.recipe_of("connector+became")
    assert recipe == NSCLRecipe(batch)
    assert (recipe.epochs, recipe.patience, recipe.factor, recipe.plateaus) == (80, 3, 2, 3)
    assert preset.stream.keywords == {"protocol": "nscl"}


def test_recipes_make_optimizer_and_schedule():
    sgd = Recipe(0.3, 10, 5, 2, 4, 0.01)
    assert isinstance(sgd.optimizer(mlp()), torch.optim.SGD)
    (plateau,) = sgd.plugins()
    assert isinstance(plateau, PlateauPlugin)
    assert (plateau.patience, plateau.factor, plateau.lr_min) == (2, 4, 0.01)
    nscl = NSCLRecipe(8)
    groups = nscl.optimizer(convnet()).param_groups
    assert [(group["lr"], group["weight_decay"]) for group in groups] == [(1e-4, 5e-5), (1e-3, 0), (5e-4, 5e-5)]
    later, plateau = nscl.plugins()
    assert isinstance(later, LaterTaskLR)
    assert later.rate == 5e-5
    assert (plateau.patience, plateau.factor, plateau.plateaus) == (3, 2, 3)


def without_validation(seed):
    tasks = [(x[:, :2], y) for x, y in (images(30, 6, 2, k + 10 * seed) for k in range(3))]
    return image_stream(tasks, tasks, [normalise((0.5, 0.5), (0.2, 0.2))] * 3, seed, protocol="nscl")


def test_the_nscl_recipe_trains_without_validation_data():
    rates = []
    preset = BenchmarkPreset(
        "without", without_validation, 3, convnet, NSCLRecipe(10, epochs=3, patience=1, plateaus=1), {"nscl": 10}
    )
    spy = Spy(before_training_epoch=lambda s: rates.append([group["lr"] for group in s.optimizer.param_groups]))
    result = train(preset, "nscl+became", plugins=[spy])
    assert result.valid_acc is None
    assert result.acc > 0
    assert rates[0] == [1e-4, 1e-3, 5e-4]
    assert rates[-1] == [5e-5, 1e-3, 5e-4]


# ------------------------------------------------------------------------------------------------------------- scaling


def test_a_preset_is_scaled_to_a_budget_and_says_so():
    preset = find_benchmark("20-split-miniimagenet")
    small = preset.scaled(tasks=3, epochs=20)
    assert small.n_tasks == 3
    assert [small.recipe_of(method).epochs for method in ("gpm", "trgp", "gpcns", "finetune")] == [10, 20, 20, 10]
    assert small.title == (
        "20-split-miniimagenet, scaled down to 3 of 20 tasks, at most 20 instead of 200 epochs a stage"
    )
    assert preset.scaled() == preset
    assert preset.scaled(20, 200).budget == ""
    assert small.scaled(epochs=5).budget.endswith("a stage, at most 5 instead of 20 epochs a stage")
    for tasks, epochs, message in ((21, None, "choose between 1 and 20, not 21"), (0, 1, "not 0"), (1, 0, "got 0")):
        with pytest.raises(ValueError, match=message):
            preset.scaled(tasks, epochs)


def test_results_of_a_scaled_preset_say_so(tmp_path):
    preset = replace(
        BENCHMARKS["split-digits"], stream=lambda seed: blobs(seed=seed, samples=30), n_tasks=3, model=mlp
    ).scaled(tasks=2, epochs=3)
    result = train(preset, "gpm")
    assert result.budget == "2 of 3 tasks, at most 3 instead of 50 epochs a stage"
    assert len(result.accuracy) == 2
    assert max(map(max, result.epochs)) <= 3
    comparison = Comparison(preset, ["gpm"], 1, tmp_path)
    comparison.run(lambda method, seed: result)
    kept = json.loads((tmp_path / "results.json").read_text())
    assert kept["settings"]["budget"] == kept["runs"][0]["budget"] == result.budget
    titles = [part.get_suptitle() for part in comparison_figure(comparison).subfigs]
    assert any(preset.title in title for title in titles)


def test_settings_of_a_comparison_hold_the_recipes_that_it_uses(tmp_path):
    preset = BENCHMARKS["10-split-cifar100"]
    settings = Comparison(preset, ["sgp+became", "ewc"], 1, tmp_path).settings
    assert settings["recipes"] == {"sgp": asdict(preset.recipes["sgp"])}
    assert settings["strengths"] == {"ewc": 1000, "sgp": {"threshold": 0.97, "increment": 0.003, "alpha": 10}}
    json.dumps(settings)


# ---------------------------------------------------------------------------------------------------------------- data


def test_data_that_no_folder_was_named_for():
    with pytest.raises(ValueError, match=r"5-datasets needs CIFAR-10, MNIST, .* on disk; say in which folder"):
        train("5-datasets", "gpm")


def test_orders_change_with_the_seed(monkeypatch):
    calls = []
    monkeypatch.setattr(catalogue, "cifar100_superclass", lambda order, seed, **options: calls.append((order, seed)))
    monkeypatch.setattr(catalogue, "five_datasets", lambda order, seed, **options: calls.append((tuple(order), seed)))
    for seed in (0, 6):
        BENCHMARKS["cifar100-superclass"].at("data").open(seed)
        BENCHMARKS["5-datasets"].at("data").open(seed)
    assert calls[:3] == [(0, 0), (("cifar10", "mnist", "svhn", "fashion-mnist", "notmnist"), 0), (1, 6)]
    assert calls[3][0] != calls[1][0]
    assert sorted(calls[3][0]) == sorted(calls[1][0])


def test_presets_as_text():
    listed = list_presets(BENCHMARKS.values())
    assert all(name in listed for name in BENCHMARKS)
    shown = show_preset(BENCHMARKS["20-split-cifar100-nscl"])
    assert "split_cifar100(20, protocol='nscl')" in shown
    assert "nscl: a 30, coefficient 100, reference True" in shown
    assert "ewc: 1000 (not chosen for this benchmark)" in shown
    shown = show_preset(BENCHMARKS["10-split-cifar100"])
    assert "sgp: learning_rate 0.05, batch_size 64, epochs 200, patience 6, factor 2, lr_min 5e-05" in shown
    assert "(not chosen" not in show_preset(BENCHMARKS["split-digits"])
    assert untuned(BENCHMARKS["10-split-cifar100"]) == {"ewc", "si", "lwf", "agem", "er", "owm"}
    assert untuned(BENCHMARKS["permuted-digits"]) == set()


def test_data_sets_as_text(tmp_path):
    assert len(SOURCES) == 8
    texts = {source.name: describe_source(source, tmp_path) for source in SOURCES}
    assert all(text.startswith(f"{name}: missing\n") for name, text in texts.items())
    assert "is downloaded when it is needed, or get cifar-100-python.tar.gz from https" in texts["CIFAR-100"]
    assert "downloaded" not in texts["notMNIST"]
    for member in five.MEMBERS.values():
        place = tmp_path / member.source.folder
        place.mkdir(parents=True)
        assert describe_source(member.source, tmp_path).startswith(f"{member.source.name}: damaged\n  {place}")


def test_a_data_set_that_is_there(tmp_path):
    source = replace(cifar.CIFAR_100, check=lambda place: 7)
    (tmp_path / "cifar-100-python").mkdir()
    (tmp_path / "cifar-100-python" / "train").write_bytes(bytes(2_000_000))
    expected = f"CIFAR-100: found\n  {tmp_path / 'cifar-100-python'}, 2 MB, 7 training images"
    assert describe_source(source, tmp_path) == expected


# ----------------------------------------------------------------------------------------------------- all of them


def images(n, size, classes, seed):
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % classes
    x = torch.randint(256, (n, 3, size, size), generator=generator, dtype=torch.uint8)
    x[:, 0, : size // 2] = (20 * y.reshape(-1, 1, 1)).to(torch.uint8)
    return x, y


def few(parts, per_class):
    """The first images of each class, of training and test data."""
    chosen = []
    for x, y in parts:
        rows = torch.cat([(y == k).nonzero()[:per_class, 0] for k in sorted(set(y.tolist()))])
        chosen.append((x[rows], y[rows]))
    return tuple(chosen)


@pytest.fixture
def miniature(monkeypatch, tmp_path):
    """A folder of all data sets with a few images of each class: generated ones, as the loaders would return them, or
    real ones of those that are in the folder that the environment variable BECAME_DATA names."""
    root = Path(os.environ.get("BECAME_DATA", tmp_path / "nowhere"))

    def parts(load, source, size, classes, per_class):
        if (place := source.place(root)) is not None:
            return lambda folder: few(load(place), per_class)
        n = classes * per_class
        return lambda folder: (images(n, size, classes, 0), images(n, size, classes, 1))

    def pairs(place, load=cifar._load):
        return tuple((part.images, part.fine) for part in load(place))

    fine = parts(pairs, cifar.CIFAR_100, 32, 100, 8)
    monkeypatch.setattr(cifar, "_load", lambda folder: tuple(cifar._Part(x, y, y // 5) for x, y in fine(folder)))
    monkeypatch.setattr(imagenet, "_tiny", parts(imagenet._tiny, imagenet.TINY_IMAGENET, 64, 200, 5))
    monkeypatch.setattr(imagenet, "_mini", parts(imagenet._mini, imagenet.MINI_IMAGENET, 84, 100, 8))
    small = {name: m._replace(load=parts(m.load, m.source, 32, 10, 4)) for name, m in five.MEMBERS.items()}
    monkeypatch.setattr(five, "MEMBERS", small)
    for source in SOURCES:
        (tmp_path / source.folder).mkdir(parents=True)
    return tmp_path


CELLS = [
    *((preset.name, method) for preset in GPM_FAMILY for method in preset.recipes),
    *((preset.name, "nscl") for preset in NSCL_FAMILY),
    ("10-split-cifar100-nscl", "connector"),
    ("10-split-cifar100-cpu", "gpm"),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "method"), CELLS)
def test_every_preset_trains_for_two_tasks(name, method, miniature):
    preset = find_benchmark(name).scaled(tasks=2, epochs=2).at(miniature)
    result = train(preset, f"{method}+became", seed=1)
    assert len(result.accuracy) == 2
    assert len(result.merges) == 1
    assert 0 <= result.merges[0].coefficient <= 1
    assert [len(stages) for stages in result.epochs] == [1, 2]

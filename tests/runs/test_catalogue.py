import json
import os
from pathlib import Path

import pytest
import torch

from became_avalanche import LaterTaskLR, NSCLPlugin, NSCLRecipe, PlateauPlugin, Recipe, train
from became_avalanche.benchmarks import cifar, five, imagenet, orders
from became_avalanche.plugins.merge import REFERENCE
from became_avalanche.runs.catalogue import BENCHMARKS, EMBEDDED, GPM_FAMILY, NSCL_FAMILY
from became_avalanche.runs.components import NETWORKS, STREAMS, find
from became_avalanche.runs.describe import all_sources
from became_avalanche.runs.method import BASES, Method, known_names
from became_avalanche.runs.session import open_stream
from tests.helpers import convnet, mlp
from tests.runs.components import images

ROOT = Path(__file__).parents[2]
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


def cell(name, method):
    """The hyperparameters that a run is actually created with."""
    spec = BENCHMARKS[name].spec(method)
    recipe, (plugin,) = spec.effective_recipe, spec.method.make_plugins()
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


def test_benchmarks_are_the_cells_of_the_table():
    benchmarks, methods, *lines = [line.split() for line in TABLE.strip().splitlines()]
    assert benchmarks == ["10-split-cifar100", "20-split-miniimagenet"]
    for k, method in enumerate(methods):
        expected = {name: None if values[k] == "-" else float(values[k]) for name, *values in lines}
        for name in ("10-split-cifar100", "20-split-cifar100") if k < 4 else ("20-split-miniimagenet",):
            assert cell(name, method) == expected


def test_the_further_benchmarks_of_the_gpm_family():
    for method, alpha in {"gpm": None, "trgp": None, "sgp": 3, "gpcns": 4.5}.items():
        expected = {"lr": 0.01, "lr_min": 1e-5, "patience": 6, "factor": 2, "epochs": 50, "batch": 64}
        for name in ("cifar100-superclass", "cifar100-superclass-scrambled"):
            assert cell(name, method) == {**expected, "eps": 0.98, "increment": 0.001, "alpha": alpha}
        alpha = {"sgp": 10, "gpcns": 5}.get(method)
        expected = {"lr": 0.1, "lr_min": 1e-3, "patience": 5, "factor": 3, "epochs": 100, "batch": 64}
        assert cell("5-datasets", method) == {**expected, "eps": 0.965, "increment": 0, "alpha": alpha}
    for name in ("10-split-cifar100", "20-split-miniimagenet", "5-datasets"):
        (trgp,) = BENCHMARKS[name].spec("trgp").method.make_plugins()
        assert (trgp.trust_threshold, trgp.top_k) == (0.5, 2)
        assert trgp.n_samples == (125 if name == "10-split-cifar100" else 100)


@pytest.mark.parametrize(
    ("name", "a", "batch"),
    [("10-split-cifar100-nscl", 10, 32), ("20-split-cifar100-nscl", 30, 16), ("25-split-tinyimagenet", 10, 16)],
)
def test_the_nscl_family(name, a, batch):
    spec = BENCHMARKS[name].spec("connector+became")
    plugin = spec.method.make_plugins()[0]
    assert isinstance(plugin, NSCLPlugin)
    assert (plugin.a, plugin.coefficient, plugin.reference) == (a, 100, True)
    assert spec.recipe == NSCLRecipe(batch)
    assert (spec.recipe.epochs, spec.recipe.patience, spec.recipe.factor, spec.recipe.plateaus) == (80, 3, 2, 3)
    assert spec.stream.options == {"protocol": "nscl"}


@pytest.mark.parametrize("benchmark", GPM_FAMILY, ids=lambda benchmark: benchmark.name)
def test_the_gpm_family_merges_as_the_reference_and_has_heads_without_bias(benchmark):
    spec = benchmark.spec("gpm+became")
    *_, merge = spec.method.make_plugins()
    assert merge.fisher == REFERENCE["fisher"]
    assert spec.network.options["head_bias"] is False
    assert spec.network.options.get("kaiming_heads", False) is (spec.network.name == "lenet")
    own = Method.parse("gpm+became", merge={"options": {"reference": False, "fisher": "exact"}})
    *_, merge = benchmark.spec(own).method.make_plugins()
    assert (merge.fisher.name, merge.candidate) == ("exact", "best")
    assert BENCHMARKS["split-digits"].spec("gpm+became").method.merge.options == {}


def test_recipes_make_optimizer_and_schedule():
    sgd = Recipe(0.3, 10, 5, 2, 4, 0.01)
    optimizer = sgd.optimizer(mlp())
    assert type(optimizer) is torch.optim.SGD
    assert optimizer.param_groups[0]["lr"] == 0.3
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


def tuning(name):
    return json.loads((ROOT / "experiments" / "tuning" / f"{name}.json").read_text())


@pytest.mark.parametrize("name", [benchmark.name for benchmark in EMBEDDED])
def test_hyperparameters_are_the_ones_that_were_chosen_on_validation_data(name):
    benchmark, recorded = BENCHMARKS[name], tuning(name)
    assert benchmark.recipe.learning_rate == recorded["learning_rate"]["chosen"]
    assert set(benchmark.hyperparameters) == set(BASES) - {"finetune", "gpm", "connector", "joint"}
    for method, options in benchmark.hyperparameters.items():
        (value,), tried = options.values(), recorded["hyperparameters"][method]["tried"]
        assert value == recorded["hyperparameters"][method]["chosen"]
        assert tried[f"{value:g}" if f"{value:g}" in tried else str(value)] == max(filter(None, tried.values()))
    assert not benchmark.untuned


def test_the_strength_of_ewc_on_cifar100_was_chosen_on_validation_data():
    recorded = tuning("10-split-cifar100-cpu")["hyperparameters"]["ewc"]
    assert BENCHMARKS["10-split-cifar100-cpu"].hyperparameters["ewc"] == {"ewc_lambda": recorded["chosen"]}
    assert recorded["tried"][str(recorded["chosen"])] == max(filter(None, recorded["tried"].values()))
    assert "ewc" not in BENCHMARKS["10-split-cifar100-cpu"].untuned
    assert "ewc" in BENCHMARKS["20-split-cifar100-cpu"].untuned


def test_both_presets_for_a_small_machine_share_network_and_recipe():
    ten, twenty = (BENCHMARKS[f"{n}-split-cifar100-cpu"] for n in (10, 20))
    assert (ten.stream.n_tasks, twenty.stream.n_tasks) == (10, 20)
    assert ten.stream.model_copy(update={"n_tasks": 20}) == twenty.stream
    assert (ten.network, ten.recipe) == (twenty.network, twenty.recipe)


@pytest.mark.parametrize("benchmark", BENCHMARKS.values(), ids=lambda benchmark: benchmark.name)
def test_every_method_can_be_made_on_every_benchmark(benchmark):
    for name in known_names():
        benchmark.spec(name).check()
    assert set(benchmark.hyperparameters) <= set(BASES)
    assert benchmark.untuned <= set(benchmark.hyperparameters)


@pytest.mark.parametrize("registry", [STREAMS, NETWORKS], ids=["streams", "networks"])
def test_registered_names_can_be_imported(registry):
    for name in registry:
        assert find("component", name, registry).__doc__


def test_options_of_a_method_come_before_those_of_the_benchmark():
    benchmark = BENCHMARKS["10-split-cifar100"]
    method = benchmark.spec("sgp").method.model_copy(update={"options": {"alpha": 3}})
    assert benchmark.spec(method).method.options == {"threshold": 0.97, "increment": 0.003, "alpha": 3}
    assert benchmark.spec("sgp").recipe == benchmark.recipes["sgp"] != benchmark.recipe
    assert benchmark.spec("ewc").recipe == benchmark.recipe


def test_epochs_of_each_recipe_within_a_budget():
    benchmark = BENCHMARKS["20-split-miniimagenet"]
    specs = [benchmark.spec(name, n_tasks=3, max_epochs=20) for name in ("gpm", "trgp", "gpcns", "finetune")]
    assert [spec.effective_recipe.epochs for spec in specs] == [10, 20, 20, 10]
    assert {spec.n_tasks for spec in specs} == {3}


def test_the_scrambled_superclasses_differ_in_the_images_only(monkeypatch):
    calls = []
    monkeypatch.setattr(orders, "cifar100_superclass", lambda *args, **options: calls.append((args, options)))
    specs = [BENCHMARKS[f"cifar100-superclass{end}"].spec("gpm+became", 2) for end in ("", "-scrambled")]
    for spec in specs:
        open_stream(spec, "data")
    (args, options), scrambled = calls
    assert scrambled == (args, {**options, "reference": True})
    right, other = (spec.model_dump(exclude={"benchmark", "stream"}) for spec in specs)
    assert right == other


def test_orders_change_with_the_seed(monkeypatch):
    calls = []
    monkeypatch.setattr(orders, "cifar100_superclass", lambda order, seed, **options: calls.append((order, seed)))
    monkeypatch.setattr(orders, "five_datasets", lambda order, seed, **options: calls.append((tuple(order), seed)))
    for seed in (0, 6):
        open_stream(BENCHMARKS["cifar100-superclass"].spec("gpm", seed), "data")
        open_stream(BENCHMARKS["5-datasets"].spec("gpm", seed), "data")
    assert calls[:3] == [(0, 0), (("cifar10", "mnist", "svhn", "fashion-mnist", "notmnist"), 0), (1, 6)]
    assert calls[3][0] != calls[1][0]
    assert sorted(calls[3][0]) == sorted(calls[1][0])


# ------------------------------------------------------------------------------------------------------- all of them


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
    for source in all_sources():
        (tmp_path / source.folder).mkdir(parents=True)
    return tmp_path


CELLS = [
    *((benchmark.name, method) for benchmark in GPM_FAMILY for method in benchmark.recipes),
    *((benchmark.name, "nscl") for benchmark in NSCL_FAMILY),
    ("10-split-cifar100-nscl", "connector"),
    ("10-split-cifar100-cpu", "gpm"),
    ("20-split-cifar100-cpu", "gpm"),
]


@pytest.mark.long
@pytest.mark.parametrize(("name", "method"), CELLS)
def test_every_benchmark_trains_for_two_tasks(name, method, miniature):
    record = train(name, f"{method}+became", seed=1, n_tasks=2, max_epochs=2, dataset_root=miniature)
    assert record.status == "done"
    assert len(record.accuracy["test"]) == 2
    assert len(record.merges) == 1
    assert 0 <= record.merges[0].coefficient <= 1
    assert [len(task.stages) for task in record.tasks] == [1, 2]

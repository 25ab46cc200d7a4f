import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from became_avalanche import train
from became_avalanche.runs.catalogue import BENCHMARKS, EMBEDDED
from became_avalanche.runs.methods import (
    BASELINES,
    COMPARED,
    METHODS,
    PROJECTIONS,
    is_staged,
    make_plugins,
    rivals_of,
    used_strengths,
)
from became_avalanche.runs.presets import Recipe
from tests import oracles
from tests.helpers import Spy, blobs, mlp, weights

QUICK = replace(
    BENCHMARKS["split-digits"],
    stream=lambda seed: blobs(seed=seed, samples=30),
    n_tasks=3,
    model=mlp,
    recipe=Recipe(learning_rate=0.1, batch_size=10, epochs=3, patience=1, factor=2, lr_min=0.05),
)


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning")  # Avalanche's SI
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_its_numbers_are_those_of_the_matrix(method):
    result = train(QUICK, method, seed=1)
    matrix = np.array(result.accuracy, dtype=float)
    assert matrix.shape == (3, 3)
    assert result.acc == pytest.approx(np.mean(matrix[-1]))
    if method == "joint":
        assert result.bwt is None
        assert len(result.epochs) == 1
    else:
        assert result.acc == pytest.approx(oracles.acc(matrix))
        assert result.bwt == pytest.approx(oracles.bwt(matrix))
        assert [len(stages) for stages in result.epochs] == ([1, 2, 2] if is_staged(method) else [1, 1, 1])
    assert all(1 <= epochs <= 3 for stages in result.epochs for epochs in stages)
    assert len(result.merges) == (2 if "+" in method else 0)
    assert result.seconds > 0
    json.dumps(result.accuracy, allow_nan=False)


def test_methods_may_have_recipes_of_their_own():
    preset = replace(QUICK, recipes={"gpm": replace(QUICK.recipe, epochs=1)})
    assert train(preset, "gpm+became").epochs == [[1], [1, 1], [1, 1]]
    assert max(map(max, train(preset, "finetune").epochs)) > 1


@pytest.mark.parametrize("method", ["gpm", "joint"])
def test_a_preset_may_stop_before_the_end_of_the_stream(method):
    result = train(replace(QUICK, n_tasks=2), method)
    assert [[value is not None for value in row] for row in result.accuracy] == (
        [[True, False], [True, True]] if method == "gpm" else [[False, False], [True, True]]
    )


def trained(method, seed):
    final = []
    result = train(QUICK, method, seed, plugins=[Spy(after_training_exp=lambda s: final.append(weights(s.model)))])
    return replace(result, seconds=0, merges=[replace(m, seconds=0) for m in result.merges]), final[-1]


def test_same_seed_gives_the_same_numbers_whatever_ran_before():
    first, weights_then = trained("gpm+became", 3)
    torch.rand(5)
    trained("er", 0)
    again, weights_now = trained("gpm+became", 3)
    assert first == again
    assert all(torch.equal(tensor, weights_now[name]) for name, tensor in weights_then.items())
    other, _ = trained("gpm+became", 4)
    assert other.accuracy != first.accuracy


def test_control_and_baseline_share_the_first_task():
    """Methods differ only from the second task on, so that differences seed by seed mean something."""
    accuracies = {train(QUICK, method, 2).accuracy[0][0] for method in ("finetune", "gpm", "gpm-2x", "gpm+became")}
    assert len(accuracies) == 1


def test_names():
    assert set(COMPARED) <= set(METHODS)
    assert {"finetune-2x", "gpm-2x", "gpm+became", "finetune+became"} <= set(METHODS)
    with pytest.raises(ValueError, match=r"unknown method 'gpm\+becam'; did you mean 'gpm\+became'\?"):
        train(QUICK, "gpm+becam")
    with pytest.raises(ValueError, match=r"unknown benchmark 'split-digit'; did you mean 'split-digits'\?"):
        train("split-digit", "gpm")
    with pytest.raises(ValueError, match="unknown benchmark 'xyz'; there is split-digits, permuted-digits"):
        train("xyz", "gpm")


@pytest.mark.parametrize("name", [preset.name for preset in EMBEDDED])
def test_settings_are_the_ones_that_were_chosen_on_validation_data(name):
    record = json.loads((Path(__file__).parents[2] / "experiments" / "tuning" / f"{name}.json").read_text())
    preset = BENCHMARKS[name]
    assert preset.recipe.learning_rate == record["learning_rate"]["chosen"]
    assert set(preset.strengths) == {*BASELINES, *PROJECTIONS} - {"finetune", "gpm"}
    for method, strength in preset.strengths.items():
        tried = record["strengths"][method]["tried"]
        assert strength == record["strengths"][method]["chosen"]
        assert tried[f"{strength:g}" if f"{strength:g}" in tried else str(strength)] == max(tried.values())


def test_the_strength_of_ewc_on_cifar100_was_chosen_on_validation_data():
    path = Path(__file__).parents[2] / "experiments" / "tuning" / "10-split-cifar100-cpu.json"
    record = json.loads(path.read_text())["strengths"]["ewc"]
    assert BENCHMARKS["10-split-cifar100-cpu"].strengths["ewc"] == record["chosen"]
    assert record["tried"][str(record["chosen"])] == max(record["tried"].values())


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning")
def test_si_really_does_something_on_the_cpu():
    """Avalanche's own plugin gives the weights of plain training here, whatever its strength."""

    def final(method, strength=0.0):
        states = []
        spy = Spy(after_training_exp=lambda s: states.append(weights(s.model)))
        train(replace(QUICK, strengths={"si": strength}), method, plugins=[spy])
        return states[-1]["features.0.weight"]

    assert not torch.equal(final("si", 1.0), final("finetune"))


def test_the_whole_family_by_name():
    for projection in ("gpm", "sgp", "trgp", "gpcns", "nscl", "owm", "connector"):
        assert {projection, f"{projection}-2x", f"{projection}+became"} <= set(METHODS)
    plugins = {name: [type(plugin).__name__ for plugin in make_plugins(name, {})] for name in METHODS if "co" in name}
    assert plugins["connector"] == ["NSCLPlugin", "ConnectorPlugin"]
    assert plugins["connector+became"] == ["NSCLPlugin", "BecameMergePlugin", "ConnectorPlugin"]
    assert plugins["connector-2x"] == ["NSCLPlugin", "EqualTrainingPlugin"]
    assert make_plugins("owm+became", {"owm": 7})[0].alpha == 7
    assert make_plugins("connector", {"nscl": 7})[0].a == 7
    strengths = {"nscl": 1, "owm": 2, "ewc": 3}
    assert used_strengths(["connector+became", "gpm"], strengths) == {"nscl": 1}
    assert used_strengths(["owm-2x", "ewc"], strengths) == {"owm": 2, "ewc": 3}
    assert is_staged("connector")
    assert rivals_of("connector+became") == ("connector", "nscl-2x")
    assert rivals_of("owm") == ()
    assert rivals_of("finetune+became") == ("finetune",)


def test_strengths_may_be_options_by_name():
    (plugin,) = make_plugins("sgp", {"sgp": {"alpha": 7, "threshold": 0.5, "n_samples": 3}})
    assert (plugin.alpha, plugin.threshold, plugin.n_samples) == (7, 0.5, 3)
    with pytest.raises(ValueError, match="lwf has no strength on this benchmark"):
        make_plugins("lwf", {})


@pytest.mark.parametrize("method", ["sgp+became", "trgp-2x", "gpcns", "nscl+became", "owm", "connector+became"])
def test_family_runs_from_its_name(method):
    result = train(QUICK, method)
    assert 0 <= result.acc <= 1
    assert len(result.merges) == (len(result.accuracy) - 1 if "+" in method else 0)

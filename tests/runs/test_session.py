import math
import re
import subprocess
from dataclasses import replace

import numpy as np
import pytest
import torch

from became_avalanche import METRICS, Method, RunSpec, train
from became_avalanche.runs import trace
from became_avalanche.runs.components import SpecError
from became_avalanche.runs.method import BASES, RULES
from became_avalanche.runs.session import Session, _commit
from tests import oracles
from tests.helpers import Spy, assert_same_weights, batch_of, weights
from tests.runs.components import BLOBS, IMAGES, tiny_blobs

EACH = [
    *BASES,
    *(f"{base}+became" for base, made_of in BASES.items() if made_of.staged),
    *(f"gpm+{rule}" for rule in RULES if rule != "became"),
    *("finetune-2x", "gpm-2x", "trgp-2x"),
]
"""Each base alone and with one rule, and each rule with one base."""


def trained(method="gpm+became", seed=0, benchmark=BLOBS, **fields):
    """The record, and the weights after each task."""
    states = []
    spy = Spy(after_training_exp=lambda strategy: states.append(weights(strategy.model)))
    return train(benchmark.spec(method, seed, **fields), plugins=[spy]), states


def timeless(record):
    """A record without what differs from run to run."""
    content = record.model_dump(exclude={"peak_memory_bytes", "environment"})
    for task in content["tasks"]:
        task.pop("seconds")
        for stage in task["stages"]:
            stage.pop("seconds")
    for merge in content["merges"]:
        merge.pop("seconds")
    return content


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning")  # Avalanche's SI
@pytest.mark.parametrize("name", EACH)
def test_every_method_runs_and_leaves_its_record(name):
    spec = BLOBS.spec(name, seed=1)
    record = train(spec)
    assert (record.status, record.error, record.key, record.method) == ("done", None, spec.key(), name)
    assert RunSpec.model_validate(record.spec) == spec.completed()
    assert record.references == spec.references
    matrices = {stream: np.array(matrix, dtype=float) for stream, matrix in record.accuracy.items()}
    assert {stream: matrix.shape for stream, matrix in matrices.items()} == {"test": (3, 3), "valid": (3, 3)}
    assert METRICS["acc"].of(record) == pytest.approx(np.mean(matrices["test"][-1]))
    assert METRICS["valid_acc"].of(record) == pytest.approx(np.mean(matrices["valid"][-1]))
    if name == "joint":
        assert METRICS["bwt"].of(record) is None
        assert METRICS["aoa"].of(record) is None
        assert len(record.tasks) == 1
    else:
        assert METRICS["acc"].of(record) == pytest.approx(oracles.acc(matrices["test"]))
        assert METRICS["bwt"].of(record) == pytest.approx(oracles.bwt(matrices["test"]))
        n = spec.method.n_stages
        assert [len(task.stages) for task in record.tasks] == [1, n, n]
        assert all(0 <= task.first_epoch_accuracy <= 1 for task in record.tasks)
    assert [merge.t for merge in record.merges] == ([2, 3] if "+" in name else [])
    assert all(0 <= merge.coefficient <= 1 for merge in record.merges)
    for task in record.tasks:
        for stage in task.stages:
            assert 1 <= stage.epochs <= 3
            traces = (stage.training_loss, stage.validation_loss, stage.learning_rate, stage.seconds)
            assert [len(trace) for trace in traces] == [stage.epochs] * 4
            assert all(value > 0 for trace in traces for value in trace)
        seconds = task.seconds
        inside = sum(sum(stage.seconds) for stage in task.stages) + seconds.memory + seconds.fisher + seconds.merge
        assert 0 < inside < seconds.training
        assert seconds.evaluation > 0
        assert (seconds.memory > 0) == bool(task.ranks)
    assert (record.tasks[-1].seconds.fisher > 0) == ("+" in name)
    assert (record.tasks[-1].seconds.merge > 0) == ("+" in name or name == "connector")
    assert record.peak_memory_bytes > 1e7
    assert {"python", "torch", "avalanche-lib"} <= record.environment.keys()
    record.to_json()


def test_ranks_and_memory_are_those_of_the_plugins():
    run = Session(BLOBS.spec("gpm+became"))
    projection, merge = run.method_plugins
    while not run.finished:
        run.step()
        bases = {name: memory["basis"] for name, memory in projection.memory.items()}
        assert bases.keys() == {"features.0.weight", "features.2.weight"}
        assert run.tasks[-1].ranks == {name: basis.shape[-1] for name, basis in bases.items()}
        precision = merge.state_dict()["precision"]
        assert run.tasks[-1].memory_bytes["GPMPlugin"] == sum(4 * basis.numel() for basis in bases.values())
        assert run.tasks[-1].memory_bytes["BecameMergePlugin"] >= sum(4 * value.numel() for value in precision.values())


def test_accuracy_after_the_first_epoch_is_that_of_an_independent_computation():
    """Evaluated by hand on a copy of the model, on the test data of the task in training."""
    measured, stream = [], tiny_blobs(1)

    def after_epoch(strategy):
        task = strategy.experience.current_experience
        if len(measured) == task:  # first epoch of the first stage
            x, y = batch_of(stream.test_stream[task])
            strategy.model.eval()
            with torch.no_grad():
                labels = strategy.model(x, torch.full((len(x),), task)).argmax(-1)
            strategy.model.train()
            measured.append(float((labels == y).float().mean()))

    record = train(BLOBS.spec("gpm+became", seed=1), plugins=[Spy(after_training_epoch=after_epoch)])
    assert [task.first_epoch_accuracy for task in record.tasks] == pytest.approx(measured)
    assert METRICS["aoa"].of(record) == pytest.approx(np.mean(measured[1:]))


@pytest.mark.parametrize(("benchmark", "name"), [(BLOBS, "gpm+became"), (IMAGES, "nscl+became"), (BLOBS, "er")])
def test_measuring_after_the_first_epoch_changes_nothing(benchmark, name, monkeypatch):
    with_pass = trained(name, benchmark=benchmark)
    monkeypatch.setattr(trace, "_accuracy", lambda strategy, dataset: 0.5)
    without = trained(name, benchmark=benchmark)
    assert [task.first_epoch_accuracy for task in without[0].tasks] == [0.5, 0.5, 0.5]
    assert with_pass[0].accuracy == without[0].accuracy
    for one, other in zip(with_pass[1], without[1], strict=True):
        assert_same_weights(one, other)


def test_traces_are_losses_and_rates():
    losses, rates = [], []
    spy = Spy(
        before_training_epoch=lambda s: (rates.append(s.optimizer.param_groups[0]["lr"]), losses.append([])),
        after_training_iteration=lambda s: losses[-1].append((len(s.mb_y), float(s.loss.detach()))),
    )
    record = train(BLOBS.spec("gpm-2x"), plugins=[spy])
    stages = [stage for task in record.tasks for stage in task.stages]
    expected = [sum(n * loss for n, loss in epoch) / sum(n for n, _ in epoch) for epoch in losses]
    assert [loss for stage in stages for loss in stage.training_loss] == pytest.approx(expected)
    assert [rate for stage in stages for rate in stage.learning_rate] == rates


def test_same_seed_gives_the_same_numbers_whatever_ran_before():
    first, weights_then = trained(seed=3)
    torch.rand(5)
    trained("er")
    again, weights_now = trained(seed=3)
    assert timeless(first) == timeless(again)
    for one, other in zip(weights_then, weights_now, strict=True):
        assert_same_weights(one, other)
    assert trained(seed=4)[0].accuracy != first.accuracy


def test_baseline_and_control_share_the_first_task():
    """Methods differ only from the second task on, so that differences seed by seed mean something."""
    first, *others = [trained(name, 2)[1][0] for name in ("finetune", "gpm", "gpm-2x", "gpm+became", "trgp")]
    for other in others:
        assert_same_weights(first, {name: other[name] for name in first})


def test_threads_are_set_for_a_run_and_restored():
    seen = []
    spy = Spy(before_training_exp=lambda s: seen.append(torch.get_num_threads()))
    train(BLOBS.spec("finetune", n_tasks=1, threads=2), plugins=[spy])
    assert (seen, torch.get_num_threads()) == ([2], 1)

    def stop(strategy):
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        train(BLOBS.spec("finetune", n_tasks=1, threads=2), plugins=[Spy(before_training_exp=stop)])
    assert torch.get_num_threads() == 1


def test_methods_may_have_recipes_of_their_own():
    benchmark = replace(BLOBS, recipes={"gpm": replace(BLOBS.recipe, epochs=1)})

    def epochs(name):
        return [[stage.epochs for stage in task.stages] for task in train(benchmark.spec(name)).tasks]

    assert epochs("gpm+became") == [[1], [1, 1], [1, 1]]
    assert max(map(max, epochs("finetune"))) > 1


@pytest.mark.parametrize("name", ["gpm", "joint"])
def test_a_run_may_end_before_the_stream(name):
    record = train(BLOBS.spec(name, n_tasks=2, max_epochs=1))
    assert [[value is not None for value in row] for row in record.accuracy["test"]] == (
        [[True, False], [True, True]] if name == "gpm" else [[False, False], [True, True]]
    )
    assert [stage.epochs for task in record.tasks for stage in task.stages] == ([1, 1] if name == "gpm" else [1])


def test_the_nscl_recipe_trains_without_validation_data():
    rates = []
    spy = Spy(before_training_epoch=lambda s: rates.append([group["lr"] for group in s.optimizer.param_groups]))
    record = train(IMAGES.spec("nscl+became"), plugins=[spy])
    assert record.accuracy.keys() == {"test"}
    assert METRICS["valid_acc"].of(record) is None
    assert METRICS["acc"].of(record) > 0
    assert all(stage.validation_loss == [] for task in record.tasks for stage in task.stages)
    assert rates[0] == [1e-4, 1e-3, 5e-4]
    assert rates[-1] == [5e-5, 1e-3, 5e-4]


@pytest.mark.parametrize("name", ["OwnProjection", "OwnProjection-2x", "OwnProjection+became"])
def test_plugins_of_users_run_by_import_path(name):
    record = train(BLOBS.spec(f"tests.runs.components:{name}"))
    same_as_gpm = train(BLOBS.spec(Method.parse(name.replace("OwnProjection", "gpm"), {"threshold": 0.9})))
    assert record.accuracy == same_as_gpm.accuracy
    assert [merge.coefficient for merge in record.merges] == [merge.coefficient for merge in same_as_gpm.merges]


def test_merges_of_users_are_recorded():
    merge = {"plugin": "tests.runs.components:OwnMerge", "options": {"fisher": {"name": "exact", "n_samples": 8}}}
    record = train(BLOBS.spec(Method.parse("gpm+became", merge=merge)))
    assert [merge.t for merge in record.merges] == [2, 3]
    assert record.spec["method"]["merge"]["options"]["strength"] == 1.0


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept context:DeprecationWarning")
def test_si_really_does_something_on_the_cpu():
    """Avalanche's own plugin gives the weights of plain training here, for every value of its hyperparameter."""
    si, plain = (trained(name)[1][-1]["features.0.weight"] for name in ("si", "finetune"))
    assert not torch.equal(si, plain)


def test_by_name():
    record = train("split-digits", "gpm", seed=1, n_tasks=1, max_epochs=1)
    assert (record.benchmark, record.method, record.seed, len(record.tasks)) == ("split-digits", "gpm", 1, 1)
    assert math.isfinite(METRICS["acc"].of(record))
    assert train("split-digits", Method.parse("gpm", {"threshold": 0.5}), n_tasks=1, max_epochs=1).tasks[0].ranks


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["split-digits", "gpm+becam"], "unknown method 'gpm+becam'; did you mean 'gpm+became'?"),
        (["split-digit"], "unknown benchmark 'split-digit'; did you mean 'split-digits'?"),
        (["xyz"], "unknown benchmark 'xyz'; choose one of: split-digits, permuted-digits"),
        (["split-digits", "gpm", -1], "split-digits: seed must be greater than or equal to 0; got -1"),
        ([BLOBS.spec("gpm"), "sgp"], "a RunSpec already holds method, seed, n_tasks, max_epochs, device and threads"),
        (["split-digits", Method.parse("gpm", {"alpha": 1})], "split-digits, gpm: gpm has no option 'alpha' (given 1)"),
        (["5-datasets"], "5-datasets reads data sets from disk; pass their folder as dataset_root"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(SpecError) as error:
        train(*arguments)
    assert str(error.value).startswith(message)


def test_the_commit_is_that_of_this_repository_alone(tmp_path):
    git = ["git", "-c", "user.name=somebody", "-c", "user.email=somebody@example.org"]
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    subprocess.run([*git, "-C", tmp_path, "commit", "--quiet", "--allow-empty", "--message", "first"], check=True)
    assert re.fullmatch("[0-9a-f]{40}", _commit(tmp_path)["commit"])
    installed = tmp_path / ".venv" / "site-packages"
    installed.mkdir(parents=True)
    assert _commit(installed) == {}

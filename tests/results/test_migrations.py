import json

import pytest

from became_avalanche.results.metrics import METRICS
from became_avalanche.results.migrations import MIGRATIONS, in_eval_mode
from became_avalanche.results.record import SCHEMA, RecordError, parse_record
from tests.results.records import made_up, make_spec, old_run


def test_every_older_version_has_a_migration():
    assert sorted(MIGRATIONS) == list(range(SCHEMA))


@pytest.mark.parametrize("method", ["finetune", "gpm+became", "joint"])
def test_nothing_of_a_run_is_lost(method):
    old = old_run(method)
    record = parse_record(json.dumps(old))
    assert (record.benchmark, record.method, record.seed) == (old["benchmark"], old["method"], old["seed"])
    assert (record.key, record.label, record.spec) == (old["key"], old["label"], old["spec"])
    assert record.references.model_dump() == old["references"]
    assert record.status == "done"
    assert record.accuracy == {"test": old["accuracy"]}
    assert [[stage.epochs for stage in task.stages] for task in record.tasks] == old["epochs"]
    assert [merge.model_dump() for merge in record.merges] == old["merges"]
    for name in ("acc", "bwt", "valid_acc", "seconds"):
        value = METRICS[name].of(record)
        assert value == old[name] or value == pytest.approx(old[name], rel=0, abs=1e-12), name
    assert parse_record(record.to_json()) == record


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"acc": 0.5}, "the stored acc is 0.5, but the accuracies give "),
        ({"bwt": None}, "the stored bwt is None, but the accuracies give "),
        ({"seed": 7}, "seed is 7 in the results and 0 in the specification"),
        ({"benchmark": "other"}, "benchmark is 'other' in the results"),
        ({"accuracy": [[0.5]]}, "n_tasks is 1 in the results and 3 in the specification"),
        ({"merges": [{"t": 2}]}, "merges.0.coefficient: Field required"),
        ({"epochs": None}, "not iterable"),
    ],
)
def test_a_run_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(RecordError, match=r"^run\.json is corrupt: ") as error:
        parse_record(json.dumps({**old_run("gpm"), **changes}), "run.json")
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("network", "options", "fisher"),
    [
        ("alexnet", {"fisher": "batched"}, {"name": "batched", "mode": "eval"}),
        ("alexnet", {"fisher": "batched-sampled", "reference": False}, {"name": "batched-sampled", "mode": "eval"}),
        ("alexnet", {"fisher": {"n_samples": 100}}, {"n_samples": 100, "mode": "eval"}),
        ("alexnet", {"fisher": {"name": "batched", "mode": "train"}}, {"name": "batched", "mode": "train"}),
        ("alexnet", {"fisher": "exact"}, "exact"),
        ("alexnet", {"fisher": "batched", "reference": True}, "batched"),
        ("my_module:Network", {"fisher": "batched"}, {"name": "batched", "mode": "eval"}),
        ("mlp", {"fisher": "batched"}, "batched"),
        ("single-head-mlp", {"fisher": "batched"}, "batched"),
    ],
)
def test_fisher_information_of_version_1_was_estimated_in_eval_mode(network, options, fisher):
    method = {"base": "gpm", "merge": {"rule": "became", "options": options}}
    record = made_up("gpm+became", 0, spec={**make_spec("gpm+became", 0, network={"name": network}), "method": method})
    old = {**record.model_dump(mode="json"), "schema_version": 1}
    found = parse_record(json.dumps(old)).spec
    assert found["method"]["merge"]["options"] == {**options, "fisher": fisher}
    assert parse_record(record.to_json()).spec == record.spec  # of version 2, so nothing is changed


@pytest.mark.parametrize("merge", [None, {}, {"options": {}}, {"options": None}, "became"])
def test_other_specifications_of_version_1_stay_as_they_are(merge):
    spec = {**make_spec("gpm", 0, network={"name": "alexnet"}), "method": {"base": "gpm", "merge": merge}}
    assert in_eval_mode(spec) == spec


def test_a_run_without_its_spec_is_refused():
    run = old_run("gpm")
    del run["spec"]
    with pytest.raises(RecordError, match="the field 'spec' is missing"):
        parse_record(json.dumps(run))


def test_an_unknown_older_version_is_refused():
    with pytest.raises(RecordError, match="schema version -1, which is unknown"):
        parse_record(json.dumps({**old_run("gpm"), "schema_version": -1}))

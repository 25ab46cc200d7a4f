import json
from dataclasses import replace

import pytest

from became_avalanche import Store, Study
from became_avalanche.runs import catalogue
from became_avalanche.runs.components import SpecError
from became_avalanche.runs.method import COMPARED
from became_avalanche.runs.study import estimate, missing, records_of, status_of
from tests.runs.components import BLOBS, record_of


@pytest.fixture(autouse=True)
def _blobs(monkeypatch):
    monkeypatch.setitem(catalogue.BENCHMARKS, "blobs", BLOBS)
    monkeypatch.setitem(catalogue.BENCHMARKS, "others", replace(BLOBS, name="others"))


def study(*methods, benchmarks=("blobs",), **fields):
    return Study(benchmarks=list(benchmarks), methods=list(methods), **fields)


def read(tmp_path, text):
    path = tmp_path / "my study.toml"
    path.write_text(text)
    return Study.read(path)


# -------------------------------------------------------------------------------------------------------------- files


def test_a_study_is_a_toml_file(tmp_path):
    made = read(
        tmp_path,
        """
        benchmarks = ["blobs", "split-digits"]
        methods = [
            "gpm",
            { name = "sgp", label = "SGP, strict", options = { alpha = 7 } },
            { name = "gpm+became", merge = { options = { epochs = 2, fisher = { name = "exact", n_samples = 9 } } } },
        ]
        seeds = 3
        n_tasks = 2
        max_epochs = 1
        device = "cuda"
        threads = 4
        eval_batch_size = 32
        """,
    )
    assert made.name == "my study"
    assert made.labels() == ["gpm", "SGP, strict", "gpm+became"]
    specs = made.specs()
    assert len(specs) == 2 * 3 * 3
    for spec in specs:
        assert (spec.n_tasks, spec.device, spec.threads, spec.eval_batch_size) == (2, "cuda", 4, 32)
        assert spec.effective_recipe.epochs == 1
    (sgp,) = {spec.method.options["alpha"] for spec in specs if spec.method.base == "sgp"}
    assert sgp == 7
    merge = next(spec.method.make_plugins()[1] for spec in specs if spec.method.merge)
    assert (merge.epochs, merge.fisher.name, merge.fisher.n_samples) == (2, "exact", 9)


@pytest.mark.parametrize(("seeds", "expected"), [("3", [0, 1, 2]), ("[4, 2, 4]", [4, 2]), ("[5]", [5]), ("1", [0])])
def test_seeds_are_a_number_or_a_list(tmp_path, seeds, expected):
    made = read(tmp_path, f'benchmarks = ["blobs"]\nmethods = ["gpm"]\nseeds = {seeds}')
    assert made.seeds == [spec.seed for spec in made.specs()] == expected


def test_a_study_asks_for_joint_training_on_each_prefix_once():
    made = study("gpm", "joint", "gpm+became", seeds=2, n_tasks=2, intransigence=True)
    specs = made.specs()
    joint = [spec for spec in specs if spec.method.joint]
    assert [(spec.seed, spec.n_tasks) for spec in joint] == [(0, 2), (0, 1), (1, 2), (1, 1)]
    assert [spec.method.shown for spec in joint[:2]] == ["joint", "joint on 1 of 2 tasks"]
    assert {spec.key() for spec in study("joint", n_tasks=1).specs()} < {spec.key() for spec in joint}
    assert made.labels() == ["gpm", "joint", "gpm+became"]
    assert study("gpm", intransigence=True).labels() == ["gpm", "joint"]
    assert [spec.n_tasks for spec in study("gpm", intransigence=True).specs() if spec.method.joint] == [1, 2, 3]


def changed(**fields):
    """A valid study with other lines."""
    lines = {"benchmarks": '["blobs"]', "methods": '["gpm"]', **fields}
    return "\n".join(f"{name} = {value}" for name, value in lines.items() if value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("benchmarks = [", "is not valid TOML: "),
        (changed(method='"gpm"'), "unknown field 'method'; did you mean 'methods'?"),
        (
            changed(methods='[{nam = "gpm"}]'),
            "methods[0].name is missing; unknown field 'methods[0].nam'; did you mean",
        ),
        (
            changed(methods='["gpm", {name = "sgp", option = {}}]'),
            "unknown field 'methods[1].option'; did you mean 'options'?",
        ),
        (
            changed(methods='[{name = "gpm+became", merge = {rule = "none"}}]'),
            "unknown field 'methods[0].merge.rule'; choose one of: plugin, options",
        ),
        (
            changed(methods='[{name = "gpm+became", merge = {options = {rule = "none"}}}]'),
            "methods[0].merge.options: the rule is part of the method's name: write +none there",
        ),
        (changed(methods='["gpm", "sgpp"]'), "methods[1]: unknown method 'sgpp'; did you mean 'sgp'?"),
        (changed(methods='["gpm+becam"]'), "methods[0]: unknown method 'gpm+becam'; did you mean 'gpm+became'?"),
        (changed(methods='["er-2x"]'), "methods[0]: er has no second stage: write 'er', without -2x and +<rule>"),
        (changed(methods="[]"), "methods must not be empty"),
        (changed(methods='"gpm"'), "methods must be a list; got 'gpm'"),
        (changed(methods="[3]"), "methods[0] must be a table of fields; got 3"),
        (changed(methods=None), "methods is missing"),
        (
            changed(methods='[{name = "gpm", merge = {options = {fisher = "exact"}}}]'),
            "methods[0]: gpm has settings for a merge but does not merge; name it gpm+<rule>",
        ),
        (
            changed(methods='[{name = "gpm-2x", merge = {}}]'),
            "methods[0]: gpm-2x has settings for a merge but does not merge; name it gpm+<rule>",
        ),
        (
            changed(methods='[{name = "sgp", options = {alpha = inf}}]'),
            "methods[0].options: an option must be a finite",
        ),
        (changed(benchmarks='["blob"]'), "benchmarks: unknown benchmark 'blob'; did you mean 'blobs'?"),
        (changed(benchmarks="[]"), "benchmarks must not be empty"),
        (changed(seeds="-3"), "seeds: the number of seeds must be from 1 to 1000; got -3"),
        (changed(seeds="[0, -1]"), "seeds[1] must be greater than or equal to 0; got -1"),
        (changed(seeds="[]"), "seeds must not be empty"),
        (changed(seeds='"all"'), "seeds must be a list; got 'all'"),
        (changed(n_tasks="0"), "n_tasks must be greater than or equal to 1; got 0"),
        (changed(max_epochs="1.5"), "max_epochs must be an integer, got a number with a fractional part; got 1.5"),
        (changed(threads='"many"'), "threads must be an integer, unable to parse string as an integer; got 'many'"),
        (changed(name='"a/b"'), "name: it is part of file names, so it must have 1 to 100 printable characters and no"),
    ],
)
def test_what_is_wrong_with_a_study(tmp_path, text, message):
    with pytest.raises(SpecError) as error:
        read(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path / 'my study.toml'}")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: study("gpm", n_tasks=4), "blobs: n_tasks must be at most 3, the number of tasks in the stream; got 4"),
        (
            lambda: study("gpm", {"name": "gpm", "options": {"threshold": 0.5}}),
            "two methods with different options are called 'gpm'; give one of them another label",
        ),
        (
            lambda: study("gpm", {"name": "gpm", "label": "mine", "options": {"threshold": 0.97}}),
            "'gpm' and 'mine' are the same run of blobs; remove one",
        ),
        (lambda: study("tests.nowhere:Plugin"), "cannot import the plugin 'tests.nowhere:Plugin': No module named"),
    ],
)
def test_what_is_wrong_with_its_runs(made, message):
    with pytest.raises(SpecError) as error:
        made().specs()
    assert str(error.value).startswith(message)


# --------------------------------------------------------------------------------------------------------------- runs


def names(specs):
    return [spec.method.shown for spec in specs]


def test_pairs_come_first():
    specs = study("ewc", "gpm-2x", "finetune", "gpm+became", "gpm", "finetune+became", "sgp", seeds=2).specs()
    expected = ["gpm-2x", "gpm", "gpm+became", "finetune", "finetune+became", "ewc", "sgp"]
    assert names(specs) == 2 * expected
    assert [spec.seed for spec in specs] == [0] * 7 + [1] * 7


def test_pairs_are_found_under_any_label():
    options = {"options": {"threshold": 0.5}}
    made = study(
        "joint",
        {"name": "gpm+became", "label": "merged", **options},
        "gpm",
        {"name": "gpm", "label": "alone", **options},
    )
    assert names(made.specs()) == ["alone", "merged", "joint", "gpm"]
    assert made.labels() == ["joint", "merged", "gpm", "alone"]


def test_nothing_is_trained_twice():
    made = study("connector-2x", "nscl-2x", "gpm", "gpm", benchmarks=["blobs", "blobs"])
    assert names(made.specs()) == made.labels() == ["nscl-2x", "gpm"]
    assert made.benchmarks == ["blobs"]
    usual = study(*COMPARED, benchmarks=["blobs", "others"], seeds=2).specs()
    assert len({spec.key() for spec in usual}) == len(usual) == 4 * len(COMPARED)


# ------------------------------------------------------------------------------------------------------------- status


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path)


SPECS = {name: BLOBS.spec(name) for name in ("gpm", "sgp", "trgp", "nscl", "owm", "gpcns", "ewc", "er", "lwf")}


def test_status_of_every_kind(store):
    def save(name, *args, **fields):
        folder = store.open(SPECS[name])
        folder.save_record(record_of(SPECS[name], *args, **fields))
        return folder

    save("gpm")
    save("sgp", "diverged", 1, error="Traceback\n  line\nx.y.DivergenceError: nan: no\n")
    save("trgp", "failed", 0, error="Traceback\nValueError: no")
    save("nscl", "running", 2)
    (save("owm", "running", 1).path / "checkpoint-001.safetensors").write_bytes(b"x")
    store.open(SPECS["gpcns"])
    (save("ewc").path / "record.json").write_text("{")
    held = save("er", "running", 1)
    with held.locked():
        statuses = {status.spec.method.name: status for status in status_of(SPECS.values(), store)}
    states = {name: (status.state, status.note) for name, status in statuses.items()}
    assert states["gpm"] == ("done", "")
    assert states["sgp"] == ("diverged", "DivergenceError: nan: no")
    assert states["trgp"] == ("failed", "ValueError: no")
    assert states["nscl"] == ("interrupted", "2 of 3 tasks, restarts from the first task")
    assert states["owm"] == ("interrupted", "1 of 3 tasks, resumes after task 1")
    assert states["gpcns"] == ("interrupted", "")
    assert states["ewc"][0] == "unreadable"
    assert states["ewc"][1].startswith(f"{store.root / SPECS['ewc'].key() / 'record.json'} is corrupt: ")
    assert states["er"][0] == "running"
    assert states["er"][1].startswith("1 of 3 tasks, by process ")
    assert states["lwf"] == ("missing", "")
    again = [spec.method.name for spec in missing(statuses.values())]
    assert again == ["trgp", "nscl", "owm", "gpcns", "er", "lwf"]


def test_looking_changes_nothing(store):
    status_of(SPECS.values(), Store(store.root / "nowhere"))
    assert list(store.root.iterdir()) == []


def test_records_have_the_labels_of_the_study(store):
    spec = study({"name": "gpm", "label": "mine"}).specs()[0]
    store.open(spec).save_record(record_of(BLOBS.spec("gpm")))
    assert [record.label for record in records_of([spec, SPECS["sgp"]], store)] == ["mine"]
    kept = json.loads((store.folder(spec).path / "record.json").read_text())
    assert kept["label"] == "gpm"


# ----------------------------------------------------------------------------------------------------------- estimate


def guess(name, *finished, **fields):
    spec = BLOBS.spec(name, **fields)
    return estimate([spec], finished)[spec.key()]


def test_time_is_estimated_from_the_nearest_finished_runs():
    quick, slow = (record_of(BLOBS.spec("gpm+became", seed), seconds=(seed, 1)) for seed in (1, 3))
    other = record_of(BLOBS.spec("sgp-2x"), seconds=(9, 1))
    assert guess("gpm+became", quick, slow, other) == 3 * (2 + 1)
    assert guess("trgp+became", quick, slow, other) == pytest.approx(3 * (2 + 4 + 10) / 3)
    assert guess("trgp", quick, slow, other) is None
    assert guess("trgp+became", record_of(replace(BLOBS, name="others").spec("trgp+became"))) is None
    assert guess("gpm+became", record_of(BLOBS.spec("gpm+became"), "failed")) is None
    assert guess("gpm+became", quick, n_tasks=2) is None
    assert guess("gpm+became", quick, max_epochs=1) is None


def test_joint_training_is_no_guide_for_others():
    joint, gpm = record_of(BLOBS.spec("joint")), record_of(BLOBS.spec("gpm"))
    assert guess("gpm", joint) is None
    assert guess("joint", gpm) is None
    assert guess("joint", joint, gpm) == 1.5


def test_a_single_task_has_one_stage():
    assert guess("gpm+became", record_of(BLOBS.spec("gpm", n_tasks=1)), n_tasks=1) == 1.5

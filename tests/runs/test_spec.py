import json
import re

import pytest

from became_avalanche import Method
from became_avalanche.runs.catalogue import BENCHMARKS
from became_avalanche.runs.components import SpecError
from became_avalanche.runs.spec import parse_spec, read_spec
from tests.runs.components import BLOBS, IMAGES

DIGITS = BENCHMARKS["split-digits"]
CIFAR = BENCHMARKS["10-split-cifar100-nscl"]


def plain(spec):
    """A specification as plain values, with all defaults."""
    return spec.completed().model_dump(mode="json")


@pytest.mark.parametrize("benchmark", [*BENCHMARKS.values(), BLOBS, IMAGES], ids=lambda benchmark: benchmark.name)
@pytest.mark.parametrize("name", ["finetune", "sgp", "nscl-2x", "connector+became"])
def test_a_file_holds_the_whole_specification(benchmark, name, tmp_path):
    spec = benchmark.spec(name, seed=3, n_tasks=2, max_epochs=1, threads=2)
    again = parse_spec(plain(spec))
    assert again == spec.completed() == again.completed()
    assert again.key() == spec.key()
    (tmp_path / "spec.json").write_text(spec.to_json())
    assert read_spec(tmp_path / "spec.json") == again


def test_files_that_are_no_specification(tmp_path):
    path = tmp_path / "spec.json"
    with pytest.raises(SpecError, match=r"cannot read .*spec\.json: No such file or directory"):
        read_spec(path)
    path.write_text("{")
    with pytest.raises(SpecError, match=r"spec\.json is corrupt: Expecting property name"):
        read_spec(path)
    path.write_text("[]")
    with pytest.raises(SpecError, match=r"spec\.json"):
        read_spec(path)


# --------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize(
    "options",
    [
        {"n_samples": 3, "bias": "free", "alpha": 7},
        {"bias": "free", "n_samples": 3, "alpha": 7.0},
        {"bias": "free", "n_samples": 3, "alpha": 7, "threshold": 0.97, "exclude": ()},
    ],
)
def test_equal_options_have_equal_keys(options):
    key = DIGITS.spec(Method.parse("sgp+became", {"bias": "free", "n_samples": 3, "alpha": 7})).key()
    merge = {"options": {"fisher": "batched", "epochs": None}}
    assert DIGITS.spec(Method.parse("sgp+became", options)).key() == key
    assert DIGITS.spec(Method.parse("sgp+became", options, merge=merge, label="another label")).key() == key


def test_equal_settings_have_equal_keys():
    key = DIGITS.spec("gpm").key()
    assert DIGITS.spec("gpm", n_tasks=5, max_epochs=50, device="cpu", threads=1).key() == key
    with_network = plain(DIGITS.spec("gpm"))
    with_network["network"]["options"] = {"input_size": 64}
    assert parse_spec(with_network).key() == key
    assert BLOBS.spec("connector-2x").key() == BLOBS.spec("nscl-2x").key()


def leaves(value, place=()):
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from leaves(inner, (*place, name))
    else:
        yield place, value


OTHER = {
    "benchmark": "another",
    "stream.name": "permuted-digits",
    "stream.options": {"order": 1},
    "network.name": "lenet",
    "network.options": {"hidden_size": 7},
    "method.base": "trgp",
    "method.options.bias": "free",
    "method.options.exclude": ["x"],
    "method.options.freeze": ["x"],
    "method.merge.plugin": "tests.runs.components:OwnMerge",
    "method.merge.rule": "none",
    "method.merge.options.fisher": "exact",
    "method.label": "a label",
    "recipe.kind": "nscl",
    "device": "cuda",
}
SPEC = plain(DIGITS.spec("gpm+became", n_tasks=2, max_epochs=3))


def another(place, value):
    if place in OTHER:
        return OTHER[place]
    if value is None or isinstance(value, bool):
        return 7 if value is None else not value
    return value + 1 if isinstance(value, int) else 2 * value


@pytest.mark.parametrize("place", [place for place, _ in leaves(SPEC)], ids=".".join)
def test_whatever_decides_a_number_decides_the_key(place):
    content = json.loads(json.dumps(SPEC))
    table = content
    for name in place[:-1]:
        table = table[name]
    table[place[-1]] = another(".".join(place), table[place[-1]])
    if place == ("recipe", "kind"):  # each kind has its own fields
        content["recipe"] = {"kind": "nscl", "batch_size": 64}
    if place == ("method", "control"):
        content["method"]["merge"] = None
    changed = parse_spec(content)
    assert changed != parse_spec(SPEC)
    assert (changed.key() == parse_spec(SPEC).key()) == (place == ("method", "label"))


def test_second_stages_decide_the_key():
    names = ["gpm", "gpm-2x", "gpm+became", "gpm+none", "sgp", "finetune"]
    assert len({BLOBS.spec(name).key() for name in names}) == len(names)


def test_keys_are_names_of_folders():
    spec = BLOBS.spec("tests.runs.components:OwnProjection+became", seed=12)
    assert re.fullmatch(r"blobs\.tests\.runs\.components_OwnProjection\+became\.seed12\.[0-9a-f]{12}", spec.key())


def test_epochs_that_the_recipe_does_not_reach_are_no_limit():
    assert BLOBS.spec("gpm", max_epochs=3) == BLOBS.spec("gpm")
    assert BLOBS.spec("gpm", max_epochs=2).effective_recipe.epochs == 2
    assert BLOBS.spec("gpm").effective_recipe == BLOBS.recipe


# ------------------------------------------------------------------------------------------------------------- errors


def changed(**fields):
    """A valid specification with changed fields; a double underscore separates nested fields."""
    content = json.loads(json.dumps(SPEC))
    for place, value in fields.items():
        *parents, last = place.split("__")
        table = content
        for name in parents:
            table = table[name]
        if value is ...:
            del table[last]
        else:
            table[last] = value
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(sed=1), "unknown field 'sed'; did you mean 'seed'?"),
        (changed(stream__option={}), "unknown field 'stream.option'; did you mean 'options'?"),
        (changed(network__width=3), "unknown field 'network.width'; choose one of: name, options, channels_last"),
        (changed(method__merges={}), "unknown field 'method.merges'; did you mean 'merge'?"),
        (changed(method__merge__rul="x"), "unknown field 'method.merge.rul'; did you mean 'rule'?"),
        (changed(recipe__epoch=3), "unknown field 'recipe.epoch'; did you mean 'epochs'?"),
        (changed(seed=-1), "seed must be greater than or equal to 0; got -1"),
        (changed(seed=2**32), "seed must be less than 4294967296; got 4294967296"),
        (changed(seed="one"), "seed must be an integer, unable to parse string as an integer; got 'one'"),
        (changed(seed=1.5), "seed must be an integer, got a number with a fractional part; got 1.5"),
        (changed(n_tasks=6), "n_tasks must be at most 5, the number of tasks in the stream; got 6"),
        (changed(n_tasks=0), "n_tasks must be greater than or equal to 1; got 0"),
        (changed(n_tasks=...), "n_tasks is missing"),
        (changed(stream="split-digits"), "stream must be a table of fields; got 'split-digits'"),
        (changed(stream__options__seed=1), "stream.options: 'seed' cannot be an option of the stream: the run sets it"),
        (changed(recipe__kind="adam"), "recipe.kind must be one of: sgd, nscl; got 'adam'"),
        (changed(recipe__kind=...), "recipe.kind must be one of: sgd, nscl; got None"),
        (changed(recipe__factor=1), "recipe.factor must be greater than 1; got 1"),
        (changed(recipe__lr_min=float("inf")), "recipe.lr_min must be a finite number; got inf"),
        (changed(method__base="gpmm"), "method: unknown method 'gpmm'; did you mean 'gpm'?"),
        (changed(method__control=True), "method: gpm cannot have both control = true and a merge"),
        (
            changed(method__base="connector", method__control=True, method__merge=None, method__options={}),
            "method: connector already has a second stage; its control is nscl-2x",
        ),
        (changed(method__base="ewc"), "method: ewc has no second stage: write 'ewc', without -2x and +<rule>"),
        (changed(method__merge__rule="becam"), "method.merge.rule: unknown rule 'becam'; did you mean 'became'?"),
        (changed(method__merge__options__rule="none"), "method.merge.options: the rule is part of the method's name"),
        (changed(method__options=[]), "method.options must be a table of fields; got []"),
        (
            changed(method__options__threshold=float("nan")),
            "method.options: an option must be a finite number, a string, true or false, a list or a table; got nan",
        ),
        (changed(seed=-1, threads=0), "seed must be greater than or equal to 0; got -1; threads must be"),
        ([], "it must be a table of fields; got []"),
    ],
)
def test_what_is_wrong_with_a_specification(content, message):
    with pytest.raises(SpecError) as error:
        parse_spec(content, "here")
    assert str(error.value).startswith(f"here: {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (changed(stream__name="split-digit"), "unknown stream 'split-digit'; did you mean 'split-digits'?"),
        (changed(stream__name="tests:x"), "cannot import the stream 'tests:x': module 'tests' has no attribute 'x'"),
        (changed(stream__options={"size": 1}), "the stream split-digits has no option 'size' (given 1); choose one of"),
        (changed(network__name="Lenet"), "unknown network 'Lenet'; did you mean 'lenet'?"),
        (changed(network__options={"wide": 1}), "the network mlp has no option 'wide' (given 1); choose one of: input"),
        (changed(method__options={"alpha": 1}), "gpm has no option 'alpha' (given 1); choose one of: threshold"),
        (changed(method__base="owm", method__options={"alpha": -1}), "alpha must be"),
    ],
)
def test_components_are_looked_for_before_anything_is_trained(content, message):
    with pytest.raises(SpecError) as error:
        parse_spec(content).check()
    assert str(error.value).startswith(f"split-digits, {content['method']['base']}+became: {message}")

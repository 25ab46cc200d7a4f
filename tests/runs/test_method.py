import re

import pytest

from became_avalanche import Fisher, GPMPlugin, Method
from became_avalanche.merging import rules
from became_avalanche.runs.components import SpecError, import_path
from became_avalanche.runs.method import BASES, COMPARED, RULES, MergeSettings, known_names
from tests.runs.components import BLOBS, OwnMerge, OwnProjection

OWN = "tests.runs.components:OwnProjection"


@pytest.mark.parametrize("name", [*known_names(), OWN, f"{OWN}-2x", f"{OWN}+became"])
def test_names_are_parsed_and_given_back(name):
    method = Method.parse(name)
    assert method.name == ("nscl-2x" if name == "connector-2x" else name)
    assert Method.parse(method.name) == method
    assert (method.control, method.merge is not None) == (name.endswith("-2x"), "+" in name)


def test_all_names():
    assert tuple(rules.RULES) == RULES
    assert set(COMPARED) <= set(known_names())
    assert len(set(known_names())) == len(known_names()) == len(BASES) + 8 * (1 + len(RULES))
    assert not {"ewc-2x", "ewc+became", "joint+became"} & set(known_names())


@pytest.mark.parametrize(
    ("name", "baseline", "control", "stages"),
    [
        ("gpm", None, None, 1),
        ("gpm-2x", None, None, 2),
        ("gpm+became", "gpm", "gpm-2x", 2),
        ("sgp+none", "sgp", "sgp-2x", 2),
        ("finetune+became", "finetune", None, 1),
        ("finetune-2x", None, None, 2),
        ("connector", None, None, 2),
        ("connector+became", "connector", "nscl-2x", 2),
        ("joint", None, None, 1),
        (f"{OWN}+became", OWN, f"{OWN}-2x", 2),
    ],
)
def test_what_a_method_is_compared_with(name, baseline, control, stages):
    method = Method.parse(name, {"threshold": 0.5})
    others = (method.baseline, method.equal_training)
    assert tuple(other and other.name for other in others) == (baseline, control)
    assert all(other.options == {"threshold": 0.5} for other in others if other)
    assert method.n_stages == stages


@pytest.mark.parametrize("name", known_names())
def test_references_are_the_keys_of_the_runs_that_a_study_would_make(name):
    spec = BLOBS.spec(name, seed=1, n_tasks=2)
    for key, other in zip(
        (spec.references.baseline, spec.references.control),
        (spec.method.baseline, spec.method.equal_training),
        strict=True,
    ):
        assert key == (other and BLOBS.spec(other.name, seed=1, n_tasks=2).key())


def plugins_of(name, options=None, **fields):
    return Method.parse(name, options, **fields).make_plugins()


@pytest.mark.parametrize(
    ("name", "classes"),
    [
        ("finetune", []),
        ("finetune+became", ["BecameMergePlugin"]),
        ("gpm", ["GPMPlugin"]),
        ("gpm-2x", ["GPMPlugin", "EqualTrainingPlugin"]),
        ("sgp+cofima", ["SGPPlugin", "BecameMergePlugin"]),
        ("trgp", ["TRGPPlugin"]),
        ("gpcns", ["GPCNSPlugin"]),
        ("nscl", ["NSCLPlugin"]),
        ("owm", ["OWMPlugin"]),
        ("connector", ["NSCLPlugin", "ConnectorPlugin"]),
        ("connector+became", ["NSCLPlugin", "BecameMergePlugin", "ConnectorPlugin"]),
        ("connector-2x", ["NSCLPlugin", "EqualTrainingPlugin"]),
        ("ewc", ["EWCPlugin"]),
        ("si", ["SynapticIntelligence"]),
        ("lwf", ["LwF"]),
        ("agem", ["AGEM"]),
        ("er", ["ExperienceReplay"]),
        ("joint", []),
        (OWN, ["OwnProjection"]),
        (f"{OWN}+became", ["OwnProjection", "BecameMergePlugin"]),
        (f"{OWN}-2x", ["OwnProjection", "EqualTrainingPlugin"]),
    ],
)
def test_every_base_makes_its_plugins(name, classes):
    method = BLOBS.spec(name).method
    first, second = method.make_plugins(), method.make_plugins()
    assert [type(plugin).__name__ for plugin in first] == classes
    assert all(one is not other for one, other in zip(first, second, strict=True))


def test_options_reach_the_plugins():
    assert plugins_of("owm+became", {"alpha": 7})[0].alpha == 7
    assert plugins_of("connector", {"a": 7})[0].a == 7
    (plugin,) = plugins_of("sgp", {"alpha": 7, "threshold": 0.5, "n_samples": 3})
    assert (plugin.alpha, plugin.threshold, plugin.n_samples) == (7, 0.5, 3)
    assert plugins_of("gpm+constant")[1].rule is rules.RULES["constant"]
    assert plugins_of("gpm+became", merge={"options": {"fisher": "exact"}})[1].fisher == Fisher("exact")
    table = {"name": "sampled", "n_samples": 7}
    assert plugins_of("gpm+became", merge={"options": {"fisher": table}})[1].fisher == Fisher("sampled", 7)
    merge = plugins_of("gpm+none", merge=MergeSettings(plugin=OwnMerge, options={"strength": 3, "epochs": 2}))[1]
    assert isinstance(merge, OwnMerge)
    assert (merge.strength, merge.epochs, merge.rule) == (3, 2, rules.RULES["none"])


def test_defaults_are_written_out_and_left_out():
    method = Method.parse("gpm+became", {"threshold": 0.97, "n_samples": 5}, merge={"options": {"fisher": "batched"}})
    whole = method.completed()
    assert whole.options["increment"] == 0.003
    assert (whole.options["n_samples"], whole.options["exclude"]) == (5, [])
    assert whole.merge.options == {
        "fisher": "batched",
        "epochs": None,
        "rate": 1.0,
        "candidate": "best",
        "buffers": "merged",
        "new_head": "candidate",
        "own_precision": False,
        "train_own": True,
        "reference": False,
        "keep_last_merge": False,
    }
    assert method.shortened().options == whole.shortened().options == {"n_samples": 5}
    assert whole.shortened().merge.options == {}
    assert Method.parse("gpm", {"exclude": ()}).shortened().options == {}


def test_python_code_may_pass_the_plugin_itself():
    assert Method(base=OwnProjection).base == OWN
    assert Method(base=GPMPlugin, control=True).name == "became_avalanche.plugins.gpm:GPMPlugin-2x"

    class Local(GPMPlugin):
        pass

    with pytest.raises(SpecError, match="cannot be imported by another process; define it at the top level"):
        import_path(Local)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpm+becam", "unknown method 'gpm+becam'; did you mean 'gpm+became'?"),
        ("gpmm", "unknown method 'gpmm'; did you mean 'gpm'?"),
        ("GPM", "unknown method 'GPM'; did you mean 'gpm'?"),
        ("gpm-2x+became", "unknown method 'gpm-2x+became'; did you mean 'gpm+became'?"),
        ("gpm+", "unknown method 'gpm+'; did you mean 'gpm'?"),
        (
            "xyz",
            "unknown method 'xyz'; choose one of: finetune, gpm, sgp, trgp, gpcns, nscl, owm, connector, ewc, si, lwf, "
            "agem, er, joint, alone or with -2x or +<rule>, as in gpm+became; or the import path of a plugin, "
            "module:name",
        ),
        ("ewc+became", "ewc has no second stage: write 'ewc', without -2x and +<rule>"),
        ("joint-2x", "joint has no second stage: write 'joint', without -2x and +<rule>"),
    ],
)
def test_unknown_names(name, message):
    with pytest.raises(SpecError) as error:
        Method.parse(name)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "options", "merge", "message"),
    [
        ("gpm", {"treshold": 1}, None, "gpm has no option 'treshold' (given 1); did you mean 'threshold'?"),
        ("finetune", {"alpha": 1}, None, "finetune has no options; got alpha"),
        ("lwf", {}, None, "lwf needs the option 'alpha'"),
        ("gpm", {"threshold": 2}, None, "threshold must be a fraction of energy between 0 and 1; got 2"),
        ("gpm+became", {}, {"fishr": 1}, "the merge has no option 'fishr' (given 1); did you mean 'fisher'?"),
        (
            "gpm+became",
            {},
            {"fisher": {"n_sample": 1}},
            "the Fisher estimator has no option 'n_sample' (given 1); did you mean 'n_samples'?",
        ),
        (
            "gpm+became",
            {},
            {"fisher": "exat"},
            "unknown Fisher estimator 'exat'; choose one of: batched, batched-sampled, batched-argmax, ",
        ),
        (
            f"{OWN}",
            {"threshold": 0.5, "bias": 1},
            None,
            f"{OWN} has no option 'bias' (given 1); choose one of: threshold",
        ),
        ("tests.nowhere:X", {}, None, "cannot import the plugin 'tests.nowhere:X': No module named 'tests.nowhere'"),
        ("tests.helpers:nothing", {}, None, "cannot import the plugin 'tests.helpers:nothing': module 'tests.helpers'"),
        ("tests.helpers:CONV_SHAPE", {}, None, "the plugin 'tests.helpers:CONV_SHAPE' is not a function or class"),
        ("tests.helpers:mlp", {}, None, "tests.helpers:mlp makes a Network, which is not a SupervisedPlugin"),
    ],
)
def test_wrong_options(name, options, merge, message):
    settings = {} if merge is None else {"merge": {"options": merge}}
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        plugins_of(name, options, **settings)


def test_a_merge_plugin_is_one():
    method = Method.parse("gpm+became", merge={"plugin": "became_avalanche.plugins.control:EqualTrainingPlugin"})
    with pytest.raises(SpecError, match="the merge has no option 'rule'"):
        method.make_plugins()

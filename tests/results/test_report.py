import base64
import hashlib
import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from became_avalanche.results.record import RecordError, StageRecord, TaskRecord
from became_avalanche.results.report import report
from became_avalanche.runs.spec import read_spec
from tests import oracles
from tests.results.records import ROOT, made_up, make_spec, matrix_of
from tests.runs.components import BLOBS, record_of

METHODS = ("finetune", "gpm", "gpm-2x", "gpm+became", "joint")
VOID = {"meta", "input", "br"}


class Page(HTMLParser):
    """The elements of a page with their text and attributes. Checks that all elements are closed in order."""

    def __init__(self, text):
        super().__init__()
        self.elements, self._open = [], []
        self.feed(text)
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        element = (tag, dict(attrs), [])
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        for _, _, text in self._open:
            text.append(data)

    def texts(self, tag, **attributes):
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}.items()
        return [
            " ".join("".join(text).split())
            for name, attrs, text in self.elements
            if name == tag and wanted <= attrs.items()
        ]

    @property
    def data(self):
        (text,) = (text for name, attrs, text in self.elements if attrs.get("id") == "data")
        return json.loads("".join(text))


def study(methods=METHODS, seeds=range(3), **options):
    return [made_up(method, seed, **options) for method in methods for seed in seeds]


def test_methods_with_fewer_seeds_are_not_said_to_have_all():
    (lead,) = Page(report(study()[:-2], "mine")).texts("p", class_="lead")
    assert "with mlp and 1 to 3 seeds: 13 runs." in lead


def test_what_was_compared_and_what_came_out_in_two_sentences():
    (lead,) = Page(report(study(), "mine")).texts("p", class_="lead")
    means = {m: [100 * oracles.acc(matrix_of(m, seed)) for seed in range(3)] for m in METHODS}
    best = max((m for m in METHODS if m != "joint"), key=lambda m: np.mean(means[m]))
    gain = np.mean(np.subtract(means["gpm+became"], means["gpm-2x"]))
    assert lead.startswith(
        "Four methods learned the three tasks of made-up one after the other, and joint training all at once, with mlp "
        "and three seeds each: 15 runs. "
        f"{best} has the highest ACC, {np.mean(means[best]):.2f} ± {np.std(means[best], ddof=1):.2f} %; "
    )
    who = "it" if best == "gpm+became" else "gpm+became"
    assert f"; {who} {'gains' if gain > 0 else 'loses'} {abs(gain):.2f} points " in lead
    assert re.search(r"(over|against) gpm-2x \(95 % interval .* to [^)]*\)\.$", lead)


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        ([0.9, 0.9, 0.9], "gains 30.00 points over gpm-2x (95 % interval +30.00 to +30.00)."),
        ([0.3, 0.3, 0.3], "loses 30.00 points against gpm-2x (95 % interval -30.00 to -30.00)."),
        ([0.5, 0.6, 0.7], "95 % interval -24.84 to +24.84, which includes zero, so this may be chance)."),
        ([0.9], "gains 30.00 points over gpm-2x (a single seed, so this may be chance)."),
    ],
)
def test_the_sentence_says_what_may_be_chance(ours, expected):
    def runs(method, values):
        return [made_up(method, seed, 1, accuracy={"test": [[value]]}) for seed, value in enumerate(values)]

    (lead,) = Page(report([*runs("gpm-2x", [0.6] * len(ours)), *runs("gpm+became", ours)], "x")).texts(
        "p", class_="lead"
    )
    assert expected in lead


def test_table_has_all_methods_with_their_values_and_gains():
    page = Page(report(study(), "mine"))
    assert page.texts("th", scope="row") == ["finetune", "gpm", "gpm-2x", "gpm+became", "joint upper bound"]
    values = [100 * oracles.acc(matrix_of("gpm", seed)) for seed in range(3)]
    assert page.texts("td", **{"data-metric": "acc"})[1] == f"{np.mean(values):.2f} ± {np.std(values, ddof=1):.2f}"
    first, second = page.texts("td", class_="number gain")
    assert first.endswith("over gpm")
    assert second.endswith("over gpm-2x")
    ours = [100 * oracles.acc(matrix_of("gpm+became", seed)) for seed in range(3)]
    assert first.startswith(f"{np.mean(np.subtract(ours, values)):+.2f} ")
    assert [text for text in page.texts("dt") if text.startswith("ACC")]


def test_charts_get_the_means_of_the_runs():
    ranks = [
        [TaskRecord(stages=[StageRecord(epochs=1)], ranks={"a": 2 * t + seed}) for t in range(3)] for seed in range(3)
    ]
    runs = study(("gpm", "gpm+became", "joint"))
    runs[:3] = [run.model_copy(update={"tasks": tasks}) for run, tasks in zip(runs[:3], ranks, strict=True)]
    (section,) = Page(report(runs, "mine")).data
    gpm, merged, joint = section["methods"]
    matrices = 100 * np.stack([matrix_of("gpm", seed) for seed in range(3)])
    for t in range(3):
        for i in range(t + 1):
            values = matrices[:, t, i]
            assert gpm["accuracy"][t][i] == pytest.approx([values.mean(), values.std(ddof=1)], rel=1e-4)
        averages = matrices[:, t, : t + 1].mean(1)
        assert gpm["average"][t] == pytest.approx([averages.mean(), averages.std(ddof=1)], rel=1e-4)
    assert gpm["ranks"] == {"a": [[1, 1], [3, 1], [5, 1]]}
    assert gpm["coefficients"] == []
    assert merged["coefficients"] == [[None, None], [0.5, 0], [pytest.approx(1 / 3, rel=1e-4), 0]]
    assert joint["average"][:2] == [[None, None]] * 2
    assert joint["average"][2][0] == pytest.approx(
        100 * np.mean([oracles.acc(matrix_of("joint", s)) for s in range(3)]), rel=1e-4
    )


def test_the_best_method_is_drawn_at_first_however_many_there_are():
    others = [f"method{k}" for k in range(12)]
    runs = study([*METHODS, *others], range(2))
    perfect = [[1.0] * (t + 1) + [None] * (2 - t) for t in range(3)]
    runs += [made_up("best", seed, accuracy={"test": perfect}) for seed in range(2)]
    methods = Page(report(runs, "mine")).data[0]["methods"]
    shown = [method["label"] for method in methods if method["shown"]]
    assert len(shown) == 8
    assert shown[-1] == "best"


def test_failed_runs_are_shown_with_their_error_and_left_out():
    error = 'Traceback\n  File "a.py"\nsome.module.OddError: no <room> & "air"\n'
    runs = study(("gpm", "gpm+became"))
    runs[0] = runs[0].model_copy(update={"status": "failed", "error": error})
    page = Page(report(runs, "mine"))
    assert page.texts("p", role="note")[0].startswith("1 of 6 runs ended with an error")
    assert page.texts("details", class_="problem") == [
        f'gpm, seed 0: failed · OddError: no <room> & "air" {" ".join(error.split())}'
    ]
    assert "of which 1 failed" in page.texts("p", class_="lead")[0]
    assert "gpm: 1 of 3 runs failed" in page.texts("p", class_="note")
    assert page.data[0]["gains"][0]["seeds"] == 2


def test_a_study_without_any_result_has_a_page():
    runs = [
        run.model_copy(update={"status": "failed", "error": "KeyError", "accuracy": {}, "tasks": [], "merges": []})
        for run in study()
    ]
    (lead,) = Page(report(runs, "mine")).texts("p", class_="lead")
    assert lead.endswith("15 runs, of which 15 failed. No method has a final accuracy yet.")
    (lead,) = Page(report([made_up("joint", 0)], "mine")).texts("p", class_="lead")
    assert lead.startswith(
        "Joint training learned the three tasks of made-up all at once, with mlp and one seed each: one run."
    )
    assert Page(report([made_up("gpm", 0, 1)], "one run of one task")).texts("th", scope="row") == ["gpm"]


def test_everything_from_records_is_escaped():
    bad = '</script><script>alert(1)</script><img src=x onerror="alert(2)"> & \'"{{ 7*7 }}-->'
    spec = make_spec("gpm", 0, benchmark=bad, network={"name": bad, bad: bad})
    run = made_up(
        "gpm",
        0,
        spec=spec,
        label=bad,
        key=bad,
        environment={bad: bad},
        tasks=[TaskRecord(stages=[], ranks={bad: 1})] * 3,
    )
    failed = made_up("er", 0, spec={**spec, "method": {"name": "er"}}, status="failed", error=bad)
    text = report([run, failed], bad)
    page = Page(text)
    assert "49" not in page.texts("h1")[0]
    assert [attrs for tag, attrs, _ in page.elements if tag == "script"] == [
        {"id": "data", "type": "application/json"},
        {},
    ]
    assert not [tag for tag, attrs, _ in page.elements if tag == "img" or any(name.startswith("on") for name in attrs)]
    shown = " ".join(bad.split())
    for tag, attributes in [
        ("h1", {}),
        ("h2", {}),
        ("title", {}),
        ("th", {"scope": "row"}),
        ("p", {"class": "key"}),
        ("dt", {}),
    ]:
        assert any(shown in found for found in page.texts(tag, **attributes)), tag
    assert page.data[0]["methods"][0]["label"] == bad
    assert list(page.data[0]["methods"][0]["ranks"]) == [bad]


def test_the_policy_allows_this_script_and_style_and_no_address():
    text = report(study(), "mine")
    page = Page(text)
    (policy,) = (
        attrs["content"] for tag, attrs, _ in page.elements if attrs.get("http-equiv") == "Content-Security-Policy"
    )
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))

    def digest(content):
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    (style,) = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    assert rules == {
        "default-src": "'none'",
        "script-src": digest(script),
        "style-src": digest(style),
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    addresses = {attrs[name] for _, attrs, _ in page.elements for name in ("src", "href", "action") if name in attrs}
    assert all(address.startswith("#") for address in addresses)
    assert not [attrs for _, attrs, _ in page.elements if "style" in attrs]  # the policy would ignore it
    assert "innerHTML" not in script


def test_sixty_runs_stay_below_a_mebibyte():
    """There are 20 tasks and 20 layers, like ResNet18 on the longest stream; a tenth of the runs failed."""
    rng = np.random.default_rng(0)
    layers = [f"features.layer{i // 4}.{i % 4}.convolution.weight" for i in range(20)]
    methods = [f"{base}{kind}" for base in ("gpm", "sgp", "trgp", "gpcns") for kind in ("", "-2x", "+became")]
    runs = []
    for run in study(methods, range(5), n_tasks=20):
        tasks = [
            TaskRecord(stages=[StageRecord(epochs=3)], ranks={name: int(rng.integers(1, 500)) for name in layers})
            for _ in range(20)
        ]
        update = {
            "tasks": tasks,
            "spec": {**run.spec, "method": {"name": run.method, "options": {f"option{i}": i for i in range(20)}}},
        }
        if rng.random() < 0.1:
            update |= {"status": "failed", "error": "Traceback\n" + "  File somewhere\n" * 1000}
        runs.append(run.model_copy(update=update))
    assert len(runs) == 60
    assert len(report(runs, "large").encode()) < 2**20


def test_other_budgets_are_other_sections():
    def run(method, seed=0, **changes):
        return made_up(method, seed, spec=make_spec(method, seed, **changes))

    runs = [
        run("gpm"),
        run("sgp", max_epochs=5),
        run("gpm", 1, benchmark="other"),
        run("ewc", max_epochs=5),
        run(
            "er", recipe={"name": "plateau", "epochs": 4}
        ),  # four epochs are below the limit of five, so the budget is the same
    ]
    page = Page(report(runs, "mine"))
    assert page.texts("h2") == ["made-up", "made-up at most 5 epochs per stage", "other"]
    assert len(page.texts("li")) == 3


def test_nothing_to_report_and_runs_that_do_not_fit_are_errors():
    with pytest.raises(RecordError, match="mine has no runs to report"):
        report([], "mine")
    runs = [made_up("gpm", 0), made_up("gpm", 1, spec=make_spec("gpm", 1, threads=2))]
    with pytest.raises(RecordError, match=r"differ in threads \(1 and 2\).*pass a study file instead"):
        report(runs, "mine")


def test_the_specification_on_the_page_repeats_the_run(tmp_path):
    spec = BLOBS.spec("gpm+became", 3)
    text = report([record_of(spec)], "mine")
    (shown,) = re.findall(r'<pre class="spec"[^>]*>(.*?)</pre>', text, re.DOTALL)
    parser = HTMLParser()
    (tmp_path / "spec.json").write_text("".join(_unescaped(parser, shown)))
    assert read_spec(tmp_path / "spec.json").key() == spec.key()
    assert Page(text).texts("code", class_="command") == ["became run spec.json --out repeated"]


def _unescaped(parser, text):
    found = []
    parser.handle_data = found.append
    parser.feed(text)
    parser.close()
    return found


def test_a_folder_is_reported_without_torch(tmp_path):
    for run in study():
        (tmp_path / run.key).mkdir()
        (tmp_path / run.key / "record.json").write_text(run.to_json())
    code = "import sys; from became_avalanche.cli import became; became(['report', sys.argv[1]], standalone_mode=False)"
    code += "; print('torch' in sys.modules, 'avalanche' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, cwd=ROOT)
    file = tmp_path / "report.html"
    assert run.stdout.splitlines() == [f"Report: {file}", f"Open it in a browser: {file.as_uri()}", "False False"]
    assert Page(file.read_text()).texts("h1") == [tmp_path.name]

import csv
import io
import shutil
import subprocess

import numpy as np
import pytest

from became_avalanche.results.metrics import METRICS
from became_avalanche.results.tables import (
    budget,
    check_comparable,
    comparisons,
    gains,
    gains_over,
    in_order,
    table,
    text_gains,
)
from tests import oracles
from tests.results.records import made_up, make_spec, matrix_of

METHODS = ["finetune", "gpm", "gpm-2x", "gpm+became", "joint"]


@pytest.fixture
def records():
    return [made_up(method, seed) for seed in range(3) for method in METHODS]


def changed(records, key, **changes):
    """The records with one of them changed."""
    return [record.model_copy(update=changes) if record.key == key else record for record in records]


def accs(method, seeds=range(3)):
    return np.array([oracles.acc(matrix_of(method, seed)) for seed in seeds])


def test_rows_are_means_over_seeds(records):
    rows = table(records).rows
    assert [row.label for row in rows] == METHODS
    for row in rows:
        assert row.values["acc"].mean == pytest.approx(np.mean(accs(row.label)))
        assert row.values["acc"].std == pytest.approx(np.std(accs(row.label), ddof=1))
        assert (row.runs, row.absent, row.note) == (3, {}, "")
    bwts = [oracles.bwt(matrix_of("gpm", seed)) for seed in range(3)]
    assert rows[1].values["bwt"].mean == pytest.approx(np.mean(bwts))
    assert rows[-1].values["bwt"] is None
    assert rows[3].values["epochs"].mean == 3 + 7 + 7


def test_order(records):
    assert [row.label for row in table(records[::-1]).rows] == METHODS[::-1]
    order = ["joint", "sgp", "gpm"]
    labels = ["joint", "gpm", "finetune", "gpm-2x", "gpm+became"]
    assert [row.label for row in table(records, order=order).rows] == labels
    assert list(dict.fromkeys(record.label for record in in_order(records, order))) == labels
    shuffled = [records[k] for k in np.random.default_rng(0).permutation(len(records))]
    assert table(shuffled, order=METHODS) == table(records)


def steady(label, mean, seeds=3, **changes):
    """Return runs of one task. Two such labels differ equally in every seed, so the paired spread is zero."""
    return runs_with(label, [mean + 0.01 * seed for seed in range(seeds)], **changes)


def test_best_and_second_are_marked_and_joint_does_not_compete():
    records = [*steady("a", 0.5), *steady("b", 0.7), *steady("c", 0.6), *steady("joint", 0.9)]
    lines = table(records).text(bold="<{}>".format, underline="_{}_".format).splitlines()
    assert [("<" in line, "_" in line) for line in lines[1:]] == [
        (False, False),
        (True, False),
        (False, True),
        (False, False),
    ]
    assert len({len(line.translate({ord(sign): None for sign in "<>_"})) for line in lines}) == 1


def test_what_the_interval_cannot_tell_apart_ties():
    noisy = runs_with("noisy", [0.4, 0.6, 1.0])  # mean 0.67; its difference to a is 0.09 ± 0.3, so they tie
    records = [*steady("a", 0.7), *noisy, *steady("b", 0.65), *steady("c", 0.6), *steady("d", 0.60000001)]
    ranks = dict(zip("anbcd", table(records).ranks(METRICS["acc"]), strict=True))
    assert ranks == {"a": 1, "n": 1, "b": 2, "c": None, "d": None}
    records = [*steady("c", 0.6), *runs_with("close", [0.6, 0.62, 0.615]), *steady("a", 0.7)]
    assert table(records).ranks(METRICS["acc"]) == [2, 2, 1]


def test_a_single_seed_ties_only_if_equal():
    records = [*runs_with("a", [0.5]), *runs_with("b", [0.5]), *runs_with("c", [0.4999]), *runs_with("d", [0.1])]
    assert table(records).ranks(METRICS["acc"]) == [1, 1, 2, None]
    assert table(records).ranks(METRICS["epochs"]) == [None] * 4


def test_a_metric_for_which_lower_is_better(records):
    result = table([record for record in records if record.seed == 0], metrics=["std"])
    best = min(result.rows[:-1], key=lambda row: row.values["std"].mean)
    (line,) = [line for line in result.text(bold=lambda cell: f"<{cell}>").splitlines() if "<" in line]
    assert line.startswith(best.label + " ")


def test_markdown_has_gains_marks_and_notes(records):
    result = table(changed(records, "gpm.1", status="failed"), metrics=["acc", "bwt"])
    lines = result.markdown().splitlines()
    assert lines[0] == "| method | ACC % | BWT % | ACC over baseline | ACC over 2x |"
    assert lines[1].count("---:") == 4
    assert {line.count("|") for line in lines[:7]} == {6}
    over, control = gains(changed(records, "gpm.1", status="failed"))
    became = next(line for line in lines if line.startswith("| gpm+became"))
    assert became.endswith(f"| {over.short()} | {control.short()} |")
    assert "gpm: 1 of 3 runs failed" in lines
    assert "**" in result.markdown()


def test_gain_in_a_cell():
    (gain,) = gains_over([*steady("a", 0.5), *runs_with("b", [0.51, 0.53, 0.54])], "a")
    assert gain.short() == "+1.67 [+0.23, +3.10]"
    (gain,) = gains_over([*runs_with("a", [0.5]), *runs_with("b", [0.49])], "a")
    assert gain.short() == "-1.00"


def test_latex_escapes_and_marks():
    records = [*steady("a_b & 50 %", 0.5), *steady("b", 0.7), *steady("c", 0.6)]
    text = table(records, metrics=["acc", "coefficient"]).latex("10 % of $")
    assert r"a\_b \& 50 \% & 51.00 $\pm$ 1.00 & -- \\" in text
    assert r"b & \textbf{71.00 $\pm$ 1.00}" in text
    assert r"c & \underline{61.00 $\pm$ 1.00}" in text
    assert r"method & ACC \% & $\lambda$ \\" in text
    assert r"\caption{10 \% of \$}" in text
    assert text.count("{") == text.count("}")


def test_published_figures_stand_beside_ours_with_the_difference():
    def runs(seeds, label="gpm", benchmark="10-split-cifar100", tasks=3, **changes):
        return [
            made_up("gpm", seed, label=label, spec={**make_spec("gpm", seed, tasks), "benchmark": benchmark, **changes})
            for seed in range(seeds)
        ]

    def shown(records):
        return table(records, metrics=["acc", "aaa", "std"], with_published=True)

    lines = shown(runs(5)).text().splitlines()
    assert lines[0].split("  ")[-1].strip() == "STD %"
    assert "paper ACC %" in lines[0]
    assert "71.81 ± 0.10 " in lines[1]
    assert " 72.08 " in lines[1]
    assert len(lines) == 2
    short = shown(runs(1, benchmark="10-split-cifar100-cpu", n_tasks=2, max_epochs=5))
    assert "71.81 ± 0.10* " in short.text()
    assert short.notes() == [
        "* The paper's runs differ. Ours: 2 of 3 tasks, at most 5 epochs per stage, a shorter recipe, 1 seed instead "
        "of 5."
    ]
    right, scrambled = (shown(runs(3, benchmark=f"cifar100-superclass{end}")) for end in ("", "-scrambled"))
    assert right.notes() == ["* The paper's runs differ. Ours: images that are not scrambled."]
    assert "57.49 ± 0.65*" in right.text()
    assert scrambled.notes() == []
    assert "57.49 ± 0.65 " in scrambled.text()
    (row,) = csv.DictReader(io.StringIO(short.csv()))
    assert row["published_acc_mean"] == "0.7181"
    for other in (runs(5, label="mine"), runs(5, benchmark="made-up")):
        assert "paper" not in shown(other).text()


def test_records_are_compared_in_groups_of_one_budget():
    def joint(n):
        return made_up("joint", 0, n, key=f"joint.{n}", spec={**make_spec("joint", 0, 3), "n_tasks": n})

    short = made_up("sgp", 0, spec=make_spec("sgp", 0, max_epochs=5))
    brief = made_up("trgp", 0, spec=make_spec("trgp", 0, recipe={"epochs": 4}))
    other = made_up("gpm", 0, key="other", spec=make_spec("gpm", 0, benchmark="other"))
    gpm = made_up("gpm", 0)
    groups = comparisons([joint(1), gpm, short, joint(2), other, joint(3)])
    assert [[record.key for record in group] for group in groups] == [["gpm.0", "joint.3"], ["sgp.0"], ["other"]]
    assert comparisons([joint(1)]) == [[joint(1)]]
    assert comparisons([short, brief]) == [[short, brief]]
    for group in groups:
        table(group)


@pytest.mark.long
def test_latex_compiles(tmp_path, records):
    if (
        shutil.which("pdflatex") is None
        or not subprocess.run(["kpsewhich", "booktabs.sty"], capture_output=True).stdout
    ):
        pytest.skip("pdflatex or booktabs is not there: apt-get install texlive-latex-base texlive-latex-recommended")
    records = [
        record.model_copy(update={"label": record.label.replace("finetune", "fine_tune & 100 %")}) for record in records
    ]
    body = table(records, metrics=["acc", "bwt", "forgetting", "coefficient", "epochs"]).latex(
        "Made-up runs, 100 % random"
    )
    page = tmp_path / "page.tex"
    page.write_text("\\documentclass{article}\\usepackage{booktabs}\\begin{document}\n" + body + "\n\\end{document}\n")
    run = subprocess.run(
        ["pdflatex", "-halt-on-error", "-interaction=nonstopmode", page.name],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-2000:]
    assert (tmp_path / "page.pdf").stat().st_size > 10_000
    assert "Missing character" not in run.stdout


def test_every_metric_fits_in_a_table(records):
    result = table(records, metrics=list(METRICS))
    lines = result.text().splitlines()
    assert len({len(line) for line in lines}) == 1
    for metric in METRICS.values():
        assert f"  {metric.heading}" in lines[0]
    with pytest.raises(ValueError, match="unknown metric 'forgeting'; did you mean 'forgetting'"):
        table(records, metrics=["forgeting"])


def test_csv_can_be_read_back(records):
    records = changed(records, "gpm.1", status="diverged", label="gpm, \"quoted\" 'label'")
    names = list(METRICS)
    result = table(records, metrics=names)
    rows = list(csv.DictReader(io.StringIO(result.csv())))
    assert [row["method"] for row in rows] == [row.label for row in result.rows]
    for read, row in zip(rows, result.rows, strict=True):
        assert (int(read["runs"]), int(read["absent"])) == (row.runs, sum(row.absent.values()))
        for name in names:
            value = row.values[name]
            mean = read[f"{name}_mean" if f"{name}_mean" in read else name]
            assert (mean == "") == (value is None)
            if value:
                assert float(mean) == pytest.approx(value.mean, rel=1e-5)
    assert rows[0]["acc_std"] != ""


def test_runs_that_are_not_done_are_left_out_and_named(records):
    for key, status in (("gpm.0", "diverged"), ("gpm.1", "failed"), ("gpm-2x.2", "running")):
        records = changed(records, key, status=status)
    records = [record for record in records if record.key != "finetune.1"]
    result = table(records)
    assert result.text().splitlines()[6:] == [
        "finetune: 1 of 3 runs missing",
        "gpm: 1 of 3 runs diverged, 1 failed",
        "gpm-2x: 1 of 3 runs unfinished",
    ]
    gpm = next(row for row in result.rows if row.label == "gpm")
    assert gpm.runs == 1
    assert gpm.values["acc"].mean == pytest.approx(accs("gpm")[2])
    assert gpm.values["acc"].std is None


def test_a_label_without_any_run_that_is_done():
    records = [made_up("gpm", 0), made_up("sgp", 0, status="failed")]
    lines = table(records).text().splitlines()
    assert lines[2].split() == ["sgp", "–", "–", "–", "–"]
    assert lines[3] == "sgp: 1 of 1 run failed"
    assert table([]).text().split() == ["method", "ACC", "%", "BWT", "%", "epochs", "seconds"]


def test_a_metric_that_not_every_seed_measured_is_not_averaged(records):
    result = table(changed(records, "gpm.1", converted={}), metrics=["acc", "valid_acc"])
    assert result.rows[1].values["valid_acc"] is None
    assert result.rows[1].values["acc"].n == 3


def test_gains_are_paired_by_the_keys_of_the_references(records):
    found = gains(records)
    assert [(gain.label, gain.over) for gain in found] == [("gpm+became", "gpm"), ("gpm+became", "gpm-2x")]
    for gain in found:
        differences = accs(gain.label) - accs(gain.over)
        assert gain.paired.gain.mean == pytest.approx(np.mean(differences))
        assert gain.paired.gain.std == pytest.approx(np.std(differences, ddof=1))
    (gain, _) = gains(changed(records, "gpm.1", status="diverged"))
    assert gain.paired.gain.mean == pytest.approx(np.mean((accs("gpm+became") - accs("gpm"))[[0, 2]]))
    renamed = [r.model_copy(update={"label": "GPM"}) if r.label == "gpm" else r for r in records]
    assert [gain.over for gain in gains(renamed)] == ["GPM", "gpm-2x"]
    pairs = [(gain.over, gain.paired.gain.n) for gain in gains(changed(records, "gpm.1", label="GPM"))]
    assert pairs == [("gpm", 2), ("GPM", 1), ("gpm-2x", 3)]
    alone = [record for record in records if not record.label.startswith("gpm-") and record.label != "gpm"]
    assert gains(alone) == []


def test_gains_over_one_label_are_paired_by_seed(records):
    records = [record for record in records if record.key not in ("finetune.0", "gpm.2")]
    found = gains_over(records, "finetune")
    assert [gain.label for gain in found] == METHODS[1:]
    assert {gain.over for gain in found} == {"finetune"}
    differences = accs("gpm", [1]) - accs("finetune", [1])
    assert found[0].paired.gain.mean == pytest.approx(differences[0])
    assert found[1].paired.gain.n == 2
    assert [gain.label for gain in gains_over(records, "finetune", "bwt")] == METHODS[1:-1]
    with pytest.raises(ValueError, match="unknown label 'finetun'; did you mean 'finetune'"):
        gains_over(records, "finetun")


def runs_with(label, values, **changes):
    """Runs of one task with these accuracies, one per seed."""
    return [made_up(label, seed, 1, accuracy={"test": [[value]]}, **changes) for seed, value in enumerate(values)]


@pytest.mark.parametrize(
    ("ours", "detail"),
    [
        ([0.51], "+1.00 points of ACC"),
        ([0.51, 0.53], "+2.00 ± 1.41 points of ACC (95 % interval -10.71 to +14.71, 2 seeds)"),
        ([0.51, 0.53, 0.52], "+2.00 ± 1.00 points of ACC (95 % interval -0.48 to +4.48, p = 0.25, 3 seeds)"),
        ([0.51] * 5, "+1.00 ± 0.00 points of ACC (95 % interval +1.00 to +1.00, p = 0.06, 5 seeds)"),
        ([0.49] * 9, "-1.00 ± 0.00 points of ACC (95 % interval -1.00 to -1.00, p = 0.004, 9 seeds)"),
    ],
)
def test_text_of_gains(ours, detail):
    found = gains_over(runs_with("gpm", [0.5] * len(ours)) + runs_with("sgp", ours), "gpm")
    assert text_gains(found) == f"sgp over gpm: {detail}"
    assert text_gains(found, interval=False) == f"sgp over gpm: {detail.partition(' (')[0]}"


def test_gains_in_other_metrics(records):
    assert "gpm+became over gpm: +8 ± 0 epochs (95 % interval +8 to +8, p = 0.25, 3 seeds)" in text_gains(
        gains(records, "epochs")
    )
    assert " points of BWT" in text_gains(gains(records, "bwt"), interval=False)


@pytest.mark.parametrize("function", [table, gains, lambda records: gains_over(records, "gpm")])
@pytest.mark.parametrize(
    ("key", "changes", "message"),
    [
        (
            "gpm.1",
            {"recipe": {"name": "plateau", "batch_size": 64, "epochs": 10}},
            r"gpm\.1 .* recipe.batch_size \(32 and 64\)",
        ),
        ("gpm.2", {"threads": 2, "device": "cuda"}, r"as 'gpm': .* device \('cpu' and 'cuda'\), threads \(1 and 2\)"),
        ("gpm.1", {"method": {"name": "gpm", "threshold": 0.9}}, r"method.threshold \(None and 0.9\)"),
        ("joint.0", {"max_epochs": 5}, r"joint\.0 and joint\.1 .* max_epochs \(5 and None\)"),
    ],
)
def test_different_settings_under_one_label_are_refused(records, function, key, changes, message):
    method, seed = key.split(".")
    records = changed(records, key, spec=make_spec(method, int(seed)) | changes)
    with pytest.raises(ValueError, match=message):
        function(records)


def test_labels_and_newer_options_do_not_keep_runs_apart():
    old, new = make_spec("gpm", 0), make_spec("gpm", 1)
    old["method"] = {"label": None, "options": {"threshold": 0.9}}
    new["method"] = {"label": "mine", "options": {"threshold": 0.9, "newer": 1}}
    runs = [made_up("gpm", 0, spec=old), made_up("gpm", 1, spec=new)]
    check_comparable(runs)
    new["method"]["options"]["threshold"] = 0.8
    with pytest.raises(ValueError, match=r"method.options.threshold \(0.9 and 0.8\)"):
        check_comparable([runs[0], made_up("gpm", 1, spec=new)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"benchmark": "other"}, r"benchmark \('made-up' and 'other'\)"),
        ({"n_tasks": 2}, r"n_tasks \(3 and 2\)"),
        ({"stream": {"name": "made-up", "options": {"order": 1}, "n_tasks": 3}}, r"stream.options.order \(None and"),
    ],
)
def test_labels_with_different_benchmarks_or_budgets_are_refused(changes, message):
    other = made_up("sgp", 0, spec=make_spec("sgp", 0) | changes)
    with pytest.raises(ValueError, match=rf"gpm\.0 and sgp\.0 cannot be compared in one table: .*{message}"):
        table([made_up("gpm", 0), other])


@pytest.mark.parametrize(
    ("limits", "recipe_epochs", "fair"),
    [
        ((None, None), (20, 30), True),
        ((5, 5), (20, 30), True),
        ((5, None), (20, 5), True),  # the specification has dropped a limit that its recipe does not reach
        ((5, None), (20, 6), False),
        ((None, 5), (6, 20), False),
        ((5, 4), (20, 5), False),
    ],
)
def test_labels_train_for_the_same_budget(limits, recipe_epochs, fair):
    records = [
        made_up(method, 0, spec=make_spec(method, 0, max_epochs=limit, recipe={"epochs": epochs}))
        for method, limit, epochs in zip(("gpm", "sgp"), limits, recipe_epochs, strict=True)
    ]
    if fair:
        assert len(table(records).rows) == 2
    else:
        with pytest.raises(
            ValueError, match=r"cannot be compared in one table: they differ in max_epochs \(\w+ and \w+\)"
        ):
            table(records)


def test_labels_may_differ_in_recipe_and_network():
    other = made_up("sgp", 0, spec=make_spec("sgp", 0, recipe={"name": "sgd", "epochs": 1}, network={"name": "resnet"}))
    assert len(table([made_up("gpm", 0), other]).rows) == 2


def test_a_run_that_is_listed_twice_is_refused(records):
    with pytest.raises(ValueError, match=r"gpm\.1 and gpm\.1 are both 'gpm' with seed 1"):
        table([*records, made_up("gpm", 1)])


@pytest.mark.parametrize(
    ("n_tasks", "max_epochs", "text"),
    [
        (10, None, ""),
        (3, None, "3 of 10 tasks"),
        (10, 20, "at most 20 epochs per stage"),
        (3, 1, "3 of 10 tasks, at most 1 epoch per stage"),
    ],
)
def test_budget(n_tasks, max_epochs, text):
    stream = {"name": "made-up", "options": {}, "n_tasks": 10}
    assert budget({**make_spec("gpm", 0), "stream": stream, "n_tasks": n_tasks, "max_epochs": max_epochs}) == text

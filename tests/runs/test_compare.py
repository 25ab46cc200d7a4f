import csv
import json
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from became_avalanche.merging.rules import RULES
from became_avalanche.plugins.merge import MergeRecord
from became_avalanche.runs.catalogue import BENCHMARKS
from became_avalanche.runs.compare import Comparison, Spread, text_gains, text_table
from became_avalanche.runs.figures import comparison_figure, run_figure
from became_avalanche.runs.train import RunResult
from tests import oracles

PRESET = BENCHMARKS["split-digits"]


def made_up(method, seed, tasks=3):
    """A result with random accuracies: what is under test is the book-keeping."""
    generator = np.random.default_rng([seed, *method.encode()])
    matrix = np.tril(generator.uniform(0.5, 1, size=(tasks, tasks)))
    accuracy = [[float(matrix[t, i]) if i <= t else None for i in range(tasks)] for t in range(tasks)]
    merged = "+" in method
    return RunResult(
        benchmark=PRESET.name,
        method=method,
        seed=seed,
        accuracy=accuracy,
        acc=oracles.acc(matrix),
        bwt=oracles.bwt(matrix) if method != "joint" else None,
        valid_acc=0.9,
        epochs=[[3]] + [[3, 4] if merged else [3]] * (tasks - 1) if method != "joint" else [[5]],
        merges=[MergeRecord(t, 0.5, *[1.0] * 7) for t in range(2, tasks + 1)] if merged else [],
        seconds=1.5,
    )


METHODS = ["finetune", "gpm", "gpm-2x", "gpm+became", "joint"]


@pytest.fixture
def comparison(tmp_path):
    result = Comparison(PRESET, METHODS, 3, tmp_path)
    result.run(made_up)
    return result


def test_rows_are_means_over_seeds_of_the_matrix_metrics(comparison):
    rows = comparison.rows()
    assert [row.method for row in rows] == METHODS
    for row in rows[:-1]:
        matrices = [np.array(made_up(row.method, seed).accuracy, dtype=float) for seed in range(3)]
        accs, bwts = ([metric(m) for m in matrices] for metric in (oracles.acc, oracles.bwt))
        assert row.acc.mean == pytest.approx(np.mean(accs))
        assert row.acc.std == pytest.approx(np.std(accs, ddof=1))
        assert row.bwt.mean == pytest.approx(np.mean(bwts))
    assert rows[-1].bwt is None
    assert rows[3].epochs == 3 + 7 + 7


def test_gains_are_seed_by_seed(comparison):
    gains = comparison.gains()
    assert [(gain.method, gain.over) for gain in gains] == [("gpm+became", "gpm"), ("gpm+became", "gpm-2x")]
    for gain in gains:
        differences = [made_up(gain.method, s).acc - made_up(gain.over, s).acc for s in range(3)]
        assert gain.acc.mean == pytest.approx(np.mean(differences))
        assert gain.acc.std == pytest.approx(np.std(differences, ddof=1))
    assert "gpm+became over gpm-2x: " in text_gains(gains)


def test_order_of_methods_does_not_matter(comparison, tmp_path):
    other = Comparison(PRESET, METHODS[::-1], 3, tmp_path)
    other.run(made_up)
    assert sorted(map(repr, comparison.rows())) == sorted(map(repr, other.rows()))


def test_best_is_marked_and_joint_does_not_compete(comparison):
    text = text_table(comparison.rows(), bold=lambda cell: f"<{cell}>")
    best = max(comparison.rows()[:-1], key=lambda row: row.acc.mean)
    line = next(line for line in text.splitlines() if line.startswith(best.method + " "))
    assert f"{best.acc.percent():>15}>" in line
    assert text.count("<") == 2
    assert "<" not in text.splitlines()[-1]
    assert len({len(line.replace("<", "").replace(">", "")) for line in text.splitlines()}) == 1


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=5))
def test_spread(values):
    spread = Spread.of(values)
    assert spread.mean == pytest.approx(np.mean(values))
    assert (spread.std is None) == (len(values) == 1)
    if spread.std is not None:
        assert spread.std == pytest.approx(np.std(values, ddof=1), abs=1e-12)


def test_files_hold_what_the_table_says(comparison, tmp_path):
    comparison.save_table()
    saved = json.loads((tmp_path / "results.json").read_text())
    assert saved["complete"]
    assert saved["settings"]["benchmark"] == "split-digits"
    assert saved["runs"] == json.loads(json.dumps([asdict(run) for run in comparison.runs]))
    with open(tmp_path / "table.csv") as file:
        table = list(csv.DictReader(file))
    assert [row["method"] for row in table] == METHODS
    assert float(table[1]["acc_mean"]) == pytest.approx(comparison.rows()[1].acc.mean, rel=1e-4)
    assert table[-1]["bwt_mean"] == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results.json", "table.csv"]


class StopError(Exception):
    pass


def interrupted_after(count):
    calls = []

    def train(method, seed):
        if len(calls) == count:
            raise StopError
        calls.append((method, seed))
        return made_up(method, seed)

    return train, calls


def test_interrupted_comparison_goes_on(tmp_path):
    first = Comparison(PRESET, METHODS, 3, tmp_path)
    train, calls = interrupted_after(4)
    with pytest.raises(StopError):
        first.run(train)
    assert not json.loads((tmp_path / "results.json").read_text())["complete"]

    second = Comparison(PRESET, METHODS, 3, tmp_path)
    second.resume()
    train, more = interrupted_after(100)
    second.run(train)
    assert len(calls) + len(more) == 15
    assert not set(calls) & set(more)
    whole = Comparison(PRESET, METHODS, 3, tmp_path / "other")
    (tmp_path / "other").mkdir()
    whole.run(made_up)
    assert whole.rows() == second.rows()

    third = Comparison(PRESET, METHODS, 3, tmp_path)
    third.resume()
    assert third.runs == []  # a complete comparison is made anew


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"complete": false, "settings": {}, "runs": []}'])
def test_foreign_files_and_other_settings_are_not_resumed(tmp_path, content):
    (tmp_path / "results.json").write_text(content)
    comparison = Comparison(PRESET, METHODS, 3, tmp_path)
    comparison.resume()
    assert comparison.runs == []


def test_every_merging_method_has_a_line(tmp_path):
    merging = [f"gpm+{rule}" for rule in RULES] + [f"finetune+{rule}" for rule in RULES]
    many = Comparison(PRESET, merging, 1, tmp_path)
    many.run(made_up)
    legend = next(axes.get_legend() for axes in comparison_figure(many).axes if axes.get_legend())
    assert [text.get_text() for text in legend.get_texts()] == [*merging, "1/t"]


@pytest.mark.parametrize("methods", [METHODS, ["gpm"], ["joint"], ["finetune+became", "gpm+became"]])
def test_pictures_are_drawn(tmp_path, methods):
    comparison = Comparison(PRESET, methods, 2, tmp_path)
    comparison.run(made_up)
    comparison_figure(comparison).savefig(tmp_path / "comparison.png")
    assert (tmp_path / "comparison.png").stat().st_size > 10_000
    run_figure(comparison.runs[0]).savefig(tmp_path / "run.png")

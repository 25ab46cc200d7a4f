import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from became_avalanche.results.metrics import METRICS
from became_avalanche.results.record import Seconds, StageRecord, TaskRecord
from tests import oracles
from tests.results.records import made_up, measured

FRACTIONS = st.floats(0, 1)
ORACLES = {
    "acc": oracles.acc,
    "bwt": oracles.bwt,
    "aaa": lambda a: np.mean([np.mean(a[t, : t + 1]) for t in range(len(a))]),
    "std": lambda a: np.sqrt(np.mean((a[-1] - np.mean(a[-1])) ** 2)),
    "forgetting": lambda a: np.mean([max(a[t, i] for t in range(i, len(a) - 1)) - a[-1, i] for i in range(len(a) - 1)]),
}


def of(record):
    return {name: metric.of(record) for name, metric in METRICS.items()}


def run_with(matrix, **changes):
    return made_up("gpm", 0, len(matrix), accuracy={"test": measured(matrix)}, **changes)


@st.composite
def matrices(draw):
    tasks = draw(st.integers(2, 6))
    values = draw(st.lists(FRACTIONS, min_size=tasks**2, max_size=tasks**2))
    matrix = np.array(values).reshape(tasks, tasks)
    matrix[np.triu_indices(tasks, 1)] = np.nan
    return matrix


@given(matrices())
def test_metrics_of_the_matrix_are_those_of_the_formulas(matrix):
    values = of(run_with(matrix))
    for name, oracle in ORACLES.items():
        assert values[name] == pytest.approx(oracle(matrix), abs=1e-12), name


def test_tasks_seen_before_their_turn_do_not_count():
    matrix = np.array([[0.9, 0.99, 0.99], [0.8, 0.7, 0.99], [0.5, 0.6, 0.4]])
    lower = np.where(np.tri(3, dtype=bool), matrix, np.nan)
    assert of(run_with(matrix)) == of(run_with(lower))


@given(matrices(), st.data())
def test_an_unmeasured_cell_is_no_number(matrix, data):
    t = data.draw(st.integers(0, len(matrix) - 1))
    i = data.draw(st.integers(0, t))
    matrix[t, i] = np.nan
    values = of(run_with(matrix))
    assert values["bwt"] is values["forgetting"] is values["aaa"] is None
    assert (values["acc"] is None) == (values["std"] is None) == (t == len(matrix) - 1)


def test_a_single_task():
    values = of(run_with(np.array([[0.75]])))
    assert values["acc"] == values["aaa"] == 0.75
    assert values["std"] == 0
    assert values["bwt"] is values["forgetting"] is values["aoa"] is None


def test_joint_training_measures_the_last_row_only():
    values = of(made_up("joint", 0))
    assert values["acc"] == pytest.approx(np.mean(made_up("joint", 0).accuracy["test"][-1]))
    assert values["bwt"] is values["forgetting"] is values["aaa"] is values["aoa"] is None


@pytest.mark.parametrize("status", ["running", "diverged", "failed"])
def test_a_run_that_is_not_done_has_no_metrics(status):
    assert set(of(made_up("gpm", 0, status=status)).values()) == {None}


def test_a_run_that_measured_nothing():
    assert set(of(made_up("gpm", 0, accuracy={}, tasks=[], converted={})).values()) == {None}


def task(first=None, seconds=None, memory=None):
    return TaskRecord(
        stages=[StageRecord(epochs=2), StageRecord(epochs=3)],
        first_epoch_accuracy=first,
        seconds=seconds and Seconds(training=seconds, evaluation=100),
        memory_bytes=memory or {},
    )


def test_metrics_of_the_tasks():
    tasks = [task(0.1, 1.5, {"GPMPlugin": 7}), task(0.5, 2.5, {"GPMPlugin": 10, "BecameMergePlugin": 20}), task(0.6, 3)]
    values = of(made_up("gpm", 0, tasks=tasks[:2]))
    assert (values["epochs"], values["seconds"], values["memory"], values["aoa"]) == (10, 4, 30, 0.5)
    values = of(made_up("gpm", 0, tasks=tasks))
    assert values["aoa"] == pytest.approx(0.55)
    assert values["memory"] is None
    assert of(made_up("gpm", 0, tasks=[*tasks, task()]))["aoa"] is None


def test_converted_sums_stand_in_for_what_was_not_measured():
    assert of(made_up("gpm", 0))["seconds"] == 1.5
    assert of(made_up("gpm", 0, tasks=[task(seconds=1), task()]))["seconds"] == 1.5
    assert of(made_up("gpm", 0))["valid_acc"] == 0.9
    valid = {"valid": [[0.5, None], [0.7, 0.8]]}
    assert of(made_up("gpm", 0, accuracy=valid))["valid_acc"] == pytest.approx(0.75)


def test_every_metric_is_defined_in_one_line():
    for name, metric in METRICS.items():
        assert metric.name == name
        assert metric.definition.endswith(".")
        assert "\n" not in metric.definition

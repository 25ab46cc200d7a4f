import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from became_avalanche.results.metrics import METRICS, backward_transfer, intransigence
from became_avalanche.results.record import Seconds, StageRecord, TaskRecord, with_joint
from tests import oracles
from tests.results.records import made_up, make_spec, measured

FRACTIONS = st.floats(0, 1)
ORACLES = {
    "acc": oracles.acc,
    "bwt": oracles.bwt,
    "aaa": lambda a: np.mean([np.mean(a[t, : t + 1]) for t in range(len(a))]),
    "std": lambda a: np.sqrt(np.mean((a[-1] - np.mean(a[-1])) ** 2)),
    "forgetting": lambda a: np.mean(
        [np.max([a[t, i] for t in range(i, len(a) - 1)]) - a[-1, i] for i in range(len(a) - 1)]
    ),
    "learning_acc": lambda a: sum(a[i, i] for i in range(len(a))) / len(a),
}
UNDEFINED_FOR_ONE_TASK = {"bwt", "forgetting"}


def of(record):
    return {name: metric.of(record) for name, metric in METRICS.items()}


def run_with(matrix, **changes):
    return made_up("gpm", 0, len(matrix), accuracy={"test": measured(matrix)}, **changes)


@st.composite
def matrices(draw):
    tasks = draw(st.integers(1, 6))
    values = draw(st.lists(FRACTIONS, min_size=tasks**2, max_size=tasks**2))
    matrix = np.array(values).reshape(tasks, tasks)
    matrix[np.triu_indices(tasks, 1)] = np.nan
    return matrix


def check(record, matrix):
    """Check that the metrics equal the formulas, and are None where a formula has no value."""
    values = of(record)
    for name, oracle in ORACLES.items():
        expected = np.nan if len(matrix) == 1 and name in UNDEFINED_FOR_ONE_TASK else oracle(matrix)
        assert values[name] == (None if np.isnan(expected) else pytest.approx(expected, abs=1e-12)), name
        assert METRICS[name].of_matrix(record.accuracy["test"]) == values[name]


@given(matrices())
def test_metrics_of_the_matrix_are_those_of_the_formulas(matrix):
    check(run_with(matrix), matrix)


def test_tasks_seen_before_their_turn_do_not_count():
    matrix = np.array([[0.9, 0.99, 0.99], [0.8, 0.7, 0.99], [0.5, 0.6, 0.4]])
    lower = np.where(np.tri(3, dtype=bool), matrix, np.nan)
    assert of(run_with(matrix)) == of(run_with(lower))


@given(matrices(), st.data())
def test_an_unmeasured_cell_is_no_number_where_it_is_needed(matrix, data):
    t = data.draw(st.integers(0, len(matrix) - 1))
    i = data.draw(st.integers(0, t))
    matrix[t, i] = np.nan
    check(run_with(matrix), matrix)
    assert of(run_with(matrix))["aaa"] is None


@given(matrices(), st.data())
def test_intransigence_is_that_of_the_formula_and_completes_the_identity(matrix, data):
    tasks = len(matrix)
    joint = data.draw(st.lists(FRACTIONS, min_size=tasks, max_size=tasks))
    record = run_with(matrix, joint_accuracy=joint)
    values = of(record)
    assert values["im"] == pytest.approx(sum(joint[i] - matrix[i, i] for i in range(tasks)) / tasks, abs=1e-12)
    # golden check 32: A[T, i] = A*_i − IM_i + BWT_i, and its mean over the tasks
    final = np.array(joint) - intransigence(record) + backward_transfer(record)
    np.testing.assert_allclose(final, matrix[-1], atol=1e-12)
    transfer = (tasks - 1) / tasks * values["bwt"] if tasks > 1 else 0
    assert values["acc"] == pytest.approx(np.mean(joint) - values["im"] + transfer, abs=1e-12)


def test_joint_training_gives_its_accuracy_to_the_runs_of_its_seed_and_budget():
    def joint(n, seed=0, **changes):
        spec = {**make_spec("joint", seed, 3, **changes), "n_tasks": n}
        accuracy = [[None] * n] * (n - 1) + [[(10 * seed + n) / 100] * n]
        return made_up("joint", seed, n, key=f"joint.{n}.{seed}", spec=spec, accuracy={"test": accuracy})

    def found(*others):
        runs = with_joint([made_up("gpm", 0), made_up("gpm", 1), *others])
        return [run.joint_accuracy for run in runs if run.label == "gpm"]

    prefixes = [joint(n, seed) for seed in (0, 1) for n in (1, 2, 3)]
    assert found(*prefixes) == [[0.01, 0.02, 0.03], [0.11, 0.12, 0.13]]
    assert of(with_joint([made_up("gpm", 0), *prefixes])[0])["im"] is not None
    assert found() == [[], []]
    assert found(joint(1), joint(3)) == [[0.01, None, 0.03], []]
    assert of(with_joint([made_up("gpm", 0), joint(1), joint(3)])[0])["im"] is None
    for other in ({"max_epochs": 5}, {"network": {"name": "cnn"}}, {"benchmark": "other"}):
        assert found(joint(1, **other)) == [[], []], other
    assert found(joint(1, max_epochs=10)) == [
        [0.01, None, None],
        [],
    ]  # the recipe has ten epochs, so this limit has no effect
    assert found(joint(1), joint(1, recipe={"epochs": 3})) == [[None] * 3, []]
    assert found(joint(1).model_copy(update={"status": "failed"})) == [[], []]


def test_accuracies_of_other_runs_are_not_written(tmp_path):
    run = made_up("gpm", 0, joint_accuracy=[0.5])
    assert "joint_accuracy" not in run.to_json()


def test_a_single_task():
    values = of(run_with(np.array([[0.75]])))
    assert values["acc"] == values["aaa"] == values["learning_acc"] == 0.75
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


def task(first=None, seconds=None, memory=None, ranks=None):
    return TaskRecord(
        stages=[StageRecord(epochs=2), StageRecord(epochs=3)],
        first_epoch_accuracy=first,
        seconds=seconds and Seconds(training=seconds, evaluation=100),
        memory_bytes=memory or {},
        ranks=ranks or {},
    )


def test_metrics_of_the_tasks():
    tasks = [task(0.1, 1.5, {"GPMPlugin": 7}), task(0.5, 2.5, {"GPMPlugin": 10, "BecameMergePlugin": 20}), task(0.6, 3)]
    values = of(made_up("gpm", 0, tasks=tasks[:2]))
    assert (values["epochs"], values["seconds"], values["memory"], values["aoa"]) == (10, 4, 30, 0.5)
    values = of(made_up("gpm", 0, tasks=tasks))
    assert values["aoa"] == pytest.approx(0.55)
    assert values["memory"] is None
    assert of(made_up("gpm", 0, tasks=[*tasks, task()]))["aoa"] is None


def test_coefficient_rank_and_peak_memory():
    tasks = [task(ranks={"a": 1, "b": 2}), task(ranks={"a": 4, "b": 3})]
    values = of(made_up("gpm+became", 0, tasks=tasks, peak_memory_bytes=2**20))
    assert (values["coefficient"], values["rank"], values["peak_memory"]) == (
        pytest.approx((1 / 2 + 1 / 3) / 2),
        7,
        2**20,
    )
    values = of(made_up("gpm", 0))
    assert values["coefficient"] is values["rank"] is values["peak_memory"] is None


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

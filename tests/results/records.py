"""Made-up records for tests, and runs of version 0.1."""

from pathlib import Path

import numpy as np

from became_avalanche.results.record import MergeRecord, Record, References, StageRecord, TaskRecord
from tests import oracles

ROOT = Path(__file__).parents[2]


def make_spec(method, seed, n_tasks=3, **changes):
    return {
        "benchmark": "made-up",
        "stream": {"name": "made-up", "options": {}, "n_tasks": n_tasks},
        "network": {"name": "mlp"},
        "method": {"name": method},
        "recipe": {"name": "plateau", "batch_size": 32, "epochs": 10},
        "seed": seed,
        "n_tasks": n_tasks,
        "max_epochs": None,
        "device": "cpu",
        "threads": 1,
        "eval_batch_size": 64,
        **changes,
    }


def matrix_of(method, seed, n_tasks=3):
    """Return random accuracies, with nan where a run measures nothing."""
    matrix = np.random.default_rng([seed, *method.encode()]).uniform(0.5, 1, size=(n_tasks, n_tasks))
    matrix[np.triu_indices(n_tasks, 1)] = np.nan
    if method == "joint":
        matrix[:-1] = np.nan
    return matrix


def measured(matrix):
    return [[None if np.isnan(value) else float(value) for value in row] for row in matrix]


def references_of(method):
    """Names of the baseline and the control of a method."""
    base, plus, _ = method.partition("+")
    control = {"finetune": None, "connector": "nscl-2x"}.get(base, f"{base}-2x")
    return (base, control) if plus else (None, None)


def keyed(name, seed):
    return name and f"{name}.{seed}"


def made_up(method, seed, n_tasks=3, **changes):
    """A run with random accuracies."""
    merged = "+" in method
    stages = [[3]] + [[3, 4] if merged else [3]] * (n_tasks - 1) if method != "joint" else [[5]]
    baseline, control = references_of(method)
    values = {
        "key": keyed(method, seed),
        "spec": make_spec(method, seed, n_tasks),
        "method": method,
        "label": method,
        "references": References(baseline=keyed(baseline, seed), control=keyed(control, seed)),
        "status": "done",
        "accuracy": {"test": measured(matrix_of(method, seed, n_tasks))},
        "tasks": [TaskRecord(stages=[StageRecord(epochs=n) for n in epochs]) for epochs in stages],
        "merges": [_merge(t) for t in range(2, n_tasks + 1)] if merged else [],
        "converted": {"seconds": 1.5, "valid_acc": 0.9},
    }
    return Record(**{**values, **changes})


def _merge(t):
    return MergeRecord(
        t=t,
        coefficient=1 / t,
        plasticity=1,
        stability=1,
        drift=1,
        drift_along_delta=1,
        delta_norm=1,
        drift_norm=1,
        seconds=1,
    )


def old_run(method, seed=0):
    """Return a run of version 0.1, with the fields that the migration needs: spec, key, label and references."""
    record, matrix = made_up(method, seed), matrix_of(method, seed)
    kept = record.model_dump(include={"key", "spec", "method", "label", "references", "merges"})
    return {
        **kept,
        "schema_version": 0,
        "benchmark": record.benchmark,
        "seed": seed,
        "accuracy": measured(matrix),
        "acc": oracles.acc(matrix),
        "bwt": None if method == "joint" else oracles.bwt(matrix),
        "valid_acc": 0.9,
        "epochs": [[stage.epochs for stage in task.stages] for task in record.tasks],
        "seconds": 1.5,
    }

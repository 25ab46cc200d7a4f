"""Choose the learning rate and one hyperparameter of each method on validation data.

    python experiments/tune.py split-digits permuted-digits
    python experiments/tune.py split-digits --methods sgp,owm
    python experiments/tune.py 10-split-cifar100-cpu --methods ewc --data FOLDER

All methods of a comparison share one learning rate: the one with the best mean validation accuracy over `gpm`,
`gpm-2x` and `gpm+became`. With this learning rate, each method gets the hyperparameter with the best validation
accuracy when it is trained without a second stage. The seeds are not used in any table. Replay memories are limited to
the largest size in the grid, because a larger one would always be better. CIFAR-100 is tuned on its first three tasks.
With --methods, the learning rate is taken from the catalogue.

Runs are kept in runs/tuning: rerun the same command to resume. The accuracies of all candidates are written to
runs/tuning/<benchmark>.json. The files behind the values in became_avalanche/runs/catalogue.py are kept in
experiments/tuning. A candidate with a diverged run has no accuracy there (null) and is never chosen.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from became_avalanche.files import suggestion, write_atomically
from became_avalanche.results.metrics import METRICS
from became_avalanche.runs.catalogue import BENCHMARKS, EMBEDDED
from became_avalanche.runs.engines import Processes
from became_avalanche.runs.method import Method
from became_avalanche.runs.progress import Progress
from became_avalanche.runs.run import Local
from became_avalanche.runs.spec import RunSpec, SpecError
from became_avalanche.runs.store import Store, StoreError
from became_avalanche.runs.study import missing, records_of, status_of

SEEDS = {"split-digits": (100, 101, 102), "permuted-digits": (100,), "10-split-cifar100-cpu": (100,)}
"""Seeds per benchmark. The benchmarks have 36, 180 and 250 validation images per task."""
TASKS = {"10-split-cifar100-cpu": 3}
LEARNING_RATES = (0.03, 0.1, 0.3)
RATE_METHODS = ("gpm", "gpm-2x", "gpm+became")
GRIDS: dict[str, tuple[str, Sequence[float]]] = {
    "ewc": ("ewc_lambda", (100, 1000, 10000, 100000)),
    "si": ("si_lambda", (10, 100, 1000, 10000)),
    "lwf": ("alpha", (0.3, 1, 3, 10)),
    "agem": ("patterns_per_experience", (10, 20, 40)),
    "er": ("mem_size", (50, 100, 200)),
    "sgp": ("alpha", (10, 1, 3, 30, 100)),
    "trgp": ("trust_threshold", (0.5, 0.2, 0.8)),
    "gpcns": ("alpha", (5, 0.3, 1, 25, 100)),
    "nscl": ("a", (10, 1, 3, 100, 1000, 10000, 100000)),
    "owm": ("alpha", (1, 0.1, 10, 100, 1000)),
}
"""Method -> option and its values. The first of equally good values wins; for projection methods it is the default."""
CIFAR_GRIDS: dict[str, tuple[str, Sequence[float]]] = {"ewc": ("ewc_lambda", (10, 100, 1000, 10000))}


def grids_of(benchmark: str) -> dict[str, tuple[str, Sequence[float]]]:
    """Return the option to tune for each method on a benchmark, and its values."""
    return CIFAR_GRIDS if benchmark in TASKS else GRIDS


class Tuning:
    """Trains candidates on one benchmark and compares them on validation data."""

    def __init__(self, name: str, store: Store, local: Local, workers: int | None) -> None:
        self.name, self.store, self.local, self.workers = name, store, local, workers

    def specs(self, method: str, rate: float, options: dict[str, Any] | None = None) -> list[RunSpec]:
        """Return the runs of a candidate, one per seed. Hyperparameters not in ``options`` have their default."""
        benchmark = BENCHMARKS[self.name]
        recipe: Any = benchmark.recipe
        tried = replace(recipe, learning_rate=rate, lr_min=recipe.lr_min * rate / recipe.learning_rate)
        tuned = replace(benchmark, recipe=tried, hyperparameters={})
        chosen = Method.parse(method, options)
        return [tuned.spec(chosen, seed, n_tasks=TASKS.get(self.name)) for seed in SEEDS[self.name]]

    def choose(self, candidates: Mapping[float, list[RunSpec]]) -> dict[str, Any]:
        """Return the candidate with the best mean validation accuracy, and all accuracies; None if a run diverged."""
        self._train([spec for specs in candidates.values() for spec in specs])
        tried: dict[float, float | None] = {}
        for candidate, specs in candidates.items():
            values = [METRICS["valid_acc"].of(record) for record in records_of(specs, self.store)]
            measured = [value for value in values if value is not None]
            tried[candidate] = round(mean(measured), 4) if len(measured) == len(specs) else None
        scores = {candidate: score for candidate, score in tried.items() if score is not None}
        if not scores:
            raise SystemExit(f"{self.name}: all of {', '.join(map(str, candidates))} diverged; try other values")
        return {"chosen": max(scores, key=scores.__getitem__), "tried": {str(c): score for c, score in tried.items()}}

    def _train(self, specs: Sequence[RunSpec]) -> None:
        """Train the missing runs. If a run fails or cannot start, exit with its error message."""
        wanted = missing(status_of(specs, self.store))
        with Progress({spec.key(): spec for spec in wanted}, done=len(specs) - len(wanted)) as progress:
            for outcome in Processes(self.workers).run(wanted, self.store, self.local, progress):
                progress.finished(outcome.spec.key(), outcome.record, outcome.problem)
                if outcome.record is None or outcome.record.status == "failed":
                    problem = outcome.problem or (outcome.record and outcome.record.error)
                    raise SystemExit(f"{outcome.spec.key()}: {problem}")


def tune(tuning: Tuning, methods: Sequence[str]) -> None:
    """Choose the learning rate and the hyperparameters of all methods, or only the hyperparameters of ``methods``."""
    name = tuning.name
    record: dict[str, Any] = {"benchmark": name, "seeds": SEEDS[name], "hyperparameters": {}}
    rate = BENCHMARKS[name].recipe.learning_rate
    grids = grids_of(name)
    if not methods and name not in TASKS:
        candidates = {
            rate: [spec for method in RATE_METHODS for spec in tuning.specs(method, rate)] for rate in LEARNING_RATES
        }
        record["learning_rate"] = tuning.choose(candidates)
        rate = record["learning_rate"]["chosen"]
        print(name, record["learning_rate"], flush=True)
    for method in methods or grids:
        option, values = grids[method]
        chosen = tuning.choose({value: tuning.specs(method, rate, {option: value}) for value in values})
        record["hyperparameters"][method] = chosen
        print(name, method, option, chosen, flush=True)
        write_atomically(tuning.store.root / f"{name}.json", json.dumps(record, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benchmarks", nargs="*", default=[benchmark.name for benchmark in EMBEDDED])
    parser.add_argument("--methods", type=lambda names: names.split(","), default=[])
    parser.add_argument("--data", help="folder of data sets")
    parser.add_argument("--workers", type=int, help="number of parallel runs (default: one per CPU)")
    parser.add_argument("--out", type=Path, default=Path("runs/tuning"), help="folder of runs")
    arguments = parser.parse_args()
    for name in arguments.benchmarks:
        if name not in SEEDS:
            parser.error(f"unknown benchmark {name!r}; {suggestion(name, SEEDS)}")
        for method in set(arguments.methods) - grids_of(name).keys():
            parser.error(f"no grid of values for {method!r} on {name}; {suggestion(method, grids_of(name))}")
    store, local = Store(arguments.out), Local(data=arguments.data)
    try:
        store.make_writable()
        for name in arguments.benchmarks:
            tune(Tuning(name, store, local, arguments.workers), arguments.methods)
    except (SpecError, StoreError) as error:
        sys.exit(f"tune: {error}")


if __name__ == "__main__":
    main()

"""Choose the learning rate and the strength of each method on the validation streams.

    python experiments/tune.py split-digits permuted-digits
    python experiments/tune.py split-digits --methods sgp,owm
    python experiments/tune.py 10-split-cifar100-cpu --methods ewc --data FOLDER

All methods of a comparison share one learning rate: the one with the best mean validation accuracy over `gpm`,
`gpm-2x` and `gpm+became`. With it, each method gets the strength with the best validation accuracy, alone, without a
second stage: EWC and SI lambda, LwF alpha, patterns in memory of A-GEM per task and of replay in all; alpha of SGP,
GPCNS and OWM, the trust threshold of TRGP, a of NSCL. Seeds are ones that no table uses. What was tried is recorded in
experiments/tuning/<benchmark>.json, and what was chosen stands in became_avalanche/runs/presets.py. Memories are
limited to the largest in the grid: more would always be better. With --methods, only their strengths are chosen, and
what the record already has is not trained again. CIFAR-100 is tuned on its first three tasks.
"""

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import torch

from became_avalanche.runs.catalogue import BENCHMARKS, EMBEDDED
from became_avalanche.runs.train import train

SEEDS = {"split-digits": (100, 101, 102), "permuted-digits": (100,), "10-split-cifar100-cpu": (100,)}
"""There are 36, 180 and 250 validation images per task."""
TASKS = {"10-split-cifar100-cpu": 3}
LEARNING_RATES = (0.03, 0.1, 0.3)
JUDGES = ("gpm", "gpm-2x", "gpm+became")
STRENGTHS = {
    "ewc": (100, 1000, 10000, 100000),
    "si": (10, 100, 1000, 10000),
    "lwf": (0.3, 1, 3, 10),
    "agem": (10, 20, 40),
    "er": (50, 100, 200),
    "sgp": (10, 1, 3, 30, 100),
    "trgp": (0.5, 0.2, 0.8),
    "gpcns": (5, 0.3, 1, 25, 100),
    "nscl": (10, 1, 3, 100, 1000, 10000, 100000),
    "owm": (1, 0.1, 10, 100, 1000),
}
"""The first of equals is chosen; of the projection methods that is the default."""
CIFAR_STRENGTHS = {"ewc": (10, 100, 1000, 10000)}


def validation_accuracy(
    name: str, data: str | None, method: str, learning_rate: float, strength: float | None, seed: int
) -> float:
    torch.set_num_threads(1)
    preset = BENCHMARKS[name].scaled(TASKS.get(name)).at(data)
    lr_min = preset.recipe.lr_min * learning_rate / preset.recipe.learning_rate
    recipe = replace(preset.recipe, learning_rate=learning_rate, lr_min=lr_min)
    strengths = {} if strength is None else {method: strength}
    try:
        return train(replace(preset, recipe=recipe, strengths=strengths), method, seed).valid_acc
    except ValueError:  # diverged: too strong a penalty for this learning rate
        return 0.0


def tune(name: str, data: str | None, methods: list[str], pool: ProcessPoolExecutor) -> None:
    path = Path(__file__).parent / "tuning" / f"{name}.json"
    record = {"benchmark": name, "seeds": SEEDS[name], "strengths": {}}
    if methods and path.exists():
        record = json.loads(path.read_text())

    def submit(method, rate, strength=None):
        return [pool.submit(validation_accuracy, name, data, method, rate, strength, seed) for seed in SEEDS[name]]

    def chosen(candidates, known):
        """The candidate with the best mean validation accuracy, and all of them."""
        runs = {c: submit_all() for c, submit_all in candidates.items() if str(c) not in known}
        scores = {c: known.get(str(c)) or round(mean(run.result() for run in runs[c]), 4) for c in candidates}
        return {"chosen": max(scores, key=scores.get), "tried": {str(c): score for c, score in scores.items()}}

    if not methods:
        record["learning_rate"] = chosen(
            {rate: lambda rate=rate: [run for m in JUDGES for run in submit(m, rate)] for rate in LEARNING_RATES}, {}
        )
        print(name, record["learning_rate"], flush=True)
    rate = record["learning_rate"]["chosen"] if "learning_rate" in record else BENCHMARKS[name].recipe.learning_rate
    grid = CIFAR_STRENGTHS if name in TASKS else STRENGTHS
    for method in methods or grid:
        record["strengths"][method] = chosen(
            {strength: partial(submit, method, rate, strength) for strength in grid[method]},
            record["strengths"].get(method, {}).get("tried", {}),
        )
        print(name, method, record["strengths"][method], flush=True)
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("benchmarks", nargs="*", default=[preset.name for preset in EMBEDDED])
    parser.add_argument("--methods", type=lambda names: names.split(","), default=[])
    parser.add_argument("--data", help="folder of data sets")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for benchmark in arguments.benchmarks:
            tune(benchmark, arguments.data, arguments.methods, pool)

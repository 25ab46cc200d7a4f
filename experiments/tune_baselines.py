"""Choose the learning rate and the strength of each baseline on the validation streams.

    python experiments/tune_baselines.py split-digits permuted-digits

All methods of a comparison share one learning rate: the one with the best mean validation accuracy over `gpm`,
`gpm-2x` and `gpm+became`. With it, each of Avalanche's baselines gets the strength (EWC and SI lambda, LwF alpha,
patterns in memory of A-GEM per task and of replay in all) with the best validation accuracy. Seeds are ones that no
table uses. What was tried is recorded in experiments/tuning/<benchmark>.json, and what was chosen stands in
became_avalanche/runs/presets.py. Memories are limited to the largest in the grid: more would always be better.
"""

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from statistics import mean

import torch

from became_avalanche.runs.presets import BENCHMARKS
from became_avalanche.runs.train import train

SEEDS = {"split-digits": (100, 101, 102), "permuted-digits": (100,)}  # 36 and 180 validation images per task
LEARNING_RATES = (0.03, 0.1, 0.3)
JUDGES = ("gpm", "gpm-2x", "gpm+became")
STRENGTHS = {
    "ewc": (100, 1000, 10000, 100000),
    "si": (10, 100, 1000, 10000),
    "lwf": (0.3, 1, 3, 10),
    "agem": (10, 20, 40),
    "er": (50, 100, 200),
}


def validation_accuracy(name: str, method: str, learning_rate: float, strength: float | None, seed: int) -> float:
    torch.set_num_threads(1)
    preset = BENCHMARKS[name]
    recipe = replace(preset.recipe, learning_rate=learning_rate, lr_min=learning_rate / 20)
    strengths = {} if strength is None else {method: strength}
    try:
        return train(replace(preset, recipe=recipe, strengths=strengths), method, seed).valid_acc
    except ValueError:  # diverged: too strong a penalty for this learning rate
        return 0.0


def tune(name: str, pool: ProcessPoolExecutor) -> None:
    def submit(method, rate, strength=None):
        return [pool.submit(validation_accuracy, name, method, rate, strength, seed) for seed in SEEDS[name]]

    def chosen(candidates):
        """The candidate with the best mean validation accuracy, and all of them."""
        scores = {c: round(mean(run.result() for run in runs), 4) for c, runs in candidates.items()}
        return {"chosen": max(scores, key=scores.get), "tried": {str(c): score for c, score in scores.items()}}

    record = {"benchmark": name, "seeds": SEEDS[name], "strengths": {}}
    record["learning_rate"] = chosen(
        {rate: [run for method in JUDGES for run in submit(method, rate)] for rate in LEARNING_RATES}
    )
    rate = record["learning_rate"]["chosen"]
    print(name, record["learning_rate"], flush=True)
    for method, grid in STRENGTHS.items():
        record["strengths"][method] = chosen({strength: submit(method, rate, strength) for strength in grid})
        print(name, method, record["strengths"][method], flush=True)
    path = Path(__file__).parent / "tuning" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for benchmark in sys.argv[1:] or BENCHMARKS:
            tune(benchmark, pool)

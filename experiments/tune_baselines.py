"""Choose the learning rate and the strength of each baseline on the validation streams.

    python experiments/tune_baselines.py split-digits permuted-digits

The learning rate is the one that is best for plain GPM, so that it favours BECAME's own baseline. Then each of
Avalanche's baselines gets the strength (EWC and SI lambda, LwF alpha, patterns in memory of A-GEM per task and of
replay in all) with the best mean validation accuracy over two seeds that no table uses. What was tried is recorded in
experiments/tuning/<benchmark>.json, and what was chosen stands in became_avalanche/runs/presets.py. Memories are
limited to the largest in the grid: more would always be better.
"""

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch

from became_avalanche.runs.presets import BENCHMARKS
from became_avalanche.runs.train import train

SEEDS = (100, 101)
LEARNING_RATES = (0.03, 0.1, 0.3, 1.0)
STRENGTHS = {
    "ewc": (100, 1000, 10000, 100000),
    "si": (10, 100, 1000, 10000, 100000),
    "lwf": (0.3, 1, 3),
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
    def scores(method, candidates):
        """Mean validation accuracy of each (learning rate, strength)."""
        runs = {c: [pool.submit(validation_accuracy, name, method, *c, seed) for seed in SEEDS] for c in candidates}
        return {c: sum(run.result() for run in each) / len(SEEDS) for c, each in runs.items()}

    rates = scores("gpm", [(rate, None) for rate in LEARNING_RATES])
    rate, _ = max(rates, key=rates.get)
    record = {
        "benchmark": name,
        "seeds": SEEDS,
        "learning_rate": {"chosen": rate, "tried": {str(r): round(score, 4) for (r, _), score in rates.items()}},
        "strengths": {},
    }
    print(name, record["learning_rate"], flush=True)
    for method, grid in STRENGTHS.items():
        tried = scores(method, [(rate, strength) for strength in grid])
        _, chosen = max(tried, key=tried.get)
        record["strengths"][method] = {
            "chosen": chosen,
            "tried": {str(strength): round(score, 4) for (_, strength), score in tried.items()},
        }
        print(name, method, record["strengths"][method], flush=True)
    path = Path(__file__).parent / "tuning" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for benchmark in sys.argv[1:] or BENCHMARKS:
            tune(benchmark, pool)

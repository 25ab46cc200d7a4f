"""Compare ways to merge on the same weights: labels and mode of the Fisher information, best or last weights.

    python -m experiments.merges 10-split-cifar100-cpu gpm+became --seeds 3 --tasks 3 --data FOLDER

One training serves all ways. It merges at the true labels in eval mode, so all ways see the same θ_GP, the same stage 2
and the same earlier tasks. Each estimator accumulates its own precision Λ along this training. For each merge, the
script records λ and the validation accuracy, averaged over the tasks so far, at θ_GP + λ Δ. It also records the λ with
the least training loss, summed over the tasks so far. Only an analysis can know that λ: it needs the data of old tasks.

Each seed is one file in experiments/results/merges, or in --out. Seeds that have a file are not trained again.
"""

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path
from statistics import mean

import torch

from became_avalanche import BecameMergePlugin, Fisher, Method, Session, find_benchmark
from became_avalanche.analysis.path import grid, measure, measure_path
from became_avalanche.merging.fisher import accumulate, zero_padded
from became_avalanche.merging.rules import became
from became_avalanche.results.statistics import paired
from became_avalanche.runs.method import MergeSettings
from became_avalanche.strategy.weights import interpolate, restore, snapshot, trainable

LABELS = {"true": "batched", "argmax": "batched-argmax", "drawn": "batched-sampled"}
MODES = ("eval", "train")
FIRST = ("true", "eval", "best")
RESULTS = Path(__file__).parent / "results" / "merges"


class EveryMerge(BecameMergePlugin):
    """Merges in one way, and measures where other settings would have merged."""

    def __init__(self, n_samples: int | None = None, **options) -> None:
        """Init.

        :param n_samples: samples per task for the estimators and for the training loss; None for all.
        :param options: options of ``BecameMergePlugin``.
        """
        super().__init__(**options)
        self.n_samples = n_samples
        self.precisions = defaultdict(dict)
        """Λ by labels and mode."""
        self.measured = []
        """One entry per merge."""

    def after_training_epoch(self, strategy, **kwargs):
        super().after_training_epoch(strategy, **kwargs)
        self._last = snapshot(strategy)  # PlateauPlugin restores the best weights later, since it is later in the list

    def after_training_exp(self, strategy, **kwargs):
        super().after_training_exp(strategy, **kwargs)
        for estimator in product(LABELS, MODES):
            self.precisions[estimator] = accumulate(self.precisions[estimator], self.fisher_by(strategy, *estimator))

    def choose_candidate(self, strategy, base):
        self._candidates = {"best": snapshot(strategy), "last": self._last}
        return self._candidates["best"]

    def on_merged(self, strategy, inputs, run):
        merged, experience = snapshot(strategy), strategy.experience
        benchmark = experience.logging().benchmark
        seen, valid = benchmark.train_stream[: inputs.t], benchmark.streams["valid"][: inputs.t]
        for which, theta_hat in self._candidates.items():
            path = replace(inputs, candidate=theta_hat)
            losses, _ = measure_path(strategy, path.base, theta_hat, grid(0.05), seen, self.n_samples)
            total = [sum(column) for column in zip(*losses, strict=True)]
            best = grid(0.05)[total.index(min(total))]
            for labels, mode in product(LABELS, MODES):
                restore(strategy, theta_hat)
                strategy.experience = experience
                fisher = self.fisher_by(strategy, labels, mode)
                known = self.precisions[labels, mode]
                precision = {name: zero_padded(known.get(name), diagonal) for name, diagonal in fisher.items()}
                coefficient = became(replace(path, fisher=fisher, precision=precision))
                restore(strategy, merge(path, coefficient))
                self.measured.append(
                    {
                        "t": inputs.t,
                        "labels": labels,
                        "mode": mode,
                        "weights": which,
                        "coefficient": coefficient,
                        "least_loss": best,
                        "valid_accuracy": mean(measure(strategy, task, None)[1] for task in valid),
                    }
                )
        restore(strategy, merged)
        strategy.experience = experience

    def fisher_by(self, strategy, labels, mode):
        """Return F at the current weights."""
        default, self.fisher = self.fisher, Fisher(LABELS[labels], self.n_samples, mode=mode)
        try:
            return self.estimate_fisher(strategy, trainable(strategy), num_workers=0)
        finally:
            self.fisher = default


def merge(path, coefficient):
    """Return the merged weights. Without projection, the new head comes from θ̂, as in ``BecameMergePlugin``."""
    merged = interpolate(path.base, path.candidate, coefficient, coefficient)
    if not path.projected:
        new = [name for name, diagonal in path.precision.items() if not diagonal.any()]
        merged.update({name: path.candidate[name] for name in new})
    return merged


def table(runs: list[dict]) -> str:
    """Return one line per way to merge: means over merges and seeds, and the gain over the way of the training."""
    ways = [(labels, mode, which) for which, labels, mode in product(("best", "last"), LABELS, MODES)]
    accuracy = {way: [100 * mean(e["valid_accuracy"] for e in _entries(run, way)) for run in runs] for way in ways}
    columns = f"{'labels':8}{'mode':7}{'weights':9}{'λ':>5}{'|λ − least loss|':>18}{'valid ACC %':>13}{'gain':>7}"
    lines = [f"{columns}  95 % interval"]
    for way in ways:
        entries = [entry for run in runs for entry in _entries(run, way)]
        coefficient = mean(entry["coefficient"] for entry in entries)
        distance = mean(abs(entry["coefficient"] - entry["least_loss"]) for entry in entries)
        gain = paired(accuracy[way], accuracy[FIRST])
        line = "{:8}{:7}{:9}".format(*way) + f"{coefficient:5.2f}{distance:18.2f}{mean(accuracy[way]):13.2f}"
        if way != FIRST:
            line += f"{gain.gain.mean:+7.2f}"
            line += "  {:+.2f} to {:+.2f}".format(*gain.interval) if gain.interval else ""
        lines.append(line)
    return "\n".join(lines)


def _entries(run: dict, way: tuple[str, str, str]) -> list[dict]:
    return [entry for entry in run["merges"] if (entry["labels"], entry["mode"], entry["weights"]) == way]


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare ways to merge on the same weights.")
    parser.add_argument("benchmark", help="see `became presets`")
    parser.add_argument("method", help="such as gpm+became, or finetune+became for merging without projection")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--tasks", type=int, help="number of tasks to train (default: all)")
    parser.add_argument("--samples", type=int, help="per task, for the estimators and the training loss (default: all)")
    parser.add_argument("--data", help="folder with cifar-100-python, for CIFAR-100")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    options = {"n_samples": arguments.samples, "fisher": {"name": "batched", "mode": "eval"}}
    method = Method.parse(
        arguments.method, merge=MergeSettings(plugin="experiments.merges:EveryMerge", options=options)
    )
    arguments.out.mkdir(parents=True, exist_ok=True)
    runs = []
    for seed in range(arguments.seeds):
        path = arguments.out / f"{arguments.benchmark}.{arguments.method}.seed{seed}.json"
        if not path.exists():
            spec = find_benchmark(arguments.benchmark).spec(method, seed, n_tasks=arguments.tasks)
            session = Session(spec, data=arguments.data)
            while not session.finished:
                session.step()
                print(f"{path.stem}: task {len(session.tasks)} of {spec.n_tasks}", flush=True)
            measured = next(plugin for plugin in session.method_plugins if hasattr(plugin, "measured")).measured
            content = {"benchmark": arguments.benchmark, "method": arguments.method, "seed": seed, "merges": measured}
            content |= {"n_tasks": spec.n_tasks, "n_samples": arguments.samples}
            path.write_text(json.dumps(content, indent=1) + "\n")
        runs.append(json.loads(path.read_text()))
    print(table(runs))


if __name__ == "__main__":
    main()

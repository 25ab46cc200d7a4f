"""Which change to BECAME makes it better? Each is tried alone, everything else equal, and judged on validation data.

    python experiments/became_plus.py split-digits
    python experiments/became_plus.py permuted-digits
    python experiments/became_plus.py split-cifar100 --data FOLDER --seeds 1

FOLDER holds torchvision's `cifar-100-python`. Results go to experiments/results/became-plus/<benchmark>.json, and a
table of them is printed.

All trials of a seed have their beginning in common, up to the first merge; it is computed once, and the process is
forked there. Numbers are those of separate runs.
"""

import argparse
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from multiprocessing import Semaphore
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from avalanche.training.plugins import SupervisedPlugin

from became_avalanche import BecameMergePlugin, Fisher, MultiHeadMLP, train
from became_avalanche.merging.fisher import Batch
from became_avalanche.strategy.passes import data_pass
from became_avalanche.strategy.weights import interpolate, restore, snapshot, trainable
from became_avalanche.runs.catalogue import BENCHMARKS, EMBEDDED, SMALL
from became_avalanche.runs.compare import Spread
from became_avalanche.runs.presets import BenchmarkPreset

RESULTS = Path(__file__).parent / "results" / "became-plus"


@dataclass(frozen=True)
class Trial:
    """What is done otherwise than in the paper, from the second task on."""

    projected: int = 1
    """Projected stages before the free one."""
    free: bool = True
    """Whether there is a free stage and a merge."""
    average: bool = False
    """θ̂ is the mean of the weights at the ends of the free stage's epochs."""
    fisher: str = "train"
    """Fisher information on training data; on validation data; with smoothed labels; at the middle of the path; in
    expectation over the model's labels, per sample; or at labels drawn from the model, per batch."""
    refit: bool = False
    """After the merge, train the current head for a few epochs with all else frozen."""
    after: int = 0
    """Projected stages after the merge."""


TRIALS = {
    "gpm": Trial(free=False),
    "gpm-2x": Trial(projected=2, free=False),
    "became": Trial(),
    "refit": Trial(refit=True),
    "average": Trial(average=True),
    "fisher on validation data": Trial(fisher="valid"),
    "fisher with smoothed labels": Trial(fisher="smooth"),
    "fisher at the middle": Trial(fisher="middle"),
    "fisher at drawn labels": Trial(fisher="drawn"),
    "exact fisher": Trial(fisher="exact"),
    "projected stage after the merge": Trial(after=1),
}

REFIT_EPOCHS = 5


class Forks:
    """Splits this process into one per trial, of which at most ``jobs`` run at a time."""

    def __init__(self, jobs: int) -> None:
        self.slots = Semaphore(jobs)
        self.children: list[int] = []

    def split(self, names: list[str]) -> str | None:
        """The name of the child's trial, or None in the parent."""
        for name in names:
            child = os.fork()
            if child == 0:
                self.children = []
                self.slots.acquire()
                return name
            self.children.append(child)
        return None

    def wait(self) -> None:
        self.slots.release()
        failed = [child for child in self.children if os.waitpid(child, 0)[1] != 0]
        self.children = []
        if failed:
            raise SystemExit(f"{len(failed)} trials failed; see above")


class Branching(BecameMergePlugin):
    """BECAME, or what a trial makes of it."""

    def __init__(self, names: list[str], forks: Forks) -> None:
        super().__init__()
        self.names, self.forks = names, forks
        self.name: str | None = None
        self.trial = Trial()
        self.epoch_ends = EpochEnds()
        self.middle: dict[str, torch.Tensor] | None = None
        self.first_precision: dict[str, dict[str, torch.Tensor]] = {}

    def branch(self, free: bool) -> None:
        if self.name is None:
            self.name = self.forks.split([name for name in self.names if TRIALS[name].free == free])
            if self.name is not None:
                self.trial = TRIALS[self.name]
                self.precision = self.first_precision[self.trial.fisher]

    def run_stages(self, strategy: Any, run: Callable[[int], None], **kwargs: Any) -> None:
        theta_previous = snapshot(strategy)
        run(1)
        if self.t == 0:
            kinds = {TRIALS[name].fisher for name in self.names} | {"train"}
            for kind in kinds:  # before it is known which one it will be
                self.trial = Trial(fisher=kind)
                self.first_precision[kind] = self._fisher(strategy, theta_previous, 0)
            self.trial = Trial()
            return
        self.branch(free=False)
        for stage in range(2, self.trial.projected + 1):
            run(stage)
        if not self.trial.free:
            return
        theta_gp = snapshot(strategy)
        self.epoch_ends.clear()
        with self._free_training(strategy):
            run(2)
        self.branch(free=True)
        if self.name is None:
            raise NothingLeftError
        if self.trial.average:
            restore(strategy, self.epoch_ends.mean())
        self.middle = None
        if self.trial.fisher == "middle":
            self.middle = interpolate(theta_gp, snapshot(strategy), 0.5, 0.5)
        self._merge(strategy, theta_previous, theta_gp, 0)
        if self.trial.refit:
            self.refit(strategy, run)
        for stage in range(self.trial.after):
            run(3 + stage)

    def refit(self, strategy: Any, run: Callable[[int], None]) -> None:
        others = [p for name, p in trainable(strategy).items() if name in self.known]
        epochs = strategy.train_epochs
        with self._free_training(strategy):
            try:
                strategy.train_epochs = REFIT_EPOCHS
                for parameter in others:
                    parameter.requires_grad_(False)
                run(3)
            finally:
                strategy.train_epochs = epochs
                for parameter in others:
                    parameter.requires_grad_(True)

    def _merge(self, strategy: Any, theta_previous: Any, theta_gp: Any, workers: int) -> None:
        self.known = {name for name, diagonal in self.precision.items() if diagonal.any()}
        super()._merge(strategy, theta_previous, theta_gp, workers)

    def _fisher(self, strategy: Any, names: Any, workers: int) -> dict[str, torch.Tensor]:
        if self.trial.fisher == "train":
            return super()._fisher(strategy, names, workers)
        here = snapshot(strategy)
        if self.middle is not None:
            restore(strategy, self.middle)
            self.middle = None  # F at θ* is at θ*
        parameters = {name: parameter for name, parameter in trainable(strategy).items() if name in names}
        dataset = strategy.experience.dataset
        if self.trial.fisher == "valid":
            experience = strategy.experience.logging()
            dataset = experience.origin_stream.benchmark.streams["valid"][experience.current_experience].dataset
        smoothing = 0.1 if self.trial.fisher == "smooth" else 0.0
        likelihood = torch.nn.CrossEntropyLoss(label_smoothing=smoothing)

        def forward_passes(batches):
            for _ in batches:
                logits, labels = strategy.mb_output, strategy.mb_y
                if self.trial.fisher == "drawn":
                    labels = torch.multinomial(logits.detach().softmax(-1), 1)[:, 0]
                yield Batch(likelihood(logits, labels), logits, labels)

        estimator = Fisher("exact" if self.trial.fisher == "exact" else "batched")
        with data_pass(strategy, dataset, strategy.train_mb_size) as batches:
            fisher = estimator(forward_passes(batches), strategy.model, parameters)
        restore(strategy, here)
        return fisher


class NothingLeftError(Exception):
    """The parent has nothing left to do itself."""


class EpochEnds(SupervisedPlugin):
    """The mean of the weights at the ends of epochs."""

    def clear(self) -> None:
        self.total, self.count = {}, 0

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def before_training_epoch(self, strategy: Any, **kwargs: Any) -> None:
        if strategy.clock.train_exp_epochs > 0:
            self.add(strategy)

    def add(self, strategy: Any) -> None:
        weights = snapshot(strategy)
        self.total = {name: self.total.get(name, 0) + weight for name, weight in weights.items()}
        self.count += 1

    def mean(self) -> dict[str, torch.Tensor]:
        """Nothing, if there was one epoch only."""
        return {name: total / self.count for name, total in self.total.items() if total.is_floating_point()}


def run_seed(preset: BenchmarkPreset, names: list[str], seed: int, forks: Forks, folder: Path) -> None:
    forks.slots.acquire()
    plugin = Branching(names, forks)
    try:
        result = train(preset, "gpm", seed, plugins=[plugin, plugin.epoch_ends])
    except NothingLeftError:
        forks.wait()
        return
    content = asdict(result) | {"method": plugin.name, "merges": [asdict(record) for record in plugin.merges]}
    path = folder / f"{plugin.name}-{seed}.json"
    path.with_suffix(".partial").write_text(json.dumps(content))
    path.with_suffix(".partial").replace(path)
    print(f"{preset.name} seed {seed} {plugin.name}: valid {100 * result.valid_acc:.2f}", flush=True)
    forks.slots.release()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("benchmark", choices=[*(preset.name for preset in EMBEDDED), "split-cifar100"])
    parser.add_argument("--data", help="folder with cifar-100-python")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--trials", type=lambda names: names.split(";"), help="separated by semicolons; default: all")
    parser.add_argument("--jobs", type=int, default=2, help="trials at a time, of one thread each")
    parser.add_argument("--folder", type=Path, help="where finished trials are kept until all are there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.benchmark == "split-cifar100":
        preset = replace(SMALL.scaled(tasks=3).at(arguments.data), name="split-cifar100")
    else:
        preset = BENCHMARKS[arguments.benchmark]
    folder = arguments.folder or RESULTS / preset.name
    for each in (folder, RESULTS):
        each.mkdir(parents=True, exist_ok=True)
    forks = Forks(arguments.jobs)
    coupled = (
        preset.model is not MultiHeadMLP
    )  # AlexNet normalises with batch statistics: no gradients of single samples
    possible = [name for name, trial in TRIALS.items() if not (coupled and trial.fisher == "exact")]
    names, seeds = arguments.trials or possible, range(arguments.seeds)
    for seed in seeds:
        missing = [name for name in names if not (folder / f"{name}-{seed}.json").exists()]
        if missing:
            run_seed(preset, missing, seed, forks, folder)
    runs = [json.loads((folder / f"{name}-{seed}.json").read_text()) for name in names for seed in seeds]
    content = {"recipe": asdict(preset.recipe), "tasks": preset.n_tasks, "runs": runs}
    (RESULTS / f"{preset.name}.json").write_text(json.dumps(content, indent=1) + "\n")
    print(table(runs))


def table(runs: list[dict[str, Any]]) -> str:
    """Validation accuracy of each trial, and what it gains over the paper's merge and over equal training."""
    by_trial: dict[str, dict[int, dict[str, Any]]] = {}
    for run in runs:
        by_trial.setdefault(run["method"], {})[run["seed"]] = run

    def gain(trial: str, over: str) -> str:
        ours, theirs = by_trial[trial], by_trial[over]
        return Spread.of([ours[seed]["valid_acc"] - theirs[seed]["valid_acc"] for seed in ours]).percent("+")

    lines = [f"{'':32} {'valid %':>14} {'over became':>14} {'over gpm-2x':>14} {'test %':>14} {'epochs':>6}"]
    for trial, of_seed in by_trial.items():
        valid, test = (Spread.of([run[key] for run in of_seed.values()]).percent() for key in ("valid_acc", "acc"))
        epochs = mean(sum(map(sum, run["epochs"])) for run in of_seed.values())
        gains = [gain(trial, other) if other != trial else "–" for other in ("became", "gpm-2x")]
        lines.append(f"{trial:32} {valid:>14} {gains[0]:>14} {gains[1]:>14} {test:>14} {epochs:6.0f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Where on the path does each estimator of the Fisher information merge, and where is the loss least?

    python experiments/paths.py --data FOLDER --epochs 8

AlexNet on the first five tasks of 20-Split CIFAR-100 with GPM and BECAME, each stage to a plateau or to so many epochs:
four merges. FOLDER holds torchvision's `cifar-100-python`. Writes paths.json and paths.png to runs/paths, or to --out.
The scans in experiments/results/paths are those of docs/merging-results.md.

`batched` is the estimator that made the merges. Each of the others accumulates a precision of its own. The network
normalises with the statistics of the batch, where gradients of single samples do not exist. So `empirical`, `sampled`
and `exact` look at the same weights with the mean statistics of the task's training data instead.
"""

import argparse
import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import torch
from avalanche.training.plugins import SupervisedPlugin
from torch.nn import functional as F

from became_avalanche import AlexNet, BecameMergePlugin, Fisher, Method, find_benchmark, path_figure, scan_path
from became_avalanche.merging.fisher import Batch, accumulate, zero_padded
from became_avalanche.merging.rules import became
from became_avalanche.runs.session import Session

PER_SAMPLE = ("empirical", "sampled", "exact")


class Paths(SupervisedPlugin):
    """Scans the path of each merge, and computes λ as it would be with each estimator."""

    def __init__(self, n_samples: int) -> None:
        super().__init__()
        self.n_samples = n_samples
        self.precision = {name: {} for name in ("batched-sampled", *PER_SAMPLE)}
        self.scans, self.marks = [], []

    def after_training_exp(self, strategy, **kwargs):
        merge = next(plugin for plugin in strategy.plugins if isinstance(plugin, BecameMergePlugin))
        path = merge.last_merge
        if path is not None:
            marks = {"batched": merge.merges[-1].coefficient}
            for name, fisher in self.fishers(strategy, path.candidate).items():
                precision = {key: zero_padded(self.precision[name].get(key), value) for key, value in fisher.items()}
                marks[name] = became(replace(path, fisher=fisher, precision=precision))
            seen = strategy.experience.logging().origin_stream[: path.t]
            self.scans.append(scan_path(strategy, merge, seen, n_samples=self.n_samples))
            self.marks.append(marks)
            print(path.t, marks, "least loss at", self.scans[-1].best, flush=True)
        for name, fisher in self.fishers(strategy, strategy.model.state_dict()).items():
            self.precision[name] = accumulate(self.precision[name], fisher)

    def fishers(self, strategy, weights):
        """F at ``weights`` by each estimator, on samples of the current task."""
        dataset = strategy.experience.dataset.eval()
        chosen = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(0))[: self.n_samples].tolist()
        batches = [dataset.collate_fn([dataset[i] for i in chosen[k : k + 64]]) for k in range(0, len(chosen), 64)]

        def passes(model):
            for x, y, task in batches:
                logits = model(x, task)
                yield Batch(F.cross_entropy(logits, y), logits, y)

        coupled = deepcopy(strategy.model).eval()
        coupled.load_state_dict({name: weights[name] for name in coupled.state_dict()})
        independent = AlexNet(running_statistics=True)
        independent.classifier = coupled.classifier
        independent.load_state_dict(coupled.state_dict(), strict=False)
        independent.eval()
        for layer in independent.modules():
            if isinstance(layer, torch.nn.modules.batchnorm._BatchNorm):
                layer.momentum = None  # a plain mean over the batches
                layer.train()
        with torch.no_grad():
            for x, _, task in batches:
                independent(x, task)
        models = {"batched-sampled": coupled, **dict.fromkeys(PER_SAMPLE, independent.eval())}
        return {
            name: Fisher(name)(passes(model), model, dict(model.named_parameters())) for name, model in models.items()
        }


def main() -> None:
    benchmark = find_benchmark("20-split-cifar100-cpu")
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True, help="folder with cifar-100-python")
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=benchmark.recipe.epochs)
    parser.add_argument("--samples", type=int, default=500, help="per task, for the scan and the estimators")
    parser.add_argument("--out", type=Path, default=Path("runs/paths"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    method = Method.parse("gpm+became", merge={"options": {"fisher": {"name": "batched", "mode": "eval"}}})
    spec = benchmark.spec(method, n_tasks=arguments.tasks, max_epochs=arguments.epochs)
    paths = Paths(arguments.samples)
    session = Session(spec, data=arguments.data, plugins=[paths], keep="endpoints")
    while not session.finished:
        session.step()
    arguments.out.mkdir(parents=True, exist_ok=True)
    content = [
        {**scan.model_dump(exclude={"n_samples"}), "estimates": marks}
        for scan, marks in zip(paths.scans, paths.marks, strict=True)
    ]
    (arguments.out / "paths.json").write_text(json.dumps(content, indent=1) + "\n")
    path_figure(paths.scans, paths.marks).savefig(arguments.out / "paths.png", dpi=150)
    print(table(content))


def table(paths: list[dict]) -> str:
    """For each task the λ of each estimator, where the loss of all tasks is least, and both forms of Δᵀ F Δ."""
    estimators = list(paths[0]["estimates"])
    lines = [f"task {' '.join(f'{name:>15}' for name in estimators)}  least loss  diagonal   whole"]
    for path in paths:
        values = " ".join(f"{path['estimates'][name]:15.2f}" for name in estimators)
        losses = [sum(column) for column in zip(*path["loss"], strict=True)]
        best = path["coefficients"][losses.index(min(losses))]
        lines.append(f"{path['t']:4} {values} {best:11.2f} {path['plasticity']:9.4f} {path['curvature']:7.3f}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()

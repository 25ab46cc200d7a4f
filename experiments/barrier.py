"""What raises the barrier on the path of a merge of LeNet? Variants of the first two tasks of the superclasses.

    python -m experiments.barrier --data FOLDER

With heads that PyTorch draws, "plain heads", there is a barrier. In the preset `cifar100-superclass-scrambled` the
heads are drawn by Kaiming's rule, as in the published code. The other variants have plain heads and change one more
thing. After the merge of task 2, the script measures loss and accuracy of both tasks along the path from θ_GP to θ̂,
on training images.

Each variant and seed is one file in experiments/results/barrier, or in --out. Files that exist are not measured again.
paths.png shows the first two variants.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from became_avalanche import (
    BecameMergePlugin,
    LeNet,
    Method,
    PathScan,
    RunSpec,
    Session,
    find_benchmark,
    path_figure,
    scan_path,
)
from became_avalanche.files import write_atomically
from became_avalanche.models.lrn import LocalResponseNorm
from became_avalanche.results.scans import read_scan
from became_avalanche.runs.spec import Network

RESULTS = Path(__file__).parent / "results" / "barrier"


class Centred(nn.Module):
    """Subtracts the mean pixel of CIFAR-100. Scrambled images mix the colours, so all channels have the same mean."""

    def forward(self, x: Tensor) -> Tensor:
        """Centre images with pixels between 0 and 1."""
        return x - 0.478


class CentredLeNet(LeNet):
    """LeNet that centres its images."""

    def __init__(self, **options: Any) -> None:
        """Init, with the options of ``LeNet``."""
        super().__init__(**options)
        self.features = nn.Sequential(Centred(), *self.features)


class BatchNormLeNet(LeNet):
    """LeNet with batch normalisation instead of local response normalisation."""

    def __init__(self, **options: Any) -> None:
        """Init, with the options of ``LeNet``."""
        super().__init__(**options)
        widths = iter((20, 50))
        for i, layer in enumerate(self.features):
            if isinstance(layer, LocalResponseNorm):
                self.features[i] = nn.BatchNorm2d(next(widths), track_running_stats=False)


BENCHMARK = "cifar100-superclass-scrambled"


def preset(seed: int) -> RunSpec:
    """Return two tasks of the preset, in the order of ``seed``."""
    return find_benchmark(BENCHMARK).spec("gpm+became", seed, n_tasks=2)


def plain_heads(seed: int, benchmark: str = BENCHMARK, network: str = "lenet", rate: float = 1.0) -> RunSpec:
    """Return two tasks of the preset with heads that PyTorch draws, in the order of ``seed``."""
    method = Method.parse("gpm+became", merge={"options": {"rate": rate}})
    own_network = Network(name=network, options={"head_bias": False})
    return find_benchmark(benchmark).spec(method, seed, n_tasks=2, network=own_network)


VARIANTS: Mapping[str, Callable[[int], RunSpec]] = {
    "plain-heads": plain_heads,
    "preset": preset,
    "plain-heads-and-right-images": lambda seed: plain_heads(seed, benchmark="cifar100-superclass"),
    "plain-heads-and-centred-pixels": lambda seed: plain_heads(seed, network="experiments.barrier:CentredLeNet"),
    "plain-heads-and-batch-normalisation": lambda seed: plain_heads(seed, network="experiments.barrier:BatchNormLeNet"),
    "plain-heads-and-lower-rate-in-stage-2": lambda seed: plain_heads(seed, rate=0.1),
}


def measure(spec: RunSpec, data: str | None, n_samples: int | None) -> PathScan:
    """Train a run and return the path of its last merge."""
    session = Session(spec, data=data, keep="endpoints")
    while not session.finished:
        session.step()
    merge = next(plugin for plugin in session.method_plugins if isinstance(plugin, BecameMergePlugin))
    return scan_path(session.strategy, merge, session.stream.train_stream[: spec.n_tasks], n_samples=n_samples)


def table(scans: Mapping[str, PathScan]) -> str:
    """Return one row per merge, with training accuracies in percent."""
    lines = [
        "| variant | order | λ | new task: θ_GP | merged | θ̂ | barrier | old task: θ_GP | merged |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, scan in scans.items():
        variant, seed = name.rsplit(".seed", 1)
        old, new = ([100 * value for value in row] for row in (scan.accuracy[0], scan.accuracy[-1]))
        merged_old, merged_new = (float(np.interp(scan.chosen, scan.coefficients, row)) for row in (old, new))
        measured = (new[0], merged_new, new[-1], barrier(scan), old[0], merged_old)
        values = (variant.replace("-", " "), seed, scan.chosen, *measured)
        lines.append("| {} | {} | {:.2f} | {:.1f} | {:.1f} | {:.1f} | {:.2f} | {:.1f} | {:.1f} |".format(*values))
    return "\n".join(lines)


def barrier(scan: PathScan) -> float:
    """Return how far the loss of the new task rises above the straight line between the losses of both ends."""
    loss = scan.loss[-1]
    return max(
        value - (1 - coefficient) * loss[0] - coefficient * loss[-1]
        for coefficient, value in zip(scan.coefficients, loss, strict=True)
    )


def draw(scans: Mapping[str, PathScan]) -> Figure:
    """Draw the paths of the first two variants in the first order, with the same scale."""
    names = list(VARIANTS)[:2]
    figure = path_figure([scans[f"{name}.seed0"] for name in names])
    limits = [limit for axes in figure.axes for limit in axes.get_ylim()]
    for axes, name in zip(figure.axes, names, strict=True):
        axes.set(title=name.replace("-", " "), ylim=(min(limits), max(limits)))
    if legend := figure.axes[0].get_legend():  # it would cover the lines
        legend.remove()
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def main() -> None:
    """Measure the missing variants, draw the figure and print the table."""
    parser = argparse.ArgumentParser(description="What raises the barrier on the path of a merge of LeNet?")
    parser.add_argument("--data", required=True, help="folder with cifar-100-python")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds; each has another order (default: 1)")
    parser.add_argument("--samples", type=int, default=1000, help="images per task for the path (default: 1000)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    scans = {}
    for seed in range(arguments.seeds):
        for variant, specification in VARIANTS.items():
            name = f"{variant}.seed{seed}"
            path = arguments.out / f"{name}.json"
            if not path.exists():
                write_atomically(path, measure(specification(seed), arguments.data, arguments.samples).to_json())
            scans[name] = read_scan(PathScan, path)
            print(table({name: scans[name]}), flush=True)
    draw(scans).savefig(arguments.out / "paths.png", dpi=110)
    print(table(scans))


if __name__ == "__main__":
    main()

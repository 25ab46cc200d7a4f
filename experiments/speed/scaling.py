"""Draw how costs grow with the number of tasks and with the width of layers.

    python experiments/speed/scaling.py [--data FOLDER] [--plot]

Writes scaling.json next to this file, and docs/images/speed-tasks.png and speed-width.png. ``--plot`` measures nothing
and only draws scaling.json. One thread; ratios and seconds of CPU time are medians over interleaved repeats.
"""

import argparse
import json
import warnings
from functools import partial
from pathlib import Path
from statistics import median

import many_tasks
import projection
import rows as speed
import torch
from matplotlib import pyplot as plt
from matplotlib.ticker import NullLocator, ScalarFormatter
from memory_update import by_svd, update
from rows import cpu_times

from became_avalanche import AlexNet, GPMPlugin, MultiHeadNetwork
from became_avalanche.layers.linear import LinearLayer
from became_avalanche.results.figures import COLORS, LINES, MARKERS, STYLE

RESULTS = Path(__file__).with_name("scaling.json")
WIDTHS = (256, 512, 1024, 2048)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", type=Path, help="folder with cifar-100-python; random images without it")
    parser.add_argument("--plot", action="store_true", help="only draw scaling.json, measure nothing")
    arguments = parser.parse_args()
    if not arguments.plot:
        warnings.filterwarnings("ignore")
        torch.set_num_threads(1)
        speed.DATA = arguments.data
        RESULTS.write_text(json.dumps({"tasks": tasks(), "width": width()}, indent=1) + "\n")
    draw(json.loads(RESULTS.read_text()))


def tasks() -> dict:
    """Return ratios of projected to plain steps after each task of AlexNet, and seconds of 50 synthetic tasks."""
    numbers, names = tuple(range(1, 11)), tuple(projection.OPTIMIZERS)
    found = projection.measured("AlexNet", AlexNet, GPMPlugin(), 64, numbers, names, repeats=7)
    steps = {name: [row.value for row in found[k :: len(names)]] for k, name in enumerate(names)}
    seconds, ranks = many_tasks.measured(epochs=5)
    return {"images": speed.kind_of_images(), "steps": steps, "seconds": seconds, "ranks": [sum(r) for r in ranks]}


def width() -> dict:
    """Return ratios of projected to plain steps, with half of all directions protected, and seconds of updates."""
    names = tuple(projection.OPTIMIZERS)
    steps: dict[str, list[float]] = {name: [] for name in names}
    updates: dict[str, list[float]] = {"here": [], "singular value decomposition": []}
    for d in WIDTHS:
        layers = [torch.nn.Flatten(), torch.nn.Linear(3072, d)]
        for _ in range(2):
            layers += [torch.nn.ReLU(), torch.nn.Linear(d, d)]
        make = partial(MultiHeadNetwork, torch.nn.Sequential(*layers), d)
        plugin = HalfProtected(exclude=["features.1"])  # all protected layers have d inputs
        for name, row in zip(names, projection.measured("", make, plugin, 64, (1,), names, 7), strict=True):
            steps[name].append(row.value)
        for name, seconds in update_seconds(d).items():
            updates[name].append(median(seconds))
    return {"widths": WIDTHS, "steps": steps, "updates": updates}


def update_seconds(d: int) -> dict[str, list[float]]:
    """Return CPU seconds of the update after the second task, for a layer with ``d`` inputs and ``2 d`` samples."""
    torch.manual_seed(0)
    layer = LinearLayer(torch.nn.Linear(d, d))
    first, second = (torch.randn(2 * d, d) @ torch.diag(torch.logspace(0, -2, d)) for _ in range(2))
    basis = update(layer, first, None, 0.97)
    oracle = partial(by_svd, layer, second, basis, 0.973)
    return cpu_times({"here": lambda: update(layer, second, basis, 0.973), "singular value decomposition": oracle}, 3)


class HalfProtected(GPMPlugin):
    """GPM that protects a random half of the input directions of each layer."""

    def update_memory(self, name, observed) -> None:
        d = observed.empty_basis().shape[-2]
        self.memory[name] = {"basis": torch.linalg.qr(torch.randn(1, d, d // 2)).Q}


def draw(found: dict) -> None:
    """Draw the two figures."""
    folder = speed.DOCS / "images"
    tasks, width = found["tasks"], found["width"]
    with plt.rc_context(STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
        ratios(left, range(1, 11), tasks["steps"])
        left.set(xlabel="tasks in memory", title=f"AlexNet, batch 64, GPM, {tasks['images']}")
        right.plot(range(1, len(tasks["seconds"]) + 1), tasks["seconds"], color=COLORS[0], label="CPU time of the task")
        right.set(xlabel="task", ylabel="seconds", ylim=(0, None), title="50 synthetic tasks, GPM + BECAME")
        twin = right.twinx()
        twin.plot(range(1, len(tasks["ranks"]) + 1), tasks["ranks"], color=COLORS[1], linestyle="--")
        twin.set(ylabel="protected directions (dashed)", ylim=(0, None))
        twin.spines["right"].set_visible(True)
        figure.savefig(folder / "speed-tasks.png", dpi=110)

        figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
        ratios(left, width["widths"], width["steps"])
        left.set(xlabel="width of the layers", title="Linear layers, batch 64, half protected")
        for k, (name, seconds) in enumerate(width["updates"].items()):
            right.plot(width["widths"], seconds, LINES[k], marker=MARKERS[k], color=COLORS[k], label=name)
        right.set(xlabel="width of the layer", ylabel="seconds", yscale="log", title="Memory update of GPM, 2 d inputs")
        right.legend()
        for ax in (left, right):
            ax.set_xscale("log")
            ax.xaxis.set_major_formatter(ScalarFormatter())
            ax.xaxis.set_minor_locator(NullLocator())
            ax.set_xticks(width["widths"])
        figure.savefig(folder / "speed-width.png", dpi=110)


def ratios(ax, x, steps: dict[str, list[float]]) -> None:
    for k, (name, values) in enumerate(steps.items()):
        ax.plot(x, values, LINES[k], marker=MARKERS[k], color=COLORS[k], label=name)
    ax.axhline(1, color="0.7", linewidth=0.8)
    largest = max(value for values in steps.values() for value in values)
    ax.set(ylabel="projected / plain step", ylim=(0.9, 1.25 * largest))  # room for the legend
    ax.legend(loc="upper left")


if __name__ == "__main__":
    main()

"""Measure the memory that each method holds between tasks, with the network and settings of 20-Split miniImageNet.

    python experiments/memory.py

The script measures memory, not accuracy, so it uses a few synthetic images and trains briefly. The size of a basis of
inputs depends on how far training moves the network away from its initialisation. So methods with such a basis are run
twice: with the papers' learning rate, and with a low one that hardly changes the network.

Sizes in bytes are written to runs/memory.json and printed as a table. The table in docs/memory.md is made from
experiments/results/memory.json.
"""

import json
import warnings
from collections import Counter
from pathlib import Path
from time import perf_counter

import torch
from avalanche.benchmarks.scenarios.deprecated.generic_benchmark_creation import (
    create_generic_benchmark_from_tensor_lists,
)
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive
from tqdm import tqdm

from became_avalanche import NSCLPlugin, ReducedResNet18, nscl_groups
from became_avalanche.files import write_atomically
from became_avalanche.runs.method import Method

OUT = Path("runs/memory.json")
TASKS, CLASSES, SIZE = 20, 5, 84
IMAGES, BATCH, EPOCHS = 10, 10, 4  # all images of a task enter the memory
RATE, LOW_RATE = 0.1, 1e-3
SETTINGS = {
    "gpm": {"threshold": 0.985, "increment": 3e-4, "n_samples": IMAGES},
    "sgp": {"threshold": 0.985, "increment": 3e-4, "n_samples": IMAGES, "alpha": 1},
    "trgp": {"threshold": 0.985, "increment": 3e-4, "n_samples": IMAGES, "trust_threshold": 0.5, "top_k": 2},
    "gpcns": {"threshold": 0.98, "increment": 1e-3, "n_samples": IMAGES, "alpha": 3},
    "nscl": {"n_samples": IMAGES},
    "owm": {"n_samples": IMAGES},
}
METHODS = (*SETTINGS, "gpm+became")
BASES = ("gpm", "sgp", "trgp")
PAPER = {  # MiB: parameters of the model, additional memory of stage 1, additional memory of stage 2
    "gpm": (4.74, 37.51, None),
    "sgp": (4.74, 53.47, None),
    "trgp": (73.23, 1359.18, None),
    "gpcns": (4.74, 584.26, None),
    "gpm+became": (4.74, 55.88, 4.73),
}


def task(t):
    """Return synthetic images of task ``t`` and their labels: a pattern per class, plus noise.

    Their spectrum falls as that of natural images, amplitude ~ 1 / frequency. Each task has a different slope of the
    spectrum, different colours and different patterns.
    """
    generator = torch.Generator().manual_seed(t)
    slope = 1 + 0.5 * torch.rand((), generator=generator)
    colours = torch.randn(3, 3, generator=generator)
    frequency = (torch.fft.fftfreq(SIZE)[:, None].square() + torch.fft.rfftfreq(SIZE).square()).sqrt()
    amplitude = frequency.clamp(min=1 / SIZE) ** -slope

    def fields(n):
        noise = torch.randn(n, 3, SIZE, SIZE, generator=generator)
        return torch.fft.irfft2(torch.fft.rfft2(noise) * amplitude, s=(SIZE, SIZE))

    y = torch.arange(IMAGES) % CLASSES
    x = torch.einsum("dc,nchw->ndhw", colours, fields(CLASSES)[y] + fields(IMAGES))
    return x / x.std(), y


def measure(method, rate, benchmark, progress):
    """Train all tasks with the plugins of ``method``, and return the memory of plugins and model in bytes."""
    progress.set_description(f"{method}, learning rate {rate}")
    torch.manual_seed(0)
    first, *second = method.split("+")
    plugins = Method.parse(method, SETTINGS[first]).make_plugins()
    model = ReducedResNet18(SIZE)
    sgd = first != "nscl"  # NSCL has its own recipe, with Adam
    optimizer = torch.optim.SGD(model.parameters(), lr=rate) if sgd else torch.optim.Adam(nscl_groups(model))
    strategy = Naive(
        model=model,
        optimizer=optimizer,
        plugins=plugins,
        evaluator=EvaluationPlugin(),
        train_mb_size=BATCH,
        train_epochs=EPOCHS,
    )
    start = perf_counter()
    for experience in benchmark.train_stream:
        strategy.train(experience)
        progress.update()
    stages = [plugin.memory_bytes() for plugin in plugins]
    return {
        "model": size(model.parameters()),
        "stages": stages,
        "at_most": at_most(first, model),
        "parts": parts(plugins[0], stages[0]) | ({"precision": stages[1]} if second else {}),
        "seconds": round(perf_counter() - start, 1),
    }


def parts(plugin, total):
    """Return the parts of the memory of a projection plugin in bytes."""
    sizes = Counter()
    normalisation = plugin.normalisation if isinstance(plugin, NSCLPlugin) else {}
    for tensors in (*normalisation.values(), *plugin.memory.values()):
        for key, tensor in tensors.items():
            sizes[key] += size([tensor])
    sizes["scales"] = total - sizes.total()  # the rest is not stored per layer: TRGP's scale matrices
    return dict(+sizes)


def at_most(method, model):
    """Return the largest memory that a projection method can hold after all tasks, for any data, in bytes."""
    d = [layer.weight[0].numel() for layer in model.features.modules() if isinstance(layer, torch.nn.Conv2d)]
    values, squares = sum(d), sum(side**2 for side in d)
    normalisation = sum(parameter.numel() for parameter in model.features.parameters() if parameter.dim() == 1)
    return {
        "gpm": 4 * squares,
        "sgp": 4 * (squares + values),
        "trgp": 4 * squares + (1 + TASKS) * values + 4 * (TASKS - 1) * SETTINGS["trgp"]["top_k"] * squares,
        "gpcns": 4 * 2 * squares,
        "nscl": 4 * (squares + 2 * normalisation),
        "owm": 4 * squares,
    }[method]


def size(tensors):
    """Return the size of tensors in bytes."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def table(record: dict) -> str:
    """Return the sizes as a table in MiB, next to the paper's."""
    ours = ["model", "stage 1", "low rate", "at most", "stage 2"]
    theirs = ["paper: model", "paper: stage 1", "paper: stage 2"]
    rows = [["method", *ours, *theirs, "made of"], ["---", *["---:"] * 8, "---"]]
    for method, run in record["methods"].items():
        first, second = (*run["stages"], None)[:2]
        low = record["low rate"][method]["stages"][0] if method in record["low rate"] else None
        paper = PAPER.get(method, (None, None, None))
        made_of = ", ".join(f"{part} {mib(held)}" for part, held in run["parts"].items())
        sizes = [run["model"], first, low, run["at_most"], second]
        rows.append([method, *map(mib, sizes), *("–" if p is None else f"{p:.2f}" for p in paper), made_of])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def mib(held):
    return "–" if held is None else f"{held / 2**20:.2f}"


def main():
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="No loggers specified")
    tasks = [task(t) for t in range(TASKS)]
    benchmark = create_generic_benchmark_from_tensor_lists(tasks, tasks, task_labels=list(range(TASKS)))
    training = {"tasks": TASKS, "classes": CLASSES, "image_size": SIZE, "images": IMAGES, "batch": BATCH}
    training |= {"epochs": EPOCHS, "learning_rate": RATE, "low_learning_rate": LOW_RATE}
    record = {"training": training, "settings": SETTINGS}
    with tqdm(total=(len(METHODS) + len(BASES)) * TASKS, unit="task") as progress:
        record["methods"] = {method: measure(method, RATE, benchmark, progress) for method in METHODS}
        record["low rate"] = {method: measure(method, LOW_RATE, benchmark, progress) for method in BASES}
    OUT.parent.mkdir(exist_ok=True)
    write_atomically(OUT, json.dumps(record, indent=2) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()

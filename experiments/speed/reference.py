"""Compare the package with the authors' codes of GPM, TRGP and Adam-NSCL: time per epoch and memory update, memory.

    python experiments/speed/table.py --reference FOLDER [--quick] [--data FOLDER]

FOLDER contains clones of the repositories under these names:

    git clone https://github.com/sahagobinda/GPM FOLDER/GPM
    git clone https://github.com/LYang-666/TRGP FOLDER/TRGP
    git clone https://github.com/ShipengWang/Adam-NSCL FOLDER/Adam-NSCL

The functions of the authors' codes are called as their ``main`` calls them, on the same images as ours. Each code runs
in a separate process with one thread. The second of two tasks is measured, since the first is not projected. Plots and
logs are disabled. TRGP and Adam-NSCL need a fix: they read gradients after ``zero_grad``, which deletes gradients since
PyTorch 2.0. Without the fix TRGP stops with an error, and the memory of Adam-NSCL stays empty.
"""

import os
import resource
import sys
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from time import process_time
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
import torch
from avalanche.logging import BaseLogger
from avalanche.training.plugins import EvaluationPlugin, SupervisedPlugin
from avalanche.training.supervised import Naive
from rows import Row
from torch import nn

from became_avalanche import (
    AlexNet,
    GPMPlugin,
    NSCLPlugin,
    PreActResNet18,
    TRGPPlugin,
    keep_freed_memory,
    nscl_groups,
    split_cifar100,
)
from became_avalanche.benchmarks.cifar import NORMALISATION
from became_avalanche.benchmarks.tensors import benchmark_of, normalise

Images = list[tuple[torch.Tensor, torch.Tensor]]
Seconds = dict[str, float]


def rows(quick: bool, folder: Path, data: Path = Path("data")) -> list[Row]:
    """Return the ratios of CPU time and memory, ours divided by theirs, for each code in the folder."""
    methods = {"GPM": (theirs_gpm, partial(ours, "GPM"), 640), "TRGP": (theirs_trgp, partial(ours, "TRGP"), 640)}
    if not quick:
        methods["Adam-NSCL"] = (theirs_nscl, partial(ours, "Adam-NSCL"), 128)
    found = []
    for name, (theirs, own, n) in methods.items():
        if not (folder / name).is_dir():
            print(f"{folder / name} does not exist, so {name} is skipped", file=sys.stderr)
            continue
        tasks, which = images(data, 128 if quick else n)
        reference, here = (
            in_separate_process(implementation, folder / name, tasks) for implementation in (theirs, own)
        )
        for part, unit in (("epoch", "s"), ("memory update", "s"), ("peak memory", "MB")):
            ratio = here[part] / reference[part]
            note = f"{here[part]:.2f} and {reference[part]:.2f} {unit}; {len(tasks[1][1])} {which} per task"
            found.append(Row(f"{part} of {name} / the authors' code", ratio, "< 1", ratio < 1, note))
    return found


def in_separate_process(implementation: Callable[[Path, Images], Seconds], folder: Path, tasks: Images) -> Seconds:
    """Measure an implementation in a separate process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(measured, implementation, folder, tasks).result()


def measured(implementation: Callable[[Path, Images], Seconds], folder: Path, tasks: Images) -> Seconds:
    """Return the CPU seconds of the parts of an implementation, and its peak memory in MB."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):
        seconds = implementation(folder, tasks)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {**seconds, "peak memory": peak / 1e6}


def images(data: Path, n: int) -> tuple[Images, str]:
    """Return images and labels of two tasks, and a description."""
    if (data / "cifar-100-python").is_dir():
        stream = split_cifar100(dataset_root=data).train_stream
        tensors = [stream[t].dataset.sample_index.tensors[0] for t in range(2)]
        return [(tensor.images[:n].clone(), tensor.targets[:n].clone()) for tensor in tensors], "images of CIFAR-100"
    generator = torch.Generator().manual_seed(0)
    bytes_ = [torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8, generator=generator) for _ in range(2)]
    return [(x, torch.arange(n) % 10) for x in bytes_], "random images"


TRANSFORM = normalise(**NORMALISATION["gpm"])


def timed(function, *args, **kwargs):
    """Return the CPU seconds of a call, and its result."""
    start = process_time()
    result = function(*args, **kwargs)
    return process_time() - start, result


# -------------------------------------------------------------------------------------------------------------- ours


class Clock(SupervisedPlugin):
    """Records the CPU time at the start and the end of an epoch."""

    def before_training_epoch(self, strategy, **kwargs):
        self.start = process_time()

    def after_training_epoch(self, strategy, **kwargs):
        self.end = process_time()


def ours(method: str, folder: Path, tasks: Images) -> Seconds:
    """Train two tasks with the package. All time outside the epoch counts as memory update, including projectors."""
    keep_freed_memory()
    nscl = method == "Adam-NSCL"
    model = PreActResNet18() if nscl else AlexNet()
    optimizer = torch.optim.Adam(nscl_groups(model)) if nscl else torch.optim.SGD(model.parameters(), lr=0.01)
    plugin = {"GPM": GPMPlugin, "TRGP": TRGPPlugin, "Adam-NSCL": partial(NSCLPlugin, reference=True)}[method]()
    clock = Clock()
    strategy = Naive(
        model=model,
        optimizer=optimizer,
        criterion=nn.CrossEntropyLoss(),
        plugins=[plugin, clock],
        evaluator=EvaluationPlugin(loggers=[BaseLogger()]),
        train_mb_size=32 if nscl else 64,
        train_epochs=1,
    )
    for experience in benchmark_of(tasks, [], tasks, [TRANSFORM] * 2).train_stream:
        total, _ = timed(strategy.train, experience)
        epoch = clock.end - clock.start
    return {"epoch": epoch, "memory update": total - epoch}


# ------------------------------------------------------------------------------------------------------------ theirs


def load(folder: Path, module: str):
    """Import a module of the authors' code, with the packages for plots and logs mocked."""
    for name in ("seaborn", "pandas", "tensorboardX"):
        sys.modules.setdefault(name, MagicMock())
    sys.path.insert(0, str(folder))
    return import_module(module)


def keeping_gradients(module_or_optimizer):
    """Make ``zero_grad`` fill gradients with zeros, as it did before PyTorch 2.0."""
    module_or_optimizer.zero_grad = partial(module_or_optimizer.zero_grad, set_to_none=False)
    return module_or_optimizer


def theirs_gpm(folder: Path, tasks: Images) -> Seconds:
    """Train two tasks for one epoch each with the code of GPM."""
    code = load(folder, "main_cifar100")
    (x, y), (x2, y2) = [(TRANSFORM(x), y) for x, y in tasks]
    args, criterion = SimpleNamespace(batch_size_train=64), nn.CrossEntropyLoss()
    model = code.AlexNet([(0, 10), (1, 10)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    code.train(args, model, "cpu", x, y, optimizer, criterion, 0)

    def update(x, threshold, known):
        return code.update_GPM(model, code.get_representation_matrix(model, "cpu", x), np.full(5, threshold), known)

    bases = update(x, 0.97, [])
    start = process_time()
    projections = [torch.Tensor(np.dot(basis, basis.transpose())) for basis in bases]
    prepared = process_time() - start
    epoch, _ = timed(code.train_projected, args, model, "cpu", x2, y2, optimizer, criterion, projections, 1)
    seconds, _ = timed(update, x2, 0.973, bases)
    return {"epoch": epoch, "memory update": prepared + seconds}


def theirs_trgp(folder: Path, tasks: Images) -> Seconds:
    """Train two tasks for one epoch each with the code of TRGP."""
    code = load(folder, "main_cifar100")
    code.log = MagicMock()
    (x, y), (x2, y2) = [(TRANSFORM(x), y) for x, y in tasks]
    args, criterion = SimpleNamespace(batch_size_train=64), nn.CrossEntropyLoss()
    model = code.AlexNet([(0, 10), (1, 10)])
    weights = [parameter for name, parameter in model.named_parameters() if "scale" not in name]
    scales = [parameter for name, parameter in model.named_parameters() if "scale" in name]
    optimizer = torch.optim.SGD(weights, lr=0.01)
    names = ["cifar100-0", "cifar100-1"]
    memory = {name: {str(k): {"regime": {}} for k in range(7)} for name in names}
    code.train(args, model, "cpu", x, y, optimizer, criterion, 0)

    def update(x, y, t, known):
        found = code.get_representation_and_gradient(args, model, "cpu", optimizer, criterion, t, x, y)
        thresholds = np.full(5, 0.97 + 0.003 * t)
        return code.get_space_and_grad(args, model, *found, thresholds, memory, names[t], names[: t + 1], t, known)

    spaces = update(x, y, 0, [])
    for scale in scales:
        scale.data = torch.eye(len(scale))
    optimizer = keeping_gradients(torch.optim.SGD([{"params": weights}, {"params": scales}], lr=0.01))
    start = process_time()
    projections = [torch.Tensor(np.dot(space, space.transpose())) for space in spaces]
    code.grad_proj_cond(args, model, x2, y2, memory, names[1], 1, names, "cpu", optimizer, criterion)
    trusted = [torch.FloatTensor(memory[names[0]][str(k)]["space_list"]) for k in range(5)]
    chosen = [s if memory[names[1]][str(k)]["regime"][0] == "2" else None for k, s in enumerate(trusted)]
    prepared = process_time() - start
    settings = (memory, names[1], names, spaces, 1, projections, 1, chosen, [None] * 5)
    epoch, _ = timed(code.train_projected_regime, args, model, "cpu", x2, y2, optimizer, criterion, *settings)
    seconds, _ = timed(update, x2, y2, 1, spaces)
    return {"epoch": epoch, "memory update": prepared + seconds}


def theirs_nscl(folder: Path, tasks: Images) -> Seconds:
    """Train two tasks for one epoch each with the code of Adam-NSCL."""
    load(folder, "svd_agent.svd_based")
    agent = import_module("svd_agent.svd_based").svd_based(
        {
            **dict.fromkeys(("gpu", "model_weights", "with_head")),
            **{"model_type": "resnet", "model_name": "resnet18", "out_dim": {"1": 10, "2": 10, "3": 10}},
            **{"model_optimizer": "Adam", "model_lr": 1e-4, "svd_lr": 5e-5, "head_lr": 1e-3, "bn_lr": 5e-4},
            **{"model_weight_decay": 5e-5, "momentum": 0, "schedule": [1], "gamma": 0.5, "svd_thres": 10},
            **{"reset_model_opt": True, "reg_coef": 100, "print_freq": 0, "dataset_name": "CIFAR100"},
        }
    )
    keeping_gradients(agent.model)
    seconds: Seconds = {}
    for t, (x, y) in enumerate(tasks, start=1):
        order = torch.randperm(len(y)).split(32)
        batches = [(TRANSFORM(x[rows]), y[rows], [str(t)] * len(rows)) for rows in order]
        agent.model.train()
        seconds["epoch"], _ = timed(agent.train_epoch, batches, 0, 0)
        agent.train_model = lambda *_: None  # it is trained already
        seconds["memory update"], _ = timed(agent.train_task, batches)
        if not agent.model_optimizer.transforms:
            raise RuntimeError("Adam-NSCL has an empty memory, so its times would be meaningless")
    return seconds

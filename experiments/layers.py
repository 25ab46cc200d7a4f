"""Measure how far the outputs of each layer drift in a vision transformer and in a pre-trained MobileNetV2.

    python experiments/layers.py --data DIR --weights mobilenet_v2-b0353104.pth

DIR contains ``cifar-100-python``. The weights are torchvision's ``MobileNet_V2_Weights.IMAGENET1K_V1``. The stream has
three tasks of ten classes of CIFAR-100, with a subset of the images, enlarged for MobileNetV2. Drift is the result of
``measure_drift`` on the test images of the first task, between the end of the first task and the end of the last.

Results are written to runs/layers.json and printed as a table. Runs that are already in that file are not repeated. The
table in docs/layers.md is made from experiments/results/layers.json.
"""

import argparse
import json
import warnings
from copy import deepcopy
from pathlib import Path
from statistics import median
from time import process_time

import torch
from avalanche.benchmarks.scenarios.deprecated.generic_benchmark_creation import (
    create_generic_benchmark_from_tensor_lists,
)
from avalanche.training.plugins import EvaluationPlugin
from avalanche.training.supervised import Naive
from torch import nn
from torch.nn import functional as F
from torchvision.models import VisionTransformer, mobilenet_v2

from became_avalanche import AccuracyMatrix, MultiHeadNetwork, measure_drift, split_cifar100
from became_avalanche.files import write_atomically
from became_avalanche.runs.method import Method

OUT = Path("runs/layers.json")
TASKS, CLASSES = 3, 10
METHODS = ("finetune", "gpm", "gpm-2x", "gpm+became")
GPM = {"threshold": 0.99, "increment": 0.001}
SETTINGS = {
    "vision transformer": {"train": 1000, "test": 300, "pixels": 32, "batch": 32, "epochs": 4, "rate": 1e-3},
    "MobileNetV2": {"train": 250, "test": 200, "pixels": 64, "batch": 16, "epochs": 3, "rate": 1e-4},
}


def vision_transformer(weights: Path) -> nn.Module:
    """Return a small vision transformer of torchvision, not pre-trained."""
    model = VisionTransformer(image_size=32, patch_size=4, num_layers=3, num_heads=4, hidden_dim=64, mlp_dim=128)
    model.heads = nn.Identity()
    return MultiHeadNetwork(model, 64)


class FixedStatistics(nn.BatchNorm2d):
    """Batch normalisation that keeps the ImageNet statistics, which training on small batches would overwrite."""

    def train(self, mode: bool = True) -> nn.Module:
        return super().train(False)


def mobilenet(weights: Path) -> nn.Module:
    """Return torchvision's MobileNetV2 with ImageNet weights and one head per task."""
    model = mobilenet_v2(norm_layer=FixedStatistics)
    model.load_state_dict(torch.load(weights, weights_only=True))
    model.classifier = nn.Identity()
    return MultiHeadNetwork(model, 1280)


MODELS = {"vision transformer": vision_transformer, "MobileNetV2": mobilenet}


def stream(data: Path, train: int, test: int, pixels: int, **_: object):
    """Return the first tasks of 10-Split CIFAR-100 with the first images of each, in memory."""
    whole = split_cifar100(10, dataset_root=data)

    def part(experience, n):
        dataset = experience.dataset.eval()
        rows = [dataset[i] for i in range(n)]
        x, y = torch.stack([row[0] for row in rows]), torch.tensor([int(row[1]) for row in rows])
        return F.interpolate(x, size=(pixels, pixels), mode="bilinear") if pixels != x.shape[-1] else x, y

    return create_generic_benchmark_from_tensor_lists(
        [part(experience, train) for experience in whole.train_stream[:TASKS]],
        [part(experience, test) for experience in whole.test_stream[:TASKS]],
        task_labels=list(range(TASKS)),
    )


def run(name: str, method: str, benchmark, weights: Path) -> dict:
    """Train one model with one method, and return its accuracies and the drift of each layer."""
    torch.manual_seed(0)
    settings = SETTINGS[name]
    model, matrix = MODELS[name](weights), AccuracyMatrix()
    plugins = [] if method == "finetune" else Method.parse(method, GPM).make_plugins()
    strategy = Naive(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=settings["rate"]),
        plugins=plugins,
        evaluator=EvaluationPlugin(matrix, loggers=[]),
        train_mb_size=settings["batch"],
        train_epochs=settings["epochs"],
        eval_mb_size=100,
    )
    start = process_time()
    for t, experience in enumerate(benchmark.train_stream):
        strategy.train(experience)
        strategy.eval(benchmark.test_stream[: t + 1])
        if t == 0:
            before = deepcopy(model)
            for own, parameter in model.features.named_parameters():
                if (
                    "class_token" in own or "pos_embedding" in own
                ):  # they have no input, so projection cannot protect them
                    parameter.requires_grad_(False)
    seconds = process_time() - start
    drift = measure_drift(before, model, benchmark.test_stream[0])
    return {
        "accuracies": [[round(value, 4) for value in row if value == value] for row in matrix.result().tolist()],
        "drift": {layer: float(f"{moved:.3g}") for layer, moved in drift.items()},
        "kinds": {layer: kind_of(model.get_submodule(layer)) for layer in drift},
        "lambdas": [round(merge.coefficient, 4) for plugin in plugins for merge in getattr(plugin, "merges", [])],
        "cpu_seconds": round(seconds, 1),
    }


def kind_of(module: nn.Module) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "attention"
    if isinstance(module, nn.Conv2d):
        return "depthwise convolution" if module.groups > 1 else "convolution"
    if isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
        return "normalisation"
    return "linear" if isinstance(module, nn.Linear) else "blocks with parameters of their own"


def table(record: dict) -> str:
    """Return ACC and BWT in percent, and the median / maximum drift of the layers of each kind, for each model."""
    tables = []
    for model, runs in record["runs"].items():
        kinds = list(dict.fromkeys(kind for one in runs.values() for kind in one["kinds"].values()))
        rows = [[model, "ACC %", "BWT %", *kinds], ["---", *["---:"] * (2 + len(kinds))]]
        for method, one in runs.items():
            final = one["accuracies"][-1]
            bwt = [last - one["accuracies"][t][t] for t, last in enumerate(final[:-1])]
            cells = [f"{100 * sum(final) / len(final):.1f}", f"{100 * sum(bwt) / len(bwt):.1f}"]
            for kind in kinds:
                moved = [value for layer, value in one["drift"].items() if one["kinds"][layer] == kind]
                cells.append(f"{median(moved):.3f} / {max(moved):.3f}")
            rows.append([method, *cells])
        tables.append("\n".join(f"| {' | '.join(row)} |" for row in rows))
    return "\n\n".join(tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar-100-python")
    parser.add_argument("--weights", type=Path, required=True, help="ImageNet weights of MobileNetV2 (.pth)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning)
    record: dict = json.loads(OUT.read_text()) if OUT.exists() else {"settings": {}, "runs": {}}
    record |= {"gpm": GPM, "torch": torch.__version__.split("+")[0]}
    for name in MODELS:
        if record["settings"].get(name) != SETTINGS[name]:  # finished runs with other settings are discarded
            record["settings"][name], record["runs"][name] = SETTINGS[name], {}
        runs = record["runs"][name]
        benchmark = stream(arguments.data, **SETTINGS[name])
        for method in (method for method in METHODS if method not in runs):
            runs[method] = run(name, method, benchmark, arguments.weights)
            print(name, method, runs[method]["cpu_seconds"], "s", flush=True)
            write_atomically(OUT, json.dumps(record, indent=1) + "\n")
    print(table(record))


if __name__ == "__main__":
    main()

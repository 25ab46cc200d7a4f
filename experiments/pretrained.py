"""Train a pre-trained network on 10-Split CIFAR-100, with and without projection, with several merging rules.

    python -m experiments.pretrained --data DIR --weights mobilenet_v2-b0353104.pth
    python -m experiments.pretrained --data DIR --weights resnet18-f37072fd.pth --architecture resnet18

DIR contains ``cifar-100-python``. The weights are a ``state_dict`` of a torchvision model trained on ImageNet. Images
are enlarged, and normalised as for ImageNet. Batch normalisation keeps its ImageNet statistics.

The optimizer is Adam, with a learning rate of 1e-4 for the network and 1e-3 for the heads. With 3e-4 for the network,
MobileNetV2 unlearns what it knows, and its accuracy falls to chance.

Runs are kept in runs/pretrained. Rerun the same command to resume.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torchvision.models import get_model

from became_avalanche import Benchmark, Method, MultiHeadNetwork, Network, NSCLRecipe, Store, Stream, image_stream
from became_avalanche.benchmarks.cifar import read_cifar100
from became_avalanche.benchmarks.tensors import normalise, tasks_of
from became_avalanche.results.record import with_joint
from became_avalanche.results.tables import gains, in_order, table, text_gains
from became_avalanche.runs.run import Local, run

RULES = ("became", "one-over-t", "constant", "cofima")
HEAD_APART = "experiments.became_plus:HeadApart"
VARIANTS: dict[str, dict[str, Any]] = {
    "gpm+became (eval mode)": {"options": {"fisher": {"name": "batched", "mode": "eval"}}},
    "gpm+became (batched-sampled)": {"options": {"fisher": "batched-sampled"}},
    "gpm+became (head apart)": {"plugin": HEAD_APART},
    "gpm+became (rate 0.1)": {"options": {"rate": 0.1}},
    "gpm+became (batched-sampled and head apart)": {"plugin": HEAD_APART, "options": {"fisher": "batched-sampled"}},
}
"""Variants of the merge that ``--methods`` also accepts, and their settings."""
METHODS = ("gpm", "gpm-2x", *(f"gpm+{rule}" for rule in RULES), "finetune", *(f"finetune+{rule}" for rule in RULES))
IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}
RECIPE = NSCLRecipe(batch_size=16, learning_rate=1e-4, later_rate=1e-4, normalisation_rate=1e-4, epochs=5)


class PretrainedNetwork(MultiHeadNetwork):
    """A torchvision model with pre-trained weights and one head per task instead of its classifier."""

    def __init__(self, weights: str, architecture: str = "mobilenet_v2") -> None:
        """Init.

        :param weights: file with the ``state_dict`` of the model.
        :param architecture: name of the model in ``torchvision.models``.
        """
        model = get_model(architecture)
        model.load_state_dict(torch.load(weights, weights_only=True))
        name, classifier = [item for item in model.named_modules() if isinstance(item[1], nn.Linear)][-1]
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, nn.Identity())
        super().__init__(model, classifier.in_features)

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        for module in self.features.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        return self


def enlarged_cifar100(
    seed: int = 0, *, dataset_root: str, pixels: int = 64, per_class: int = 50, test_per_class: int = 20, **options
):
    """Return 10-Split CIFAR-100 with enlarged images and the first images of each class.

    :param seed: decides which images are used for validation.
    :param dataset_root: folder with ``cifar-100-python``.
    :param pixels: width and height of the enlarged images.
    :param per_class: number of training images per class; a twentieth of them is used for validation.
    :param test_per_class: number of test images per class.
    :param options: options of ``image_stream``.
    """
    scale = normalise(**IMAGENET)

    def transform(images):
        return F.interpolate(scale(images), size=(pixels, pixels), mode="bilinear")

    train, test = read_cifar100(dataset_root)
    return image_stream(_tasks(train, per_class), _tasks(test, test_per_class), [transform] * 10, seed, **options)


def _tasks(part, per_class):
    chosen = torch.cat([(part.fine == label).nonzero()[:per_class, 0] for label in range(100)])
    return tasks_of(part.images[chosen], part.fine[chosen], torch.arange(100).reshape(10, 10))


def chosen_method(name: str) -> Method:
    """Return the method called ``name``: one of ``VARIANTS``, or a name such as "gpm+became"."""
    if name in VARIANTS:
        return Method.parse("gpm+became", merge=VARIANTS[name], label=name)
    return Method.parse(name)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a pre-trained network on 10-Split CIFAR-100.")
    parser.add_argument("--data", required=True, help="folder with cifar-100-python")
    parser.add_argument("--weights", required=True, help="state_dict of a torchvision model")
    parser.add_argument("--architecture", default="mobilenet_v2", help="name of the model in torchvision.models")
    parser.add_argument("--methods", type=lambda names: names.split(","), default=METHODS, help="comma-separated names")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds")
    parser.add_argument("--tasks", type=int, help="number of tasks to train (default: all)")
    parser.add_argument("--epochs", type=int, help=f"maximum number of epochs per stage (default: {RECIPE.epochs})")
    parser.add_argument("--pixels", type=int, default=64, help="width and height of the enlarged images")
    parser.add_argument("--per-class", type=int, default=50, help="training images per class")
    parser.add_argument("--out", type=Path, default=Path("runs/pretrained"), help="folder of runs")
    arguments = parser.parse_args()
    benchmark = Benchmark(
        name=f"10-split-cifar100-{arguments.architecture}",
        stream=Stream(
            name="experiments.pretrained:enlarged_cifar100",
            n_tasks=10,
            options={"pixels": arguments.pixels, "per_class": arguments.per_class},
        ),
        network=Network(
            name="experiments.pretrained:PretrainedNetwork",
            options={"weights": arguments.weights, "architecture": arguments.architecture},
        ),
        recipe=RECIPE,
        hyperparameters={"gpm": {"threshold": 0.99}},
    )
    store, records = Store(arguments.out), []
    store.make_writable()
    for seed in range(arguments.seeds):
        for method in arguments.methods:
            spec = benchmark.spec(chosen_method(method), seed, n_tasks=arguments.tasks, max_epochs=arguments.epochs)
            record = run(spec, store, Local(data=arguments.data))
            print(f"{record.key}: {record.status}{f', {record.error}' if record.error else ''}", flush=True)
            records.append(record)
    done = in_order([record for record in with_joint(records) if record.status == "done"], arguments.methods)
    print(f"\n{table(done).text()}\n\n{text_gains(gains(done))}")


if __name__ == "__main__":
    main()

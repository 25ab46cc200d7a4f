"""Gradient projection and Bayesian model merging (BECAME) as Avalanche plugins.

Names are imported when they are first used: torch and Avalanche take seconds, and ``became --help`` needs neither.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from became_avalanche.analysis.path import PathScan, scan_path
    from became_avalanche.benchmarks.cifar import cifar100_superclass, split_cifar100
    from became_avalanche.benchmarks.digits import permuted_digits, split_digits
    from became_avalanche.benchmarks.five import five_datasets
    from became_avalanche.benchmarks.imagenet import split_miniimagenet, split_tinyimagenet
    from became_avalanche.benchmarks.tensors import image_stream
    from became_avalanche.logging.wandb import WandBLogger
    from became_avalanche.merging.fisher import Fisher
    from became_avalanche.merging.rules import MergeInputs, PreviousFisherRule
    from became_avalanche.metrics.accuracy import AccuracyMatrix
    from became_avalanche.models.alexnet import AlexNet
    from became_avalanche.models.lenet import LeNet
    from became_avalanche.models.mlp import MultiHeadMLP
    from became_avalanche.models.multihead import MultiHeadNetwork
    from became_avalanche.models.preact_resnet import PreActResNet18
    from became_avalanche.models.resnet import ReducedResNet18
    from became_avalanche.plugins.connector import ConnectorPlugin
    from became_avalanche.plugins.control import EqualTrainingPlugin
    from became_avalanche.plugins.gpcns import GPCNSPlugin
    from became_avalanche.plugins.gpm import GPMPlugin
    from became_avalanche.plugins.merge import BecameMergePlugin
    from became_avalanche.plugins.nscl import LaterTaskLR, NSCLPlugin, nscl_groups
    from became_avalanche.plugins.owm import OWMPlugin
    from became_avalanche.plugins.plateau import PlateauPlugin, TrainingPlateauPlugin
    from became_avalanche.plugins.projection import GradientProjectionPlugin
    from became_avalanche.plugins.sgp import SGPPlugin
    from became_avalanche.plugins.trgp import TRGPPlugin
    from became_avalanche.results.figures import path_figure
    from became_avalanche.results.metrics import METRICS
    from became_avalanche.results.record import MergeRecord, Record, read_record, read_records
    from became_avalanche.runs.catalogue import Benchmark, find_benchmark
    from became_avalanche.runs.engines import Inline, Processes, Ray
    from became_avalanche.runs.method import Method
    from became_avalanche.runs.recipes import NSCLRecipe, Recipe
    from became_avalanche.runs.session import Session, train
    from became_avalanche.runs.spec import Network, RunSpec, Stream
    from became_avalanche.runs.store import Store
    from became_avalanche.runs.study import Study
    from became_avalanche.strategy.allocator import keep_freed_memory
    from became_avalanche.strategy.checkpoint import NotResumableError, load_strategy, save_strategy
    from became_avalanche.strategy.divergence import DivergenceError
    from became_avalanche.strategy.protocols import OwnsParameters, StageAware, Suspendable
    from became_avalanche.strategy.stages import StagedPlugin
    from became_avalanche.strategy.state import StatefulPlugin
    from became_avalanche.strategy.statefile import StateFileError

_HOMES = {
    "AccuracyMatrix": "metrics.accuracy",
    "AlexNet": "models.alexnet",
    "BecameMergePlugin": "plugins.merge",
    "Benchmark": "runs.catalogue",
    "ConnectorPlugin": "plugins.connector",
    "DivergenceError": "strategy.divergence",
    "EqualTrainingPlugin": "plugins.control",
    "Fisher": "merging.fisher",
    "GPCNSPlugin": "plugins.gpcns",
    "GPMPlugin": "plugins.gpm",
    "GradientProjectionPlugin": "plugins.projection",
    "Inline": "runs.engines",
    "LaterTaskLR": "plugins.nscl",
    "LeNet": "models.lenet",
    "METRICS": "results.metrics",
    "MergeInputs": "merging.rules",
    "MergeRecord": "results.record",
    "Method": "runs.method",
    "MultiHeadMLP": "models.mlp",
    "MultiHeadNetwork": "models.multihead",
    "NSCLPlugin": "plugins.nscl",
    "NSCLRecipe": "runs.recipes",
    "Network": "runs.spec",
    "NotResumableError": "strategy.checkpoint",
    "OWMPlugin": "plugins.owm",
    "OwnsParameters": "strategy.protocols",
    "PathScan": "analysis.path",
    "PlateauPlugin": "plugins.plateau",
    "PreActResNet18": "models.preact_resnet",
    "PreviousFisherRule": "merging.rules",
    "Processes": "runs.engines",
    "Ray": "runs.engines",
    "Recipe": "runs.recipes",
    "Record": "results.record",
    "ReducedResNet18": "models.resnet",
    "RunSpec": "runs.spec",
    "SGPPlugin": "plugins.sgp",
    "Session": "runs.session",
    "StageAware": "strategy.protocols",
    "StagedPlugin": "strategy.stages",
    "StateFileError": "strategy.statefile",
    "StatefulPlugin": "strategy.state",
    "Store": "runs.store",
    "Stream": "runs.spec",
    "Study": "runs.study",
    "Suspendable": "strategy.protocols",
    "TRGPPlugin": "plugins.trgp",
    "TrainingPlateauPlugin": "plugins.plateau",
    "WandBLogger": "logging.wandb",
    "cifar100_superclass": "benchmarks.cifar",
    "find_benchmark": "runs.catalogue",
    "five_datasets": "benchmarks.five",
    "image_stream": "benchmarks.tensors",
    "keep_freed_memory": "strategy.allocator",
    "load_strategy": "strategy.checkpoint",
    "nscl_groups": "plugins.nscl",
    "path_figure": "results.figures",
    "permuted_digits": "benchmarks.digits",
    "read_record": "results.record",
    "read_records": "results.record",
    "save_strategy": "strategy.checkpoint",
    "scan_path": "analysis.path",
    "split_cifar100": "benchmarks.cifar",
    "split_digits": "benchmarks.digits",
    "split_miniimagenet": "benchmarks.imagenet",
    "split_tinyimagenet": "benchmarks.imagenet",
    "train": "runs.session",
}

__all__ = [
    "METRICS",
    "AccuracyMatrix",
    "AlexNet",
    "BecameMergePlugin",
    "Benchmark",
    "ConnectorPlugin",
    "DivergenceError",
    "EqualTrainingPlugin",
    "Fisher",
    "GPCNSPlugin",
    "GPMPlugin",
    "GradientProjectionPlugin",
    "Inline",
    "LaterTaskLR",
    "LeNet",
    "MergeInputs",
    "MergeRecord",
    "Method",
    "MultiHeadMLP",
    "MultiHeadNetwork",
    "NSCLPlugin",
    "NSCLRecipe",
    "Network",
    "NotResumableError",
    "OWMPlugin",
    "OwnsParameters",
    "PathScan",
    "PlateauPlugin",
    "PreActResNet18",
    "PreviousFisherRule",
    "Processes",
    "Ray",
    "Recipe",
    "Record",
    "ReducedResNet18",
    "RunSpec",
    "SGPPlugin",
    "Session",
    "StageAware",
    "StagedPlugin",
    "StateFileError",
    "StatefulPlugin",
    "Store",
    "Stream",
    "Study",
    "Suspendable",
    "TRGPPlugin",
    "TrainingPlateauPlugin",
    "WandBLogger",
    "cifar100_superclass",
    "find_benchmark",
    "five_datasets",
    "image_stream",
    "keep_freed_memory",
    "load_strategy",
    "nscl_groups",
    "path_figure",
    "permuted_digits",
    "read_record",
    "read_records",
    "save_strategy",
    "scan_path",
    "split_cifar100",
    "split_digits",
    "split_miniimagenet",
    "split_tinyimagenet",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__

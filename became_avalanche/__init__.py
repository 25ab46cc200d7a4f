"""Gradient projection and Bayesian model merging (BECAME) as Avalanche plugins."""

from became_avalanche.benchmarks.digits import permuted_digits, split_digits
from became_avalanche.merging.rules import Merge
from became_avalanche.metrics.accuracy import AccuracyMatrix
from became_avalanche.models.mlp import MultiHeadMLP
from became_avalanche.plugins.gpm import GPMPlugin
from became_avalanche.plugins.merge import BecameMergePlugin, MergeRecord
from became_avalanche.plugins.projection import GradientProjectionPlugin

__all__ = [
    "AccuracyMatrix",
    "BecameMergePlugin",
    "GPMPlugin",
    "GradientProjectionPlugin",
    "Merge",
    "MergeRecord",
    "MultiHeadMLP",
    "permuted_digits",
    "split_digits",
]

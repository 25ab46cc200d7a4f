"""Avalanche's own methods, with what current versions need to work, and with defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from avalanche.training.plugins import AGEMPlugin, LwFPlugin, ReplayPlugin, SynapticIntelligencePlugin
from avalanche.training.storage_policy import ReservoirSamplingBuffer
from avalanche.training.templates import SupervisedTemplate


class LwF(LwFPlugin):
    """Learning without Forgetting, with the temperature of its paper."""

    def __init__(self, alpha: float, temperature: float = 2) -> None:
        super().__init__(alpha=alpha, temperature=temperature)


class AGEM(AGEMPlugin):
    """A-GEM, with a default for the samples of each reference gradient."""

    def __init__(self, patterns_per_experience: int, sample_size: int = 64) -> None:
        super().__init__(patterns_per_experience=patterns_per_experience, sample_size=sample_size)


class ExperienceReplay(ReplayPlugin):
    """Experience replay from a reservoir: ``ReplayPlugin`` without its call of a deprecated method."""

    def __init__(self, mem_size: int) -> None:
        super().__init__(mem_size=mem_size, storage_policy=ReservoirSamplingBuffer(max_size=mem_size))

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self.storage_policy.post_adapt(strategy, strategy.experience)


class SynapticIntelligence(SynapticIntelligencePlugin):
    """Synaptic Intelligence that also works on the CPU.

    There Avalanche's plugin keeps the weights before a step as views of the live weights, so nothing ever seems to
    have moved and the method does nothing. This one keeps copies.
    """

    def __init__(self, si_lambda: float, eps: float = 1e-7) -> None:
        super().__init__(si_lambda=si_lambda, eps=eps)

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().before_training_exp(strategy, **kwargs)
        _keep_copies(self.ewc_data[0])

    def before_training_iteration(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().before_training_iteration(strategy, **kwargs)
        _keep_copies(self.syn_data["old_theta"])


def _keep_copies(weights: Mapping[str, Any]) -> None:
    for weight in weights.values():
        weight.data = weight.data.clone()

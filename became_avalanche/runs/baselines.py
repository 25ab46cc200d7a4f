"""Methods of Avalanche, with default hyperparameters and with fixes for current versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from avalanche.training.plugins import AGEMPlugin, LwFPlugin, ReplayPlugin, SynapticIntelligencePlugin
from avalanche.training.storage_policy import ReservoirSamplingBuffer
from avalanche.training.templates import SupervisedTemplate


class LwF(LwFPlugin):
    """Learning without Forgetting, by default with the temperature of its paper."""

    def __init__(self, alpha: float, temperature: float = 2) -> None:
        super().__init__(alpha=alpha, temperature=temperature)


class AGEM(AGEMPlugin):
    """A-GEM, with a default number of samples for each reference gradient."""

    def __init__(self, patterns_per_experience: int, sample_size: int = 64) -> None:
        super().__init__(patterns_per_experience=patterns_per_experience, sample_size=sample_size)


class ExperienceReplay(ReplayPlugin):
    """Experience replay with reservoir sampling: ``ReplayPlugin`` without its call of a deprecated method."""

    def __init__(self, mem_size: int) -> None:
        super().__init__(mem_size=mem_size, storage_policy=ReservoirSamplingBuffer(max_size=mem_size))

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self.storage_policy.post_adapt(strategy, strategy.experience)


class SynapticIntelligence(SynapticIntelligencePlugin):
    """Synaptic Intelligence that also works on the CPU.

    On the CPU, Avalanche's plugin stores the weights before a step as views of the live weights. The weights then never
    seem to change, and the method has no effect. This class stores copies.
    """

    def __init__(self, si_lambda: float, eps: float = 1e-7) -> None:
        super().__init__(si_lambda=si_lambda, eps=eps)

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().before_training_exp(strategy, **kwargs)
        _replace_by_copies(self.ewc_data[0])

    def before_training_iteration(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().before_training_iteration(strategy, **kwargs)
        _replace_by_copies(self.syn_data["old_theta"])


def _replace_by_copies(weights: Mapping[str, Any]) -> None:
    """Replace each stored weight, which may be a view of a live one, by a copy."""
    for weight in weights.values():
        weight.data = weight.data.clone()

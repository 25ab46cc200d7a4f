"""GPCNS: gradient projection in the common null space (Yang et al., ACM MM 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from avalanche.training.templates import SupervisedTemplate
from torch import Tensor

from became_avalanche.plugins.threshold import EnergyThresholdPlugin, ThresholdOptions
from became_avalanche.subspace.basis import directions, importance, reach
from became_avalanche.subspace.inputs import InputMatrix

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GPCNSPlugin(EnergyThresholdPlugin):
    """Gradient Projection in the Common Null Space of old gradients.

    After each experience ``t`` the gradients ``G_1, ..., G_t`` of the layer, stacked, have leading right singular
    vectors ``V_t``. The leading left singular vectors ``N`` of ``[V_1, ..., V_t]``, with singular values ``s``, span
    what old tasks have in common. Updates are scaled: ``G <- G − G N diag(φ(s)) Nᵀ``, with ``φ`` as in SGP.

    Both stacks are kept as the fewest columns with the same Gram matrix, so the memory does not grow with the number
    of tasks. Energy here is the sum of singular values, not of their squares. ``n_samples`` of each experience make
    its gradient, at the weights that stay; with ``reference=True`` it is the one left over by the last training step.
    """

    needs_loss = True

    def __init__(self, alpha: float = 5, **options: Unpack[ThresholdOptions]) -> None:
        """Init.

        :param alpha: how fast importance saturates with the strength of a direction.
        :param options: those of ``GPMPlugin``.
        """
        super().__init__(**options)
        if not alpha >= 0:
            raise ValueError(f"alpha must be at least 0; got {alpha}")
        self.alpha = alpha

    def observe(self, strategy: SupervisedTemplate, num_workers: int) -> dict[str, InputMatrix]:
        """The gradient of each layer: its rows are the columns."""
        computed = [name for name, users in self.layers.protected.items() if users[0].rule is not None]
        self._complain(computed, "are parameters of computed weights, of which there are no gradients")
        rows = self._stale_rows(strategy) if self.reference else self.gradient_rows(strategy, num_workers)
        rows = {name: gradient for name, gradient in rows.items() if name not in computed}
        gradients = {name: InputMatrix() for name in rows}
        for name, gradient in rows.items():
            gradients[name].add(gradient.mT)
        return gradients

    def update_memory(self, name: str, observed: InputMatrix) -> None:
        spaces, old = InputMatrix(), self.memory.get(name)
        if old is not None:
            observed.add(old["gradients"])
            spaces.add(old["spaces"])
        gradients = observed.compressed()
        strengths, vectors = directions(gradients)
        spaces.add(vectors * self._leading(strengths, self.experiences + 1).unsqueeze(-2))
        self.memory[name] = {"gradients": gradients, "spaces": spaces.compressed()}

    def protected(self, name: str) -> tuple[Tensor, Tensor | None]:
        strengths, vectors = directions(self.memory[name]["spaces"])
        if self.experiences > 1:
            strengths = strengths * self._leading(strengths, self.experiences)
        return vectors, importance(strengths, self.alpha)

    def _leading(self, strengths: Tensor, t: int) -> Tensor:
        total = strengths.sum(-1, keepdim=True)
        return reach(strengths, self.threshold_of(t), total, below=self.reference)

    def _stale_rows(self, strategy: SupervisedTemplate) -> dict[str, Tensor]:
        parameters = dict(strategy.model.named_parameters())
        rows = {}
        for name in self.layers.protected:
            gradients = [parameters[part].grad for part in self.parts(name)]
            if all(gradient is not None for gradient in gradients):
                layer = self.layers.protected[name][0]
                rows[name] = layer.rows([gradient.to_dense() for gradient in gradients if gradient is not None])
        return rows

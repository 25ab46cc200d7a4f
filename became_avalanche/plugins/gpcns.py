"""GPCNS: gradient projection in the common null space (Yang et al., ACM MM 2024)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from avalanche.training.templates import SupervisedTemplate
from torch import Tensor

from became_avalanche.plugins.threshold import EnergyThresholdPlugin, ThresholdOptions
from became_avalanche.subspace.basis import directions, importance, take_until_threshold
from became_avalanche.subspace.inputs import InputMatrix

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GPCNSPlugin(EnergyThresholdPlugin):
    """Gradient Projection in the Common Null Space of old gradients.

    After each experience ``t`` the layer's gradients ``G_1, ..., G_t`` of all experiences are stacked. ``V_t`` are the
    leading right singular vectors of the stack. The leading left singular vectors ``N`` of ``[V_1, ..., V_t]``, with
    singular values ``s``, span the directions that the old tasks share. Updates are scaled along them:
    ``G <- G − G N diag(φ(s)) Nᵀ``, with ``φ`` as in ``SGPPlugin``.

    The gradient of an experience is computed on ``n_samples`` samples at its final weights. With ``reference=True`` it
    is the gradient of the last training step instead. Energy here is the sum of singular values, not of their squares.
    Both stacks are stored as minimal square roots of their Gram matrices, so the memory does not grow with the number
    of tasks.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from became_avalanche import GPCNSPlugin, MultiHeadMLP, split_digits
    >>> model, plugin = MultiHeadMLP(), GPCNSPlugin(alpha=5)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> strategy = Naive(model=model, optimizer=optimizer, train_mb_size=64, evaluator=None, plugins=[plugin])
    >>> _ = strategy.train(split_digits().train_stream[:2])
    >>> list(plugin.memory["features.1.weight"])
    ['gradients', 'spaces']
    """

    needs_loss = True

    def __init__(self, alpha: float = 5, **options: Unpack[ThresholdOptions]) -> None:
        """Init.

        :param alpha: how fast importance saturates with the singular value of a direction, at least 0.
        :param options: options of ``GPMPlugin``.
        """
        super().__init__(**options)
        if not alpha >= 0:
            raise ValueError(f"alpha must be at least 0; got {alpha}")
        self.alpha = alpha

    def observe(self, strategy: SupervisedTemplate, num_workers: int) -> dict[str, InputMatrix]:
        """Return the gradient of each layer, with its rows as the columns of the ``InputMatrix``."""
        computed = [name for name, users in self.layers.protected.items() if users[0].rule is not None]
        self._warn_unprotected(computed, "are parameters of computed weights, which have no gradients")
        rows = self._last_step_rows(strategy) if self.reference else self.gradient_rows(strategy, num_workers)
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
        singular_values, vectors = directions(gradients)
        spaces.add(vectors * self._leading(singular_values, self.experiences + 1).unsqueeze(-2))
        self.memory[name] = {"gradients": gradients, "spaces": spaces.compressed()}

    def protected(self, name: str) -> tuple[Tensor, Tensor | None]:
        singular_values, vectors = directions(self.memory[name]["spaces"])
        if self.experiences > 1:
            singular_values = singular_values * self._leading(singular_values, self.experiences)
        return vectors, importance(singular_values, self.alpha)

    def _leading(self, singular_values: Tensor, t: int) -> Tensor:
        """Return a mask of the leading singular values whose share of the total reaches the threshold of task ``t``."""
        total = singular_values.sum(-1, keepdim=True)
        return take_until_threshold(singular_values, self.threshold_of(t), total, below=self.reference)

    def _last_step_rows(self, strategy: SupervisedTemplate) -> dict[str, Tensor]:
        """Return the gradients that the last training step has left in the parameters, as rows."""
        parameters = dict(strategy.model.named_parameters())
        rows = {}
        for name in self.layers.protected:
            gradients = [parameters[part].grad for part in self.parts(name)]
            if all(gradient is not None for gradient in gradients):
                layer = self.layers.protected[name][0]
                rows[name] = layer.rows([gradient.to_dense() for gradient in gradients if gradient is not None])
        return rows

"""SGP: Scaled Gradient Projection (Saha and Roy, AAAI 2023)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from became_avalanche.plugins.gpm import GPMPlugin
from became_avalanche.plugins.threshold import ThresholdOptions
from became_avalanche.subspace.basis import importance
from became_avalanche.subspace.inputs import InputMatrix

if TYPE_CHECKING:
    from typing_extensions import Unpack


class SGPPlugin(GPMPlugin):
    """Scaled Gradient Projection: GPM that lets unimportant directions train in part.

    Each basis vector ``u_j`` of GPM has an importance that grows with every experience in which inputs lie along it:
    ``λ_j <- min(1, λ_j + φ(s_j))`` with ``s_j = ‖Aᵀ u_j‖`` and ``φ(s) = (α + 1) s / (α s + max s)``. Updates are
    scaled: ``G <- G − G U diag(λ) Uᵀ``.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from became_avalanche import MultiHeadMLP, SGPPlugin, split_digits
    >>> model, plugin = MultiHeadMLP(), SGPPlugin(alpha=10)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> strategy = Naive(model=model, optimizer=optimizer, train_mb_size=64, evaluator=None, plugins=[plugin])
    >>> _ = strategy.train(split_digits().train_stream[:2])
    >>> basis, importance = plugin.protected("features.1.weight")
    >>> round(float(importance.max()), 2)  # the most important direction does not train at all
    1.0
    """

    def __init__(self, alpha: float = 10, **options: Unpack[ThresholdOptions]) -> None:
        """Init.

        :param alpha: how fast importance saturates with ``s``: 0 makes it proportional to ``s``; inf gives all
            directions importance 1, which is GPM.
        :param options: options of ``GPMPlugin``.
        """
        super().__init__(**options)
        if not alpha >= 0:
            raise ValueError(f"alpha must be at least 0; got {alpha}")
        self.alpha = alpha

    def update_memory(self, name: str, observed: InputMatrix) -> None:
        old = self.memory.get(name)
        super().update_memory(name, observed)
        memory = self.memory[name]
        now = importance(observed.energy_along(memory["basis"]).sqrt(), self.alpha)
        if old is not None:  # old vectors come first
            before = old["importance"].double()
            now = (now + F.pad(before, (0, now.shape[-1] - before.shape[-1]))).clamp(max=1)
        memory["importance"] = now

    def protected(self, name: str) -> tuple[Tensor, Tensor | None]:
        return self.memory[name]["basis"], self.memory[name]["importance"]

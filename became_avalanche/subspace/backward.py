"""A Linear layer whose backward pass computes the projected weight gradient."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from became_avalanche.subspace.basis import Projector

WORTHWHILE = 2**25
"""Floating-point operations that projecting the inputs must save per step to outweigh its overhead."""

TOLERANCE = 32.0
"""Allowed difference between two computations of the same gradient, in units of the machine precision."""


@dataclass
class ProjectedBackward:
    """Computes the projected weight gradient of a Linear layer as ``δᵀ (x P)`` instead of ``(δᵀ x) P``.

    A batch ``x`` has few rows, whereas the gradient ``δᵀ x`` has one row per output of the layer. So it is cheaper to
    project the batch. Only gradients from calls of the layer are projected here. A penalty on the weight, or another
    use of the weight, adds an unprojected gradient. ``explains`` checks whether a gradient comes from here entirely.
    """

    project: Projector
    ones: bool = False
    """Whether the bias is projected with the weight, as the weight of a constant input 1."""
    uses: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """``x`` and ``δ`` of each backward pass through the layer since ``uses`` was last cleared."""

    def __post_init__(self) -> None:
        dimension = self.project.factor.shape[-2]
        generator = torch.Generator().manual_seed(0)
        self._probe = torch.randn(dimension, generator=generator, device="cpu").to(self.project.factor)
        self._projected_probe = self.project(self._probe.expand(1, 1, -1)).flatten()

    def forward(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """Return the layer's usual output. The backward pass projects the weight gradient if that saves enough work."""
        if not (torch.is_grad_enabled() and layer.weight.requires_grad and self._saves_enough(layer, x)):
            return F.linear(x, layer.weight, layer.bias)
        output: Tensor = _ProjectedLinear.apply(x, layer.weight, layer.bias, self)
        return output

    def gradient(self) -> Tensor:
        """Return ``Σ δᵀ (x P)`` over all uses, (out, d)."""
        return torch.stack([delta.mT @ self.project(x.unsqueeze(0))[0] for x, delta in self.uses]).sum(0)

    def explains(self, gradient: Tensor) -> bool:
        """Whether ``gradient`` (out, d) equals ``Σ δᵀ (x P)`` up to rounding.

        Both are compared along one random direction ``v``: ``gradient v`` with ``Σ δᵀ (x (P v))``. That is cheap, and
        two different matrices differ along almost every direction.
        """
        expected = torch.stack([(x @ self._projected_probe) @ delta for x, delta in self.uses]).sum(0)
        scale = sum(float(x.norm() * delta.norm()) for x, delta in self.uses)
        error = float((gradient @ self._probe - expected).norm())
        return error <= TOLERANCE * torch.finfo(gradient.dtype).eps * scale

    def may_pay(self, layer: nn.Linear) -> bool:
        """Whether the layer is large enough to save work with a small enough batch.

        Always False on other devices than the CPU: ``explains`` would wait for the device in each step.
        """
        return layer.weight.device.type == "cpu" and self._saved(layer, rows=0) >= WORTHWHILE

    def _saves_enough(self, layer: nn.Linear, x: Tensor) -> bool:
        saved = self._saved(layer, rows=x.numel() // layer.in_features)
        return saved >= WORTHWHILE and not torch.is_autocast_enabled(x.device.type)

    def _saved(self, layer: nn.Linear, rows: int) -> int:
        return 4 * (layer.out_features - rows) * self.project.factor[0].numel()


class _ProjectedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, backward: ProjectedBackward) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.projected = backward
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        back: ProjectedBackward = ctx.projected
        rows, deltas = x.reshape(-1, x.shape[-1]), delta.reshape(-1, delta.shape[-1])
        grad_x = delta @ weight if ctx.needs_input_grad[0] else None
        grad_bias = deltas.sum(0) if ctx.needs_input_grad[2] else None
        if back.ones:
            rows = F.pad(rows, (0, 1), value=1.0)
        back.uses.append((rows.detach(), deltas.detach()))
        gradient = deltas.mT @ back.project(rows.unsqueeze(0))[0]
        if back.ones:
            return grad_x, gradient[:, :-1], gradient[:, -1], None
        return grad_x, gradient, grad_bias, None

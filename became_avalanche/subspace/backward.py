"""A Linear layer whose weight gradient leaves the backward pass projected."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from became_avalanche.subspace.basis import Projector

WORTHWHILE = 2**25
"""Floating-point operations that projecting inputs must save per step; in smaller layers the calls cost more."""

TOLERANCE = 32.0
"""Rounding errors, in units of the machine precision, by which two computations of one gradient may differ."""


@dataclass
class ProjectedBackward:
    """Computes the weight gradient of a Linear layer projected: ``δᵀ (x P)`` in place of ``(δᵀ x) P``.

    A batch ``x`` has few rows, the gradient ``δᵀ x`` has as many as the layer has outputs. So projecting the batch is
    cheaper. It projects only what comes through the layer: a penalty on the weight, or another use of it, adds to the
    gradient afterwards. ``explains`` tells whether a gradient is all made here.
    """

    project: Projector
    ones: bool = False
    """Whether the bias is projected with the weight, as the weight of a constant input 1."""
    uses: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """``x`` and ``δ`` of each backward pass through a layer with this weight since ``uses`` was cleared."""

    def __post_init__(self) -> None:
        dimension = self.project.factor.shape[-2]
        generator = torch.Generator().manual_seed(0)
        self._probe = torch.randn(dimension, generator=generator, device="cpu").to(self.project.factor)
        self._projected_probe = self.project(self._probe.expand(1, 1, -1)).flatten()

    def forward(self, layer: nn.Linear, x: Tensor) -> Tensor:
        """The layer's output, computed as the layer does; the backward pass is the projected one where that pays."""
        if not (torch.is_grad_enabled() and layer.weight.requires_grad and self._pays(layer, x)):
            return F.linear(x, layer.weight, layer.bias)
        output: Tensor = _ProjectedLinear.apply(x, layer.weight, layer.bias, self)
        return output

    def gradient(self) -> Tensor:
        """``Σ δᵀ (x P)`` over all uses, (out, d)."""
        return torch.stack([delta.mT @ self.project(x.unsqueeze(0))[0] for x, delta in self.uses]).sum(0)

    def explains(self, gradient: Tensor) -> bool:
        """Whether ``gradient`` (out, d) is ``Σ δᵀ (x P)``, up to rounding, along a random direction ``v``.

        That costs no more than ``gradient v`` and ``Σ δᵀ (x (P v))``. Any two different matrices differ along almost
        every direction.
        """
        expected = torch.stack([(x @ self._projected_probe) @ delta for x, delta in self.uses]).sum(0)
        scale = sum(float(x.norm() * delta.norm()) for x, delta in self.uses)
        error = float((gradient @ self._probe - expected).norm())
        return error <= TOLERANCE * torch.finfo(gradient.dtype).eps * scale

    def may_pay(self, layer: nn.Linear) -> bool:
        """Whether the layer is large enough for any batch to save something.

        Never off the CPU: ``explains`` would wait for the device in each step.
        """
        return layer.weight.device.type == "cpu" and self._saved(layer, rows=0) >= WORTHWHILE

    def _pays(self, layer: nn.Linear, x: Tensor) -> bool:
        saved = self._saved(layer, rows=x.numel() // layer.in_features)
        return saved >= WORTHWHILE and not torch.is_autocast_enabled(x.device.type)

    def _saved(self, layer: nn.Linear, rows: int) -> int:
        return 4 * (layer.out_features - rows) * self.project.factor[0].numel()


class _ProjectedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, backward: ProjectedBackward) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.pass_back = backward
        return F.linear(x, weight, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, delta: Tensor) -> tuple[Tensor | None, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        back: ProjectedBackward = ctx.pass_back
        rows, deltas = x.reshape(-1, x.shape[-1]), delta.reshape(-1, delta.shape[-1])
        for_x = delta @ weight if ctx.needs_input_grad[0] else None
        for_bias = deltas.sum(0) if ctx.needs_input_grad[2] else None
        if back.ones:
            rows = F.pad(rows, (0, 1), value=1.0)
        back.uses.append((rows, deltas))
        gradient = deltas.mT @ back.project(rows.unsqueeze(0))[0]
        if back.ones:
            return for_x, gradient[:, :-1], gradient[:, -1], None
        return for_x, gradient, for_bias, None

"""The interface that all kinds of layers share.

A layer multiplies its weight matrix ``W`` (out x d) with an input matrix ``A`` (d x n), so that its output is ``W A``.
``A`` has one column per sample, token or patch, with padding, stride and dilation applied. A convolution with groups
has one such pair per group, so every matrix here has a leading group axis: ``W`` is (groups, out / groups, d), ``A`` is
(groups, d, n).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Lines(NamedTuple):
    """Columns that overlap. Each column is a window of neighbouring lines."""

    values: Tensor
    """(channels, other axes of the kernel, lines, n)"""
    size: int
    """Lines per window. The rows of a column are (channels, lines of the window, other axes of the kernel)."""

    @property
    def windows(self) -> int:
        """Number of windows in each of the n stacks of lines."""
        return self.values.shape[2] - self.size + 1


class Layer(ABC):
    """One weight of a module, with its bias, and how the module uses them.

    Each kind of layer is a subclass. It implements ``find`` (which modules contain such layers) and ``columns`` (the
    inputs of a call as columns). It overrides ``weight_rows`` and ``weight_like`` if the first axis of the weight is
    not the output. It implements ``output_columns`` if it has per-sample gradients (``has_per_sample_gradients``).
    """

    takes_rows: ClassVar[bool] = False
    """Whether the module computes ``x Wᵀ + b``. Then the input ``x P`` has the same effect as the weight ``W P``, for
    a symmetric ``P``."""

    in_calls: ClassVar[bool] = True
    """Whether calls of the module use the weight. If not, functions such as ``F.linear`` use it."""

    has_per_sample_gradients: ClassVar[bool] = True
    """Whether ``per_sample`` can compute per-sample gradients."""

    constants: Sequence[str] = ()
    """Names of further parameters that the module adds somewhere. They multiply no input and are not the bias."""

    def __init__(self, module: nn.Module, weight: str = "weight", bias: str = "bias", groups: int = 1) -> None:
        """Init.

        :param module: the module that is called.
        :param weight: name of the weight in the module.
        :param bias: name of its bias; the module may have none.
        :param groups: number of groups.
        """
        self.module = module
        self.weight_name = weight
        self.bias_name = bias
        self.groups = groups

    @classmethod
    @abstractmethod
    def find(cls, module: nn.Module) -> list[Layer]:
        """Return the layers of this kind in ``module`` itself; an empty list if the module is of another kind."""

    @property
    def weight(self) -> Tensor:
        weight: Tensor = attrgetter(self.weight_name)(self.module)
        return weight

    @property
    def bias(self) -> Tensor | None:
        path, _, leaf = self.bias_name.rpartition(".")
        bias: Tensor | None = getattr(self.module.get_submodule(path), leaf, None)
        return bias

    @property
    def rule(self) -> nn.Module | None:
        """The parametrization that computes the weight (``torch.nn.utils.parametrize``); None if it is a parameter."""
        path, _, leaf = self.weight_name.rpartition(".")
        rules = dict(getattr(self.module.get_submodule(path), "parametrizations", {}))
        return rules.get(leaf)

    def set_weight(self, value: Tensor) -> None:
        """Set a computed weight to ``value``, through the parameters from which it is computed."""
        path, _, leaf = self.weight_name.rpartition(".")
        setattr(self.module.get_submodule(path), leaf, value)

    # --------------------------------------------------------------------------------------------- inputs as columns

    @abstractmethod
    def columns(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        """The inputs of a call of the module as columns (groups, d, n), in chunks of bounded size."""

    def augmented_columns(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        """Like ``columns``, with a constant 1 as last row: the input that the bias multiplies."""
        return (with_ones(columns) for columns in self.columns(*args, **kwargs))

    def mean_columns(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        """The mean input of a call, as columns."""
        yield torch.cat(list(self.columns(*args, **kwargs)), dim=-1).mean(-1, keepdim=True)

    def lines(self, *args: Any, **kwargs: Any) -> Iterator[Lines] | None:
        """The inputs of a call as overlapping windows of lines, in chunks; None unless that saves half of the work."""
        return None

    # ------------------------------------------------------------------------------------------------ weight as rows

    def weight_rows(self, weight: Tensor) -> Tensor:
        """Reshape a tensor with the weight's shape to rows (groups, out / groups, d), as a view where possible."""
        return weight.reshape(self.groups, len(weight) // self.groups, -1)

    def weight_like(self, rows: Tensor) -> Tensor:
        """Undo ``weight_rows``. ``rows`` may have additional leading axes."""
        return rows.reshape(*rows.shape[:-3], *self.weight.shape)

    def in_memory_order(self, factor: Tensor) -> tuple[Layer, Tensor]:
        """Return this layer and ``factor`` (groups, d, r) with the inputs reordered as the weight lies in memory.

        In that order, no copy is needed to view the weight and its gradient as rows.
        """
        return self, factor

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """Reshape tensors with the shapes of the weight, or of weight and bias, to rows (groups, out / groups, d)."""
        weight, *bias = tensors
        rows = [self.weight_rows(weight), *(tensor.reshape(self.groups, -1, 1) for tensor in bias)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)

    def from_rows(self, rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Undo ``rows``: split ``rows`` into tensors with the shapes of ``like``."""
        d = rows.shape[-1] - len(like) + 1
        return [self.weight_like(rows[..., :d]), *(rows[..., d].reshape(tensor.shape) for tensor in like[1:])]

    # ------------------------------------------------------------------------------------------ per-sample gradients

    def squares(self, name: str, x: Tensor, gradient: Tensor) -> Tensor | None:
        """``Σ_i G_i²`` over the samples of a call; None if that cannot be computed without per-sample gradients."""
        return None

    def per_sample(self, name: str, x: Tensor, gradient: Tensor) -> Tensor:
        """Return the per-sample gradients: ``G_i = D_i A_iᵀ`` for the weight, the row sums of ``D_i`` for the bias.

        :param name: name of the weight or of the bias in the module.
        :param x: input of a call; the first axis is the sample.
        :param gradient: gradient of its output.
        """
        outputs = self.output_columns(gradient)
        if name == self.bias_name:
            return outputs.sum(-1).flatten(1)
        columns = torch.cat(list(self.columns(x)), dim=-1)
        # (group, d, sample, position) -> (sample, group, position, d)
        columns = columns.reshape(self.groups, -1, len(x), outputs.shape[-1]).permute(2, 0, 3, 1)
        return self.weight_like(outputs @ columns)

    def output_columns(self, gradient: Tensor) -> Tensor:
        """Reshape the gradient of an output to the ``D_i`` of all samples: (sample, group, out / groups, position)."""
        raise NotImplementedError

    def elements_per_sample(self, name: str, gradient: Tensor) -> int:
        """Number of elements in ``A_i``, or in ``D_i`` for the bias: what a per-sample gradient is computed from."""
        if name == self.bias_name:
            return gradient[0].numel()
        _, out, d = self.weight_rows(self.weight).shape
        return gradient[0].numel() // out * d

    # --------------------------------------------------------------------------------- the layer with another weight

    def compute_with(self, others: Callable[[], Sequence[Tensor]]) -> Callable[[], None]:
        """Let the module compute with other tensors. Return a function that ends this.

        :param others: called in every forward pass; returns the tensor to use as weight, optionally followed by the one
            to use as bias.
        """
        replaced: list[list[Tensor]] = []

        def enter(module: nn.Module, args: Any) -> None:
            pairs = zip((self.weight_name, self.bias_name), others(), strict=False)
            replaced.append([self._swap(name, other) for name, other in pairs])

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            for name, original in zip((self.weight_name, self.bias_name), replaced.pop(), strict=False):
                self._swap(name, original)

        hooks = (
            self.module.register_forward_pre_hook(enter),
            self.module.register_forward_hook(leave, always_call=True),
        )

        def detach() -> None:
            for hook in hooks:
                hook.remove()

        return detach

    def _swap(self, name: str, tensor: Any) -> Any:
        """Replace the parameter ``name`` with ``tensor`` and return the previous one."""
        path, _, leaf = name.rpartition(".")
        parameters: dict[str, Any] = self.module.get_submodule(path)._parameters
        before, parameters[leaf] = parameters[leaf], tensor
        return before


def with_ones(columns: Tensor) -> Tensor:
    """``columns`` with a constant 1 as last row."""
    return F.pad(columns, (0, 0, 0, 1), value=1.0)


def keeps_forward(module: nn.Module, kind: type[nn.Module], *methods: str) -> bool:
    """Whether ``module`` is a ``kind`` with the original ``forward`` and ``methods``, not overridden by a subclass."""
    return isinstance(module, kind) and all(
        getattr(type(module), method) is getattr(kind, method) for method in ("forward", *methods)
    )

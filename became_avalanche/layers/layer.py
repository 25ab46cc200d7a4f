"""The interface that all kinds of layers share.

A layer with weight matrix ``W`` (out x d) sees an input matrix ``A`` (d x n): one column per sample, token or patch,
padding, stride and dilation applied, so that its output is ``W A``. A convolution with groups is one such pair per
group, so every matrix here carries a leading group axis: ``W`` is (groups, out / groups, d), ``A`` is (groups, d, n).
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
    """Columns that overlap: each of them is a window of neighbouring lines."""

    values: Tensor
    """(channels, other axes of the kernel, lines, n)"""
    size: int
    """Lines of a window. The rows of a column are (channels, lines of the window, other axes of the kernel)."""

    @property
    def windows(self) -> int:
        """Windows in each of the n stacks of lines."""
        return self.values.shape[2] - self.size + 1


class Layer(ABC):
    """One weight of a module, with its bias, and what the module does with them.

    A kind of layer is a subclass. It says in which modules it is found (``find``) and what the inputs of a call are as
    columns (``columns``). If the weight's first axis is not the output, it says how the weight is laid out as rows
    (``weight_rows``, ``weight_like``). If it knows the gradients of single samples (``tells_samples_apart``), it says
    how outputs are laid out (``output_columns``).
    """

    takes_rows: ClassVar[bool] = False
    """Whether the module computes ``x Wᵀ + b`` of its input ``x`` itself, so that ``x P`` does what ``W P`` does."""

    in_calls: ClassVar[bool] = True
    """Whether calls of the module use the weight; otherwise functions do, such as ``F.linear``."""

    tells_samples_apart: ClassVar[bool] = True
    """Whether ``per_sample`` knows the gradients of single samples."""

    constants: Sequence[str] = ()
    """Names of further parameters in the module that are added to what the layer computes, but are no bias of it."""

    def __init__(self, module: nn.Module, weight: str = "weight", bias: str = "bias", groups: int = 1) -> None:
        """Init.

        :param module: the module that is called.
        :param weight: name of the weight in the module.
        :param bias: name of its bias; the module need not have it.
        :param groups: number of groups.
        """
        self.module = module
        self.weight_name = weight
        self.bias_name = bias
        self.groups = groups

    @classmethod
    @abstractmethod
    def find(cls, module: nn.Module) -> list[Layer]:
        """The layers of this kind in ``module`` itself; none if it is of another kind."""

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
        """What computes the weight from other parameters (``torch.nn.utils.parametrize``); None if it is one itself."""
        path, _, leaf = self.weight_name.rpartition(".")
        rules = dict(getattr(self.module.get_submodule(path), "parametrizations", {}))
        return rules.get(leaf)

    def set_weight(self, value: Tensor) -> None:
        """Give a computed weight a value, through the parameters that it is computed from."""
        path, _, leaf = self.weight_name.rpartition(".")
        setattr(self.module.get_submodule(path), leaf, value)

    # --------------------------------------------------------------------------------------------- inputs as columns

    @abstractmethod
    def columns(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        """The inputs of a call of the module as columns (groups, d, n), in chunks of bounded size."""

    def augmented_columns(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        """The same with a constant 1 as last row: the input that the bias multiplies."""
        return (with_ones(columns) for columns in self.columns(*args, **kwargs))

    def mean_columns(self, *args: Any, **kwargs: Any) -> Iterator[Tensor]:
        """The mean input of a call, as columns."""
        yield torch.cat(list(self.columns(*args, **kwargs)), dim=-1).mean(-1, keepdim=True)

    def lines(self, *args: Any, **kwargs: Any) -> Iterator[Lines] | None:
        """The inputs of a call as overlapping windows of lines, in chunks, where that saves half of the work."""
        return None

    # ------------------------------------------------------------------------------------------------ weight as rows

    def weight_rows(self, weight: Tensor) -> Tensor:
        """A tensor in the shape of the weight as rows (groups, out / groups, d), a view of it where possible."""
        return weight.reshape(self.groups, len(weight) // self.groups, -1)

    def weight_like(self, rows: Tensor) -> Tensor:
        """Undo ``weight_rows``; further axes may stand first."""
        return rows.reshape(*rows.shape[:-3], *self.weight.shape)

    def in_memory_order(self, factor: Tensor) -> tuple[Layer, Tensor]:
        """This layer with the inputs of a row in the order of the weight's memory, and ``factor`` (groups, d, r) too.

        Where that is another order, rows of the weight and of its gradient need no copy.
        """
        return self, factor

    def rows(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors in the shapes of the weight, or of weight and bias, as rows (groups, out / groups, d)."""
        weight, *bias = tensors
        rows = [self.weight_rows(weight), *(tensor.reshape(self.groups, -1, 1) for tensor in bias)]
        return rows[0] if len(rows) == 1 else torch.cat(rows, dim=-1)

    def from_rows(self, rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
        """Undo ``rows``: cut ``rows`` into tensors of the shapes of ``like``."""
        d = rows.shape[-1] - len(like) + 1
        return [self.weight_like(rows[..., :d]), *(rows[..., d].reshape(tensor.shape) for tensor in like[1:])]

    # ----------------------------------------------------------------------------------- gradients of single samples

    def squares(self, own: str, x: Tensor, gradient: Tensor) -> Tensor | None:
        """``Σ_i G_i²`` over the samples of a call, where that needs no gradient of a single sample."""
        return None

    def per_sample(self, own: str, x: Tensor, gradient: Tensor) -> Tensor:
        """The gradients of single samples: ``G_i = D_i A_iᵀ`` of the weight, or the sum over ``D_i`` of the bias.

        :param own: name of the weight or of the bias.
        :param x: input of a call, samples first.
        :param gradient: gradient of its output.
        """
        outputs = self.output_columns(gradient)
        if own == self.bias_name:
            return outputs.sum(-1).flatten(1)
        columns = torch.cat(list(self.columns(x)), dim=-1)
        columns = columns.reshape(self.groups, -1, len(x), outputs.shape[-1]).permute(2, 0, 3, 1)  # last: position, d
        return self.weight_like(outputs @ columns)

    def output_columns(self, gradient: Tensor) -> Tensor:
        """The gradient of an output as ``D_i`` of each sample: (sample, group, out / groups, position)."""
        raise NotImplementedError

    def held_per_sample(self, own: str, gradient: Tensor) -> int:
        """Elements of what the gradient of a sample is made of: ``A_i``, or ``D_i`` alone for the bias."""
        if own == self.bias_name:
            return gradient[0].numel()
        _, out, d = self.weight_rows(self.weight).shape
        return gradient[0].numel() // out * d

    # --------------------------------------------------------------------------------- the layer with another weight

    def compute_with(self, others: Callable[[], Sequence[Tensor]]) -> Callable[[], None]:
        """Let the module compute with other tensors until the function that this returns is called.

        :param others: called in every forward pass; returns the tensor in place of the weight, and if the bias is to be
            replaced too, the tensor in place of that.
        """
        replaced: list[list[Tensor]] = []

        def enter(module: nn.Module, args: Any) -> None:
            pairs = zip((self.weight_name, self.bias_name), others(), strict=False)
            replaced.append([self._put(name, other) for name, other in pairs])

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            for name, own in zip((self.weight_name, self.bias_name), replaced.pop(), strict=False):
                self._put(name, own)

        hooks = (
            self.module.register_forward_pre_hook(enter),
            self.module.register_forward_hook(leave, always_call=True),
        )

        def detach() -> None:
            for hook in hooks:
                hook.remove()

        return detach

    def _put(self, name: str, tensor: Any) -> Any:
        """Put ``tensor`` in the place of the parameter ``name`` and return what was there."""
        path, _, leaf = name.rpartition(".")
        parameters: dict[str, Any] = self.module.get_submodule(path)._parameters
        before, parameters[leaf] = parameters[leaf], tensor
        return before


def with_ones(columns: Tensor) -> Tensor:
    """``columns`` with a constant 1 as last row."""
    return F.pad(columns, (0, 0, 0, 1), value=1.0)


def keeps_forward(module: nn.Module, kind: type[nn.Module], *methods: str) -> bool:
    """Whether ``module`` is of this kind, or of a subclass that computes as it does."""
    return isinstance(module, kind) and all(
        getattr(type(module), method) is getattr(kind, method) for method in ("forward", *methods)
    )

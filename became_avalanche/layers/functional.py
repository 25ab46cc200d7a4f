"""Weights that are used without a call of the module that owns them, as in ``F.linear(x, self.proj.weight)``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from became_avalanche.layers.linear import LinearLayer

PRODUCTS = (torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__)


class MatrixLayer(LinearLayer):
    """A matrix (out x d) among the parameters of any module, used by ``F.linear(x, matrix)`` or ``x @ matrix.T``."""

    takes_rows = False
    in_calls = False

    @classmethod
    def find(cls, module: nn.Module) -> list[Any]:
        """Return nothing: only a forward pass shows whether a matrix is used like this."""
        return []


class WeightUses(TorchFunctionMode):
    """While active, records how functions use weights outside the calls of their modules.

    ``F.linear`` and products with the transposed weight are linear uses: their inputs are known. ``others`` collects
    all other uses.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        linear: Collection[str],
        on_linear: Callable[[str, Tensor, Tensor | None], None],
    ) -> None:
        """Init.

        :param weights: the weights to watch, by name.
        :param linear: names of the weights for which ``x Wᵀ`` counts as a linear use.
        :param on_linear: called with the weight's name, the input and the bias of each linear use.
        """
        super().__init__()
        self._linear = linear
        self.inside: Counter[str] = Counter()
        """Weight name -> number of running calls of modules that own it. Uses inside these calls are not recorded."""
        self.others: dict[str, str] = {}
        """Weight name -> name of the first function that uses the weight in any other way."""
        self._names = {id(weight): (name, False) for name, weight in weights.items()}
        self._views: list[Tensor] = []  # kept alive, so that no other tensor gets the same id
        self._on_linear = on_linear

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        for tensor in _tensors([*args, *kwargs.values()]):
            name, transposed = self._names.get(id(tensor), ("", False))
            if not name or self.inside[name]:
                continue
            known = _linear_use(func, args, kwargs, tensor, transposed)
            if known and name in self._linear:
                self._on_linear(name, *known)
            elif _is_transposed(result, tensor):
                self._names[id(result)] = name, not transposed
                self._views.append(result)
            elif isinstance(result, np.ndarray) or next(_tensors([result]), None) is not None:
                self.others.setdefault(name, getattr(func, "__name__", str(func)))
        return result


def _linear_use(
    func: Any, args: Any, kwargs: Any, weight: Tensor, transposed: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Return input and bias if ``func`` computes ``x Wᵀ + b``, otherwise None."""
    given = dict(zip(("input", "weight", "bias"), args, strict=False)) | kwargs
    if func is F.linear and not transposed and given["weight"] is weight and given["input"] is not weight:
        return given["input"], given.get("bias")
    if func in PRODUCTS and transposed and len(args) == 2 and args[1] is weight and args[0] is not weight:
        return args[0], None
    return None


def _is_transposed(result: Any, tensor: Tensor) -> bool:
    return (
        isinstance(result, Tensor)
        and result.data_ptr() == tensor.data_ptr()
        and result.shape == tensor.shape[::-1]
        and result.stride() == tensor.stride()[::-1]
        and result.dim() == 2
    )


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple | list):
            yield from _tensors(value)

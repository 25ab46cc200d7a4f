"""Weights that are used without calling the module that owns them, as in ``F.linear(x, self.proj.weight)``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

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
        """None: whether a matrix is used so is seen only in a forward pass."""
        return []


class WeightUses(TorchFunctionMode):
    """Sees, while it is active, what is done with weights outside the calls of their modules.

    ``F.linear`` is a use whose inputs are known. So is a product with the transposed weight.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        linear: Collection[str],
        on_linear: Callable[[str, Tensor, Tensor | None], None],
    ) -> None:
        """Init.

        :param weights: what to look for, by name.
        :param linear: names of those for which ``x Wᵀ`` is a known use.
        :param on_linear: called with the name, the input and the bias of each known use.
        """
        super().__init__()
        self._linear = linear
        self.inside: Counter[str] = Counter()
        """How many calls are under way of modules that own a weight, by its name."""
        self.others: dict[str, str] = {}
        """Of weights with other uses: the name of the first function."""
        self._names = {id(weight): (name, False) for name, weight in weights.items()}
        self._views: list[Tensor] = []  # kept, so that no other tensor gets the same id
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
            elif next(_tensors([result]), None) is not None:
                self.others.setdefault(name, getattr(func, "__name__", str(func)))
        return result


def _linear_use(
    func: Any, args: Any, kwargs: Any, weight: Tensor, transposed: bool
) -> tuple[Tensor, Tensor | None] | None:
    """Input and bias, if ``func`` computes ``x Wᵀ + b``."""
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

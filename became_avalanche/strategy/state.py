"""State of plugins that outlives an experience."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, ClassVar

import torch
from avalanche.training.plugins import SupervisedPlugin
from torch import Tensor


def _let_dill_find_optimizers() -> None:
    """Put the submodules that ``torch.optim`` removes from its namespace back into it.

    Without them dill, with which Avalanche's ``save_checkpoint`` pickles a strategy, fails on every optimizer.
    """
    for name, module in list(sys.modules.items()):
        parent, _, leaf = name.rpartition(".")
        if parent == "torch.optim" and not hasattr(torch.optim, leaf):
            setattr(torch.optim, leaf, module)


_let_dill_find_optimizers()


class StatefulPlugin(SupervisedPlugin):
    """A plugin whose state can be saved and loaded between experiences, by ``save_strategy`` and ``load_strategy``.

    A subclass names its attributes that later experiences depend on in ``STATE``. Their values are tensors, plain
    values, and dictionaries, lists and tuples of these.
    """

    STATE: ClassVar[tuple[str, ...]] = ()
    """The attributes that later experiences depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Wall-clock seconds since the plugin was made, by what it did: "memory", "fisher" or "merge".

        They are not part of the state.
        """

    @contextmanager
    def timed(self, task: str) -> Iterator[None]:
        """A context whose duration is added to ``seconds[task]``."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[task] += perf_counter() - start

    def state_dict(self) -> dict[str, Any]:
        """Everything that later experiences depend on, as tensors and plain values."""
        return {key: _copied(getattr(self, key)) for key in self.STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that ``state_dict`` returned."""
        if set(state) != set(self.STATE):
            raise ValueError(
                f"this is not the state of a {type(self).__name__}: it has the keys {sorted(state)} instead of "
                f"{sorted(self.STATE)}"
            )
        for key in self.STATE:
            setattr(self, key, _copied(state[key]))

    def memory_bytes(self) -> int:
        """Bytes of all tensors that the method holds between experiences."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(self.state_dict()))


def _copied(state: Any) -> Any:
    """New nested containers with the same values."""
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return type(state)(map(_copied, state)) if isinstance(state, list | tuple) else state


def _tensors(state: Any) -> Iterator[Tensor]:
    """All tensors in nested containers."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _tensors(value)

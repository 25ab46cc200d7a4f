"""State of plugins that outlives an experience."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from avalanche.training.plugins import SupervisedPlugin
from torch import Tensor


class StatefulPlugin(SupervisedPlugin):
    """A plugin whose state can be saved and loaded between experiences: tensors and plain values only."""

    _STATE: ClassVar[tuple[str, ...]] = ()
    """The attributes that later experiences depend on."""

    def state_dict(self) -> dict[str, Any]:
        """All that later experiences depend on, as tensors and plain values."""
        return {key: _copied(getattr(self, key)) for key in self._STATE}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state that ``state_dict`` returned."""
        if set(state) != set(self._STATE):
            raise ValueError(f"not the state of a {type(self).__name__}: it has the keys {sorted(state)}")
        for key in self._STATE:
            setattr(self, key, _copied(state[key]))

    def memory_bytes(self) -> int:
        """Bytes of all tensors that the method holds between experiences."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(self.state_dict()))


def _copied(state: Any) -> Any:
    """Nested dictionaries anew, with the same values."""
    return {key: _copied(value) for key, value in state.items()} if isinstance(state, dict) else state


def _tensors(state: Any) -> Iterator[Tensor]:
    """All tensors in nested dictionaries."""
    if isinstance(state, dict):
        for value in state.values():
            yield from _tensors(value)
    elif isinstance(state, Tensor):
        yield state

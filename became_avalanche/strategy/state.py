"""Plugins with state that lasts from one experience to the next."""

from __future__ import annotations

import sys
import warnings
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, ClassVar
from weakref import ref

import torch
from avalanche.training.plugins import SupervisedPlugin
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor, nn

from became_avalanche.strategy.owner import fingerprint, has_weights, renamed, unwrapped, with_names


def _let_dill_find_optimizers() -> None:
    """Add the submodules that ``torch.optim`` removes from its namespace again.

    Without them dill, which Avalanche's ``save_checkpoint`` uses, cannot pickle any optimizer.
    """
    for name, module in list(sys.modules.items()):
        parent, _, leaf = name.rpartition(".")
        if parent == "torch.optim" and not hasattr(torch.optim, leaf):
            setattr(torch.optim, leaf, module)


_let_dill_find_optimizers()


VERSION = 1
"""Version of the state of plugins. Raise it with every change that an older version of the package would misread."""


class StatefulPlugin(SupervisedPlugin):
    """A plugin whose state can be saved and loaded between experiences, by ``save_strategy`` and ``load_strategy``.

    A subclass lists in ``STATE`` its attributes that later experiences depend on. Their values are tensors, plain
    values, and dictionaries, lists and tuples of these.

    The state belongs to one model. Training or evaluating another model with it raises a ValueError; call ``reset``
    first. A model counts as the same if it is the same object, wraps it (``DataParallel``, ``torch.compile``), or has
    the same weights, as after copying or reloading.
    """

    STATE: ClassVar[tuple[str, ...]] = ()
    """The attributes that later experiences depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """Wall-clock seconds that the plugin has spent so far, by activity: "memory", "fisher" or "merge".

        They are not part of the state.
        """
        self._initial: dict[str, Any] | None = None
        self._owner: ref[nn.Module] | None = None
        self._weights: dict[str, list[float]] = {}
        self._in_progress = False
        """Whether a training has started and has not ended: it runs, or it was interrupted."""

    @contextmanager
    def timed(self, task: str) -> Iterator[None]:
        """Add the duration of the context to ``seconds[task]``."""
        start = perf_counter()
        try:
            yield
        finally:
            self.seconds[task] += perf_counter() - start

    def state_dict(self) -> dict[str, Any]:
        """Return everything that later experiences depend on, as tensors and plain values."""
        about = {"kind": type(self).__name__, "version": VERSION, "weights": dict(self._weights)}
        return {**about, **{key: _copied(getattr(self, key)) for key in self.STATE}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that ``state_dict`` returned.

        States of early versions of this package do not name their kind. They are accepted if they have the right keys.
        """
        kind, version = state.get("kind", type(self).__name__), state.get("version", 0)
        if kind != type(self).__name__:
            raise ValueError(f"this is the state of a {kind}, not of a {type(self).__name__}")
        if version > VERSION:
            raise ValueError(
                f"this state of a {kind} has version {version}, and this version of became-avalanche reads up to "
                f"{VERSION}: upgrade the package"
            )
        keys = set(state) - {"kind", "version", "weights"}
        if keys != set(self.STATE):
            raise ValueError(
                f"this is not the state of a {type(self).__name__}: it has the keys {sorted(keys)} instead of "
                f"{sorted(self.STATE)}"
            )
        self._note_initial_state()
        for key in self.STATE:
            setattr(self, key, _copied(state[key]))
        self._owner, self._weights = None, dict(state.get("weights", {}))

    def reset(self) -> None:
        """Forget everything, as if newly created, for a run with another model."""
        for key, value in (self._initial or {}).items():
            setattr(self, key, _copied(value))
        self._owner, self._weights = None, {}
        self._in_progress = False

    def memory_bytes(self) -> int:
        """Return the size in bytes of all tensors that the plugin keeps between experiences."""
        return sum(tensor.numel() * tensor.element_size() for tensor in _tensors(self.state_dict()))

    def remembered(self) -> Collection[str]:
        """Return the names of the parameters that the state refers to. A model must have all of them."""
        return ()

    def is_new(self) -> bool:
        """Whether the state is that of a newly created plugin."""
        self._note_initial_state()
        return _equal({key: getattr(self, key) for key in self.STATE if hasattr(self, key)}, self._initial)

    # --------------------------------------------------------------------------------------------------- callbacks

    def before_training(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        known = self._owner is not None and self._owner() is unwrapped(strategy.model)
        self._recognise(strategy.model)
        interrupted, self._in_progress = self._in_progress, True
        if known and not interrupted and self._weights and not has_weights(strategy.model, self._weights):
            warnings.warn(
                f"the weights of the model have changed since the last training with {type(self).__name__}, so its "
                "memory belongs to other weights: restore the weights, or call reset() to start from scratch",
                stacklevel=2,
            )

    def after_training(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._weights = fingerprint(strategy.model) if self.STATE else {}
        self._in_progress = False

    def before_eval(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._recognise(strategy.model)

    # ----------------------------------------------------------------------------------------------------- details

    def _recognise(self, model: nn.Module) -> None:
        """Raise a ValueError if the state belongs to another model. Rename parameters that a wrapper has renamed."""
        plain = unwrapped(model)
        same = self._owner is not None and self._owner() is plain
        if not self.is_new():
            stored = self.remembered()
            found, missing = renamed([*stored, *self._weights], [name for name, _ in model.named_parameters()])
            weights = with_names(self._weights, found)
            alike = same or has_weights(model, weights)
            if not alike and self._owner is not None:
                raise ValueError(
                    f"the memory of this {type(self).__name__} belongs to another model: create a new plugin for "
                    "each model, or call reset() first"
                )
            if lacking := [name for name in stored if name in missing]:
                raise ValueError(
                    f"{type(self).__name__} remembers {', '.join(lacking)}, which the model lacks: its parameters were "
                    "renamed, or it is another model; call reset() to start from scratch"
                )
            if not alike:
                warnings.warn(
                    f"the weights of the model are not those that the state of {type(self).__name__} was saved with: "
                    "load the state of the model, too",
                    stacklevel=3,
                )
            if found:
                self._weights = weights
                for key in self.STATE:
                    setattr(self, key, with_names(getattr(self, key), found))
        if not same:
            self._owner = ref(plain)

    def _note_initial_state(self) -> None:
        if self._initial is None:
            self._initial = {key: _copied(getattr(self, key)) for key in self.STATE if hasattr(self, key)}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the reference to the model: copies and pickles recognise their model by its weights."""
        return {**vars(self), "_owner": None}


def _copied(state: Any) -> Any:
    """Copy nested containers. The values inside are not copied."""
    if isinstance(state, dict):
        return {key: _copied(value) for key, value in state.items()}
    return type(state)(map(_copied, state)) if isinstance(state, list | tuple) else state


def _tensors(state: Any) -> Iterator[Tensor]:
    """Yield all tensors in nested containers."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, dict | list | tuple):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _tensors(value)


def _equal(one: Any, other: Any) -> bool:
    """Whether nested containers have the same values."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) is type(other) and bool(one == other)

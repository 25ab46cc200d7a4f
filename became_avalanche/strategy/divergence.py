"""The error that reports a diverged training."""

from __future__ import annotations


class DivergenceError(ValueError):
    """Raised when a training has diverged: a loss, a Fisher information or a layer's input is no longer finite."""

    def __init__(self, what: str) -> None:
        """Init.

        :param what: the quantity and what is wrong with it, as a clause without a full stop.
        """
        super().__init__(f"{what}: the training has diverged; lower the learning rate")

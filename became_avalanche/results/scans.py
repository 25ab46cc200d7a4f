"""Loss and accuracy around the weights of a merge, as plain values: along its path, and in a plane that contains it.

They are stored in the folder of the run, so that figures need neither torch nor the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from became_avalanche.files import read_file, sealed_json, unsealed
from became_avalanche.results.record import RecordError

SCHEMA = 1
S = TypeVar("S", bound="_Scan")


class _Scan(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    t: int
    """Number of the task, counted from 1."""
    n_samples: int | None = None
    """Number of samples per task; None for all."""

    @classmethod
    def path(cls, folder: Path, t: int) -> Path:
        """Return the path of its file in the folder of its run."""
        return folder / f"{cls.__name__.lower()}-{t:03d}.json"

    def to_json(self) -> str:
        """Return the text of its file."""
        return sealed_json({"schema_version": SCHEMA, **self.model_dump(mode="json")})


class PathScan(_Scan):
    """Loss and accuracy of each task along the path of a merge, ``θ_GP + λ Δ``.

    >>> from became_avalanche import PathScan
    >>> loss, accuracy = [[1.0, 2.0, 5.0], [4.0, 1.0, 0.0]], [[1.0, 0.9, 0.5], [0.2, 0.8, 1.0]]
    >>> scan = PathScan(t=2, coefficients=[0, 0.5, 1], loss=loss, accuracy=accuracy, chosen=0.4, plasticity=1)
    >>> scan.cumulative_loss
    [5.0, 3.0, 5.0]
    >>> scan.best
    0.5
    """

    coefficients: list[float]
    """λ from 0 to 1."""
    loss: list[list[float]]
    """Mean loss over the samples: one row per task, one column per λ."""
    accuracy: list[list[float]]
    """Accuracy as a fraction: one row per task, one column per λ."""
    chosen: float
    """The λ of the merge."""
    plasticity: float
    """Δᵀ F Δ as the merge used it, with the diagonal of the Fisher matrix F."""
    curvature: float | None = None
    """Δᵀ F Δ with the full Fisher matrix F, on the samples of the last task; None if it was not computed."""

    @property
    def cumulative_loss(self) -> list[float]:
        """Sum of the losses of all tasks, for each λ."""
        return [sum(column) for column in zip(*self.loss, strict=True)]

    @property
    def best(self) -> float:
        """The λ with the lowest cumulative loss."""
        losses = self.cumulative_loss
        return self.coefficients[losses.index(min(losses))]


class Landscape(_Scan):
    """Loss and accuracy of each task in the plane through θ*_{t-1}, θ_GP and θ̂."""

    x: list[float]
    """Coordinates along θ_GP − θ*_{t-1}, as distances in weight space; θ*_{t-1} is at zero."""
    y: list[float]
    """Coordinates along the part of θ̂ − θ*_{t-1} that is orthogonal to θ_GP − θ*_{t-1}."""
    loss: list[list[list[float]]]
    """Mean training loss over the samples, indexed by task, y, x."""
    accuracy: list[list[list[float]]]
    """Accuracy on test samples as a fraction, indexed by task, y, x."""
    points: dict[str, tuple[float, float]]
    """Coordinates (x, y) of ``anchor`` θ*_{t-1}, ``base`` θ_GP, ``candidate`` θ̂ and ``merged`` θ*_t."""


def read_scan(kind: type[S], path: Path) -> S:
    """Read a ``PathScan`` or ``Landscape``. Raises a RecordError if the file is corrupt, of another kind, or newer."""
    try:
        content = unsealed(read_file(path), str(path), "a scan around a merge", SCHEMA)
        del content["schema_version"]
        return kind.model_validate(content)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        raise RecordError(f"{path} is corrupt: {error.errors()[0]['msg']}") from None
    except ValueError as error:
        raise RecordError(str(error)) from None


def read_scans(kind: type[S], folder: Path) -> list[S]:
    """Read all ``PathScan`` or ``Landscape`` files in the folder of a run, in the order of the tasks."""
    return [read_scan(kind, path) for path in sorted(folder.glob(f"{kind.__name__.lower()}-*.json"))]

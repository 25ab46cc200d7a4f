"""What was measured around the weights of a merge, as plain values: along its path, and in the plane through it.

They lie beside the record of their run, so that figures need neither torch nor the weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from became_avalanche.files import sealed_json, unsealed
from became_avalanche.results.record import RecordError

SCHEMA = 1
S = TypeVar("S", bound="_Scan")


class _Scan(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    t: int
    """The task, counted from 1."""
    n_samples: int | None = None
    """Samples per task; None for all."""

    @classmethod
    def path(cls, folder: Path, t: int) -> Path:
        """Where it lies in the folder of its run."""
        return folder / f"{cls.__name__.lower()}-{t:03d}.json"

    def to_json(self) -> str:
        """The text of its file."""
        return sealed_json({"schema_version": SCHEMA, **self.model_dump(mode="json")})


class PathScan(_Scan):
    """Loss and accuracy of each task at ``θ_GP + λ Δ``."""

    coefficients: list[float]
    """λ from 0 to 1."""
    loss: list[list[float]]
    """A row per task, a column per λ: mean loss over the samples."""
    accuracy: list[list[float]]
    """The same for the fraction of right answers."""
    chosen: float
    """The λ of the merge."""
    plasticity: float
    """Δᵀ F Δ of the merge, with the diagonal of F."""
    curvature: float | None = None
    """Δᵀ F Δ with the whole of F, on the samples of the last task; None if it was not computed."""

    @property
    def cumulative_loss(self) -> list[float]:
        """The sum of the losses of all tasks, for each λ."""
        return [sum(column) for column in zip(*self.loss, strict=True)]

    @property
    def best(self) -> float:
        """The λ with the least cumulative loss."""
        losses = self.cumulative_loss
        return self.coefficients[losses.index(min(losses))]


class Landscape(_Scan):
    """Loss and accuracy of each task in the plane through θ*_{t-1}, θ_GP and θ̂."""

    x: list[float]
    """Coordinates along θ_GP − θ*_{t-1}, in the unit of the weights; θ*_{t-1} is at zero."""
    y: list[float]
    """Coordinates along what of θ̂ − θ*_{t-1} is orthogonal to that."""
    loss: list[list[list[float]]]
    """Task, y, x: mean training loss over the samples."""
    accuracy: list[list[list[float]]]
    """Task, y, x: fraction of right answers on test samples."""
    points: dict[str, tuple[float, float]]
    """``anchor`` θ*_{t-1}, ``base`` θ_GP, ``candidate`` θ̂ and ``merged`` θ*."""


def read_scan(kind: type[S], path: Path) -> S:
    """A path or landscape from its file; raises a RecordError if it is corrupt, foreign or of a newer version."""
    try:
        content = unsealed(path.read_bytes(), str(path), "the measurements around a merge", SCHEMA)
        del content["schema_version"]
        return kind.model_validate(content)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    except ValidationError as error:
        raise RecordError(f"{path} is corrupt: {error.errors()[0]['msg']}") from None
    except ValueError as error:
        raise RecordError(str(error)) from None


def read_scans(kind: type[S], folder: Path) -> list[S]:
    """All paths or landscapes in the folder of a run, in the order of the tasks."""
    return [read_scan(kind, path) for path in sorted(folder.glob(f"{kind.__name__.lower()}-*.json"))]

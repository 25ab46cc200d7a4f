"""The record of a run: everything that it measured, as plain values.

A record holds what was observed. Whatever can be computed from that (ACC, BWT, gains) is a function of records in
``metrics.py`` and is never stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from became_avalanche.files import UserError, read_file, sealed_json, unsealed

SCHEMA = 1
"""Version of the format. Raise it with every change that an older reader would misunderstand."""
SPEC_SCHEMA = 1
"""Version of the specification, in ``spec.json`` and in a record. Raise it as ``SCHEMA``."""

Status = Literal["running", "done", "diverged", "failed"]
Matrix = list[list[Annotated[float, Ge(0), Le(1)] | None]]
"""Row t, column i: accuracy on task i after training on task t, as a fraction; None where it was not measured."""


class RecordError(UserError, ValueError):
    """A record that cannot be read: corrupt, foreign or of a newer version."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class StageRecord(_Frozen):
    """One training of one task, epoch by epoch. The lists are empty where nothing was traced."""

    epochs: int
    training_loss: list[float | None] = []
    """Mean over the epoch's batches, penalties included; None if it is not finite."""
    validation_loss: list[float | None] = []
    learning_rate: list[float] = []
    """Rate of the optimizer's first parameter group."""
    seconds: list[float] = []


class Seconds(_Frozen):
    """Wall-clock time spent on one task."""

    training: float = 0.0
    """Both stages, with everything that plugins do in them, the three below included."""
    memory: float = 0.0
    """Updates of the projection memory."""
    fisher: float = 0.0
    """Estimates of the Fisher information."""
    merge: float = 0.0
    """The merge, without its Fisher information."""
    evaluation: float = 0.0


class TaskRecord(_Frozen):
    """What happened while a task was learned."""

    stages: list[StageRecord]
    first_epoch_accuracy: float | None = None
    """Accuracy on the task's own test data after the first epoch of stage 1 (for AOA)."""
    ranks: dict[str, int] = {}
    """Rank of the memory of each protected layer after the task, by the name of its weight."""
    memory_bytes: dict[str, int] = {}
    """Bytes that each plugin holds after the task, by the name of its class."""
    seconds: Seconds | None = None


class MergeRecord(_Frozen):
    """One merge, with Δ = θ̂ − θ_GP and d = θ_GP − θ*_{t-1}."""

    t: int
    """Task, counted from 1."""
    coefficient: float
    """λ; its mean over all elements that moved if the rule gives more than one."""
    plasticity: float
    """Δᵀ F_t(θ̂) Δ."""
    stability: float
    """Δᵀ Λ_{t-1} Δ."""
    drift: float
    """dᵀ Λ_{t-1} d."""
    drift_along_delta: float
    """dᵀ Λ_{t-1} Δ, which Eq. 20 assumes to be zero."""
    delta_norm: float
    """‖Δ‖."""
    drift_norm: float
    """‖d‖."""
    seconds: float
    """Both Fisher estimates, the coefficient and the new weights."""


class References(_Frozen):
    """Keys of the runs of the same seed that this run is compared with."""

    baseline: str | None = None
    """The same method without its second stage."""
    control: str | None = None
    """The same method with a second stage of equal training and no merge (``-2x``)."""


class _Budget(BaseModel):
    epochs: int


class _Length(BaseModel):
    n_tasks: int


class _Spec(BaseModel):
    """What readers of records need to know of a specification."""

    benchmark: str
    seed: int
    n_tasks: Annotated[int, Ge(1), Le(100_000)]
    max_epochs: int | None
    recipe: _Budget
    stream: _Length
    network: dict[str, Any]


class Record(_Frozen):
    """Everything that a run measured."""

    schema_version: int = SCHEMA
    key: str
    """Name of the run's folder, made from its specification."""
    spec: dict[str, Any]
    """The specification, as in ``spec.json``."""
    method: str
    """Name of the method, such as ``gpm+became``."""
    label: str
    """How tables call it: the name of the method unless a study gives it another."""
    references: References = References()
    status: Status = "running"
    error: str | None = None
    """Traceback of a run that diverged or failed."""
    accuracy: dict[str, Matrix] = {}
    """Accuracy matrix by stream: ``test``, and ``valid`` if there are validation data."""
    tasks: list[TaskRecord] = []
    """One per training: one per task, or a single one for joint training."""
    merges: list[MergeRecord] = []
    peak_memory_bytes: int | None = None
    """Largest resident size of the process."""
    environment: dict[str, str] = {}
    """Versions of Python, torch, Avalanche and this package, the processor, and the commit of the code."""
    resumed: list[int] = []
    """Number of finished tasks at each resume."""
    converted: dict[str, float] = Field(default={})
    """Only in records converted from results of version 0.1: sums that it kept instead of what they are made of
    (``seconds`` of training, ``valid_acc``)."""
    joint_accuracy: list[float | None] = Field(default=[], exclude=True)
    """A*_i for each task i: its accuracy after joint training on tasks 1..i, as other runs have measured it. It is not
    part of ``record.json``; ``with_joint`` looks it up."""

    @model_validator(mode="after")
    def _readable(self) -> Record:
        """Refuse what tables and figures could not read."""
        _Spec.model_validate(self.spec)
        for stream, matrix in self.accuracy.items():
            columns = {len(row) for row in matrix}
            if len(columns) > 1 or len(matrix) > min(columns, default=0):
                raise ValueError(f"the rows of the accuracy matrix of {stream!r} do not have a column for each task")
        return self

    @property
    def benchmark(self) -> str:
        """Name of the benchmark."""
        return str(self.spec["benchmark"])

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.spec["seed"])

    @property
    def finished(self) -> bool:
        """Whether running it again would give the same: done or diverged."""
        return self.status in ("done", "diverged")

    @property
    def is_joint(self) -> bool:
        """Whether it trained on all tasks at once: an upper bound, which is ranked with no other method."""
        return self.method == "joint"

    def to_json(self) -> str:
        """The text of ``record.json``."""
        return sealed_json(self.model_dump(mode="json"))


def parse_record(text: str | bytes, where: str = "the record") -> Record:
    """A record from the text of ``record.json``; raises a RecordError that says what is wrong with ``where``."""
    from became_avalanche.results.migrations import migrate  # here: it computes metrics, which need this module

    try:
        content = unsealed(text, where, "the record of a run", SCHEMA)
    except ValueError as error:
        raise RecordError(str(error)) from None
    try:
        content = migrate(content, where)
        return Record.model_validate({**content, "schema_version": SCHEMA})
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RecordError(f"{where} is corrupt: {place}: {first['msg']}") from None


def read_record(path: Path) -> Record:
    """The record in a file; raises a RecordError if it is corrupt, foreign or of a newer version."""
    try:
        text = read_file(path)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    return parse_record(text, str(path))


def read_records(folder: Path) -> list[Record]:
    """The records of all runs in a folder of runs, in the order of their keys."""
    return with_joint([read_record(path) for path in sorted(folder.glob("*/record.json"))])


def with_joint(records: Sequence[Record]) -> list[Record]:
    """The records, each with ``joint_accuracy`` from those of joint training among them.

    Joint training on the first i tasks gives A*_i to all runs of the same seed, stream, network and budget. None stands
    where there is no such run that is done, and where there are two with different settings.
    """
    joint = [record for record in records if record.is_joint and record.status == "done" and _has_all_tasks(record)]
    return [record.model_copy(update={"joint_accuracy": _joint_accuracy(record, joint)}) for record in records]


def _has_all_tasks(record: Record) -> bool:
    matrix = record.accuracy.get("test")
    return matrix is not None and len(matrix) > 0 and len(matrix[-1]) >= int(record.spec["n_tasks"])


def _joint_accuracy(record: Record, joint: Sequence[Record]) -> list[float | None]:
    found: dict[int, list[float | None]] = {}
    for other in joint:
        if not record.is_joint and _same_setting(record.spec, other.spec):
            n = other.spec["n_tasks"]
            found.setdefault(n, []).append(other.accuracy["test"][-1][n - 1])
    values = [found.get(n, []) for n in range(1, record.spec["n_tasks"] + 1)]
    return [value[0] if len(value) == 1 else None for value in values] if found else []


def _same_setting(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    same = all(first[name] == second[name] for name in ("benchmark", "stream", "network", "seed"))
    return same and same_budget(first, second)


def same_budget(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether two specifications limit their epochs alike.

    A specification drops a limit that its recipe does not reach. So a run without limit has the same budget if its
    recipe is no longer than the limit of the other.
    """
    if first["max_epochs"] == second["max_epochs"]:
        return True
    free, limited = sorted((first, second), key=lambda spec: spec["max_epochs"] is not None)
    return free["max_epochs"] is None and bool(free["recipe"]["epochs"] <= limited["max_epochs"])


def last_line(error: str) -> str:
    """The last line of a traceback, which says what happened, without the module of the error's class."""
    line = (error.strip().splitlines() or [""])[-1]
    name, colon, message = line.partition(": ")
    known = all(part.isidentifier() for part in name.split("."))
    return f"{name.rpartition('.')[2]}{colon}{message}" if known else line

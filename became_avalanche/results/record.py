"""The record of a run: everything that it measured, as plain values.

A record holds only measurements. Everything that can be computed from them (ACC, BWT, gains) is a function of records
in ``metrics.py`` and is never stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from became_avalanche.files import UserError, read_file, sealed_json, unsealed

SCHEMA = 2
"""Version of the format. Increase it with every change that older versions of the package would misread."""
SPEC_SCHEMA = 2
"""Version of the specification, in ``spec.json`` and in records. Increase it by the same rule as ``SCHEMA``."""

Status = Literal["running", "done", "diverged", "failed"]
Matrix = list[list[Annotated[float, Ge(0), Le(1)] | None]]
"""Row t, column i: accuracy on task i after training on task t, as a fraction; None where it was not measured."""


def _six_digits(value: float) -> float:
    return float(f"{value:.6g}")


Measured = Annotated[float, AfterValidator(_six_digits)]
"""A number of one epoch, rounded to six significant digits: losses in float32 are no more accurate. Most of a record
consists of these numbers, and all their digits would double its size."""


class RecordError(UserError, ValueError):
    """A record cannot be read: it is corrupt, of another kind, or of a newer version."""


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class StageRecord(_Frozen):
    """One training stage of one task, epoch by epoch. Lists are empty if they were not recorded."""

    epochs: int
    training_loss: list[Measured | None] = []
    """Mean loss over the batches of each epoch, including penalties; None if it is not finite."""
    validation_loss: list[Measured | None] = []
    learning_rate: list[Measured] = []
    """Learning rate of the optimizer's first parameter group."""
    seconds: list[Measured] = []


class Seconds(_Frozen):
    """Wall-clock time spent on one task."""

    training: float = 0.0
    """Both stages, including all work of plugins; ``memory``, ``fisher`` and ``merge`` are part of it."""
    memory: float = 0.0
    """Updating the projection memory."""
    fisher: float = 0.0
    """Estimating the Fisher information."""
    merge: float = 0.0
    """Merging, without estimating the Fisher information."""
    evaluation: float = 0.0


class TaskRecord(_Frozen):
    """Measurements made while a task was learned."""

    stages: list[StageRecord]
    first_epoch_accuracy: float | None = None
    """Accuracy on the test data of the task after the first epoch of stage 1 (for AOA)."""
    ranks: dict[str, int] = {}
    """Rank of the memory of each protected layer after the task, keyed by the name of its weight."""
    memory_bytes: dict[str, int] = {}
    """Bytes that each plugin holds after the task, keyed by the name of its class."""
    seconds: Seconds | None = None


class MergeRecord(_Frozen):
    """Measurements of one merge, with Δ = θ̂ − θ_GP and d = θ_GP − θ*_{t-1}."""

    t: int
    """Number of the task, counted from 1."""
    coefficient: float
    """λ. If the rule has one λ per element, the mean over all elements that moved."""
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
    """Time for both Fisher estimates, the coefficient and the merged weights."""


class References(_Frozen):
    """Keys of the runs with the same seed that this run is compared with."""

    baseline: str | None = None
    """The same method without its second stage."""
    control: str | None = None
    """The same method with a second stage of equal training but without a merge (``-2x``)."""


class _Budget(BaseModel):
    epochs: int


class _Length(BaseModel):
    n_tasks: int


class _Spec(BaseModel):
    """The fields of a specification that tables and figures need."""

    benchmark: str
    seed: int
    n_tasks: Annotated[int, Ge(1), Le(100_000)]
    max_epochs: int | None
    recipe: _Budget
    stream: _Length
    network: dict[str, Any]


class Record(_Frozen):
    """Everything that a run measured. ``METRICS`` computes numbers such as ACC from it.

    ``train`` returns a record, and ``read_record`` and ``read_records`` read records from files.

    >>> from became_avalanche import METRICS, Record
    >>> spec = {"benchmark": "demo", "seed": 0, "n_tasks": 2, "max_epochs": None, "recipe": {"epochs": 5},
    ...         "stream": {"n_tasks": 2}, "network": {"name": "mlp"}}
    >>> accuracy = {"test": [[0.9, None], [0.8, 0.7]]}
    >>> run = Record(key="demo", spec=spec, method="gpm", label="gpm", status="done", accuracy=accuracy)
    >>> run.benchmark, run.seed
    ('demo', 0)
    >>> round(METRICS["acc"].of(run), 2)
    0.75
    """

    schema_version: int = SCHEMA
    key: str
    """Name of the folder of the run, derived from its specification."""
    spec: dict[str, Any]
    """The specification, as in ``spec.json``."""
    method: str
    """Name of the method, such as ``gpm+became``."""
    label: str
    """Name in tables: the name of the method, unless a study gives it another label."""
    references: References = References()
    status: Status = "running"
    error: str | None = None
    """Traceback of a run that diverged or failed."""
    accuracy: dict[str, Matrix] = {}
    """Accuracy matrix of each stream: ``test``, and ``valid`` if there are validation data."""
    tasks: list[TaskRecord] = []
    """One entry per task; joint training has a single entry."""
    merges: list[MergeRecord] = []
    peak_memory_bytes: int | None = None
    """Peak memory of the process; on a GPU, peak memory of the tensors on it."""
    environment: dict[str, str] = {}
    """Versions of Python, torch, Avalanche and this package, the processor, and the git commit of the code."""
    resumed: list[int] = []
    """Number of finished tasks each time the run was resumed."""
    converted: dict[str, float] = Field(default={})
    """Only in records converted from version 0.1, which stored totals instead of per-task values: ``seconds`` of
    training and ``valid_acc``."""
    joint_accuracy: list[float | None] = Field(default=[], exclude=True)
    """A*_i for each task i: its accuracy after joint training on tasks 1..i, measured by other runs. ``with_joint``
    fills it in; it is not stored in ``record.json``."""

    @model_validator(mode="after")
    def _check_spec_and_matrices(self) -> Record:
        """Raise an error if tables and figures could not use the specification or the accuracy matrices."""
        _Spec.model_validate(self.spec)
        for stream, matrix in self.accuracy.items():
            columns = {len(row) for row in matrix}
            if len(columns) > 1 or len(matrix) > min(columns, default=0):
                raise ValueError(f"each row of the accuracy matrix {stream!r} must have one column per task")
        return self

    @property
    def benchmark(self) -> str:
        """The name of the benchmark."""
        return str(self.spec["benchmark"])

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.spec["seed"])

    @property
    def finished(self) -> bool:
        """Whether the run is done or diverged; running it again would give the same result."""
        return self.status in ("done", "diverged")

    @property
    def is_joint(self) -> bool:
        """Whether the run trained on all tasks at once. Tables show it as an upper bound and do not rank it."""
        return self.method == "joint"

    def to_json(self) -> str:
        """Return the text of ``record.json``."""
        return sealed_json(self.model_dump(mode="json"))


def parse_record(text: str | bytes, where: str = "the record") -> Record:
    """Parse the text of ``record.json``. Raises a RecordError if it is not a valid record.

    :param where: where the text comes from, for error messages.
    """
    from became_avalanche.results.migrations import migrate  # imported here because it needs this module

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
    """Read a record from a file. Raises a RecordError if the file is corrupt, not a record, or of a newer version.

    >>> from pathlib import Path
    >>> from became_avalanche import Record, read_record
    >>> spec = {"benchmark": "demo", "seed": 0, "n_tasks": 1, "max_epochs": None, "recipe": {"epochs": 5},
    ...         "stream": {"n_tasks": 1}, "network": {"name": "mlp"}}
    >>> run = Record(key="demo", spec=spec, method="gpm", label="gpm")
    >>> _ = Path("record.json").write_text(run.to_json())
    >>> read_record(Path("record.json")) == run
    True
    """
    try:
        text = read_file(path)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror}") from None
    return parse_record(text, str(path))


def read_records(folder: Path) -> list[Record]:
    """Read the records of all runs in a folder of runs, sorted by their keys.

    >>> from pathlib import Path
    >>> from became_avalanche import Record, read_records
    >>> spec = {"benchmark": "demo", "n_tasks": 1, "max_epochs": None, "recipe": {"epochs": 5},
    ...         "stream": {"n_tasks": 1}, "network": {"name": "mlp"}}
    >>> for seed in (0, 1):
    ...     folder = Path("my-runs") / f"demo.seed{seed}"
    ...     folder.mkdir(parents=True)
    ...     run = Record(key=folder.name, spec={**spec, "seed": seed}, method="gpm", label="gpm")
    ...     _ = (folder / "record.json").write_text(run.to_json())
    >>> [run.key for run in read_records(Path("my-runs"))]
    ['demo.seed0', 'demo.seed1']
    """
    return with_joint([read_record(path) for path in sorted(folder.glob("*/record.json"))])


def with_joint(records: Sequence[Record]) -> list[Record]:
    """Return the records with ``joint_accuracy`` filled in from the runs of joint training among them.

    Joint training on the first i tasks gives A*_i for all runs with the same benchmark, stream, network, seed and
    budget. A*_i is None if no such run is done, and also if several are, since it is not clear which one to use.
    """
    joint = [
        record for record in records if record.is_joint and record.status == "done" and _evaluates_all_tasks(record)
    ]
    return [record.model_copy(update={"joint_accuracy": _joint_accuracy(record, joint)}) for record in records]


def _evaluates_all_tasks(record: Record) -> bool:
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
    """Return whether two specifications have the same limit of epochs per stage.

    A specification drops a limit that its recipe does not reach. So a run without a limit has the same budget as a
    limited run if its recipe has no more epochs than that limit.
    """
    if first["max_epochs"] == second["max_epochs"]:
        return True
    unlimited, limited = sorted((first, second), key=lambda spec: spec["max_epochs"] is not None)
    return unlimited["max_epochs"] is None and bool(unlimited["recipe"]["epochs"] <= limited["max_epochs"])


def last_line(error: str) -> str:
    """Return the last line of a traceback, without the module name in front of the error class."""
    line = (error.strip().splitlines() or [""])[-1]
    name, colon, message = line.partition(": ")
    known = all(part.isidentifier() for part in name.split("."))
    return f"{name.rpartition('.')[2]}{colon}{message}" if known else line

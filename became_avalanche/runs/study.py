"""Studies: the runs that they consist of, the status of each run, and the runs that are missing."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

from annotated_types import Ge, MinLen
from pydantic import BaseModel, BeforeValidator, ConfigDict, field_validator, model_validator

from became_avalanche.files import read_file
from became_avalanche.results.metrics import METRICS
from became_avalanche.results.record import Record, RecordError, last_line, with_joint
from became_avalanche.runs.catalogue import find_benchmark
from became_avalanche.runs.components import Options
from became_avalanche.runs.method import MergeSettings, Method
from became_avalanche.runs.spec import RunSpec, Seed, SpecError, validated
from became_avalanche.runs.store import Store

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


MOST_SEEDS = 1000
"""Upper limit for the number of seeds, to catch typing mistakes."""


class StudyMethod(BaseModel):
    """A method of a study: its name, and optional settings."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    label: str | None = None
    options: Options = {}
    """Options of the plugin. They override those of the benchmark."""
    merge: MergeSettings | None = None

    @model_validator(mode="after")
    def _known(self) -> StudyMethod:
        self.method()
        return self

    def method(self) -> Method:
        """Return the method."""
        return Method.parse(self.name, self.options, label=self.label, merge=self.merge)


def _as_table(entry: Any) -> Any:
    """Return the table of fields for an entry that is only a name."""
    return {"name": entry} if isinstance(entry, str) else entry


class Study(BaseModel):
    """Methods × benchmarks × seeds, with one budget.

    ``seeds`` is a list or a number of seeds. ``n_tasks`` and ``max_epochs`` limit the budget; None trains all tasks, as
    long as the recipe says. ``intransigence`` also trains jointly on the first 1, 2, ... tasks, which IM needs.

    >>> from became_avalanche import Study
    >>> study = Study(benchmarks=["split-digits"], methods=["gpm+became", "gpm"], seeds=2, n_tasks=3)
    >>> [(spec.method.name, spec.seed) for spec in study.specs()]
    [('gpm', 0), ('gpm+became', 0), ('gpm', 1), ('gpm+became', 1)]
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "study"
    """Name of the study, and prefix of its tables and figures on disk."""
    benchmarks: Annotated[list[str], MinLen(1)]
    methods: Annotated[list[Annotated[StudyMethod, BeforeValidator(_as_table)]], MinLen(1)]
    """Names, or tables with a name and the fields of ``StudyMethod``."""
    seeds: Annotated[list[Seed], MinLen(1)] = [0]
    """A list of seeds, or a number ``n`` for the seeds 0 to n-1."""
    n_tasks: Annotated[int, Ge(1)] | None = None
    """Budget: number of tasks to train. None: all."""
    max_epochs: Annotated[int, Ge(1)] | None = None
    """Budget: maximum number of epochs per stage. None: as the recipe says."""
    device: str = "cpu"
    threads: Annotated[int, Ge(1)] = 1
    eval_batch_size: Annotated[int, Ge(1)] = 64
    intransigence: bool = False
    """Whether to also train jointly on the first task, the first two, and so on, for each seed. The metric IM needs
    these runs. All methods and studies share them."""

    @field_validator("name")
    @classmethod
    def _file_name(cls, value: str) -> str:
        if not 0 < len(value) <= 100 or set(value) & set("/\\") or not value.isprintable():
            raise SpecError(
                f"it is part of file names, so it must have 1 to 100 printable characters and no slashes; got {value!r}"
            )
        return value

    @field_validator("benchmarks")
    @classmethod
    def _known_benchmarks(cls, value: list[str]) -> list[str]:
        return [find_benchmark(name).name for name in dict.fromkeys(value)]

    @field_validator("seeds", mode="before")
    @classmethod
    def _count(cls, value: Any) -> Any:
        if isinstance(value, bool) or not isinstance(value, int):
            return value
        if not 1 <= value <= MOST_SEEDS:
            raise SpecError(f"the number of seeds must be from 1 to {MOST_SEEDS}; got {value}")
        return list(range(value))

    @field_validator("seeds")
    @classmethod
    def _once(cls, value: list[int]) -> list[int]:
        return list(dict.fromkeys(value))

    @classmethod
    def read(cls, path: Path) -> Study:
        """Read the study in a TOML file. Its default name is the name of the file."""
        try:
            content = tomllib.loads(read_file(path).decode())
        except OSError as error:
            raise SpecError(f"cannot read {path}: {error.strerror}") from None
        except RecursionError:
            raise SpecError(f"{path} is not valid TOML: it is nested too deeply") from None
        except ValueError as error:
            raise SpecError(f"{path} is not valid TOML: {error}") from None
        study: Study = validated(cls, {"name": path.stem, **content}, str(path))
        return study

    def specs(self) -> list[RunSpec]:
        """Return the runs, without repetition, in the order in which to train them.

        Seeds come one after the other. Within a seed, a baseline, its control and its merges come first, so that gains
        appear early. Joint training for IM comes last.
        """
        methods = _references_first([entry.method() for entry in self.methods])
        settings: dict[str, Any] = self.model_dump(exclude={"name", "benchmarks", "methods", "seeds", "intransigence"})
        specs = []
        for seed in self.seeds:
            for name in self.benchmarks:
                own = [find_benchmark(name).spec(method, seed, **settings) for method in methods]
                specs += own + (_joint_prefixes(own[0].n_tasks, name, seed, settings) if self.intransigence else [])
        by_key: dict[str, RunSpec] = {}
        by_label: dict[tuple[str, int, str], str] = {}
        for spec in specs:
            label, key = spec.method.shown, spec.key()
            if by_key.setdefault(key, spec).method.shown != label:
                raise SpecError(
                    f"{by_key[key].method.shown!r} and {label!r} are the same run of {spec.benchmark}; remove one"
                )
            if by_label.setdefault((spec.benchmark, spec.seed, label), key) != key:
                raise SpecError(
                    f"two methods with different options are called {label!r}; give one of them another label"
                )
        return list(by_key.values())

    def labels(self) -> list[str]:
        """Return the names of the methods in tables, in the order of the study. Joint training for IM comes last."""
        shown = [entry.method().shown for entry in self.methods]
        return list(dict.fromkeys([*shown, *(["joint"] if self.intransigence else [])]))


def _references_first(methods: Sequence[Method]) -> list[Method]:
    """Return the methods with a merge, each after its baseline and control, and then the other methods."""
    ordered: list[Method] = []
    for method in methods:
        if method.merge is not None:
            references = (method.baseline, method.equal_training)
            ordered += [other for other in methods if other.model_copy(update={"label": None}) in references]
            ordered.append(method)
    return list({id(method): method for method in (*ordered, *methods)}.values())


def _joint_prefixes(n_tasks: int, benchmark: str, seed: int, settings: Mapping[str, Any]) -> list[RunSpec]:
    """Return joint runs on the first task, on the first two, and so on. Only the last one is a row of tables."""
    return [
        find_benchmark(benchmark).spec(
            Method(base="joint", label=None if n == n_tasks else f"joint on {n} of {n_tasks} tasks"),
            seed,
            **{**settings, "n_tasks": n},
        )
        for n in range(1, n_tasks + 1)
    ]


# ----------------------------------------------------------------------------------------------------------- status


@dataclass(frozen=True)
class RunStatus:
    """The status of a run of a study."""

    spec: RunSpec
    state: str
    """done, diverged, failed, running, interrupted, missing, or unreadable."""
    record: Record | None = None
    note: str = ""


def status_of(specs: Iterable[RunSpec], store: Store) -> list[RunStatus]:
    """Return the status of each run."""
    return [_status(spec, store) for spec in specs]


def _status(spec: RunSpec, store: Store) -> RunStatus:
    try:
        folder = store.folder(spec)
        record = folder.record()
    except (RecordError, SpecError) as error:
        return RunStatus(spec, "unreadable", None, str(error))
    holder = folder.holder()
    if holder is not None:
        return RunStatus(spec, "running", record, f"{_progress(spec, record)}, by {holder}")
    if record is None:
        return RunStatus(spec, "interrupted" if folder.path.exists() else "missing", None, "")
    if record.status == "running":
        resumes = bool(folder.checkpoints())
        how = f"resumes after task {len(record.tasks)}" if resumes else "restarts from the first task"
        return RunStatus(spec, "interrupted", record, f"{_progress(spec, record)}, {how}")
    return RunStatus(spec, record.status, record, last_line(record.error or ""))


def _progress(spec: RunSpec, record: Record | None) -> str:
    return f"{len(record.tasks) if record else 0} of {spec.n_trainings} tasks"


def missing(statuses: Iterable[RunStatus]) -> list[RunSpec]:
    """Return the runs to train: all that are readable and not finished. Failed runs are tried again."""
    return [status.spec for status in statuses if status.state not in ("done", "diverged", "unreadable")]


def estimate(specs: Sequence[RunSpec], finished: Iterable[Record]) -> dict[str, float | None]:
    """Estimate the seconds that each run will take, by key, from finished runs on the same benchmark and budget.

    The estimate is the mean over runs of the same method. If there are none, it is the mean over all runs with the same
    number of stages per task. If there are none either, it is None. Joint training is only compared with itself.
    """
    by_method: dict[Any, list[float]] = defaultdict(list)
    by_size: dict[Any, list[float]] = defaultdict(list)
    for record in finished:
        seconds = _total_seconds(record)
        if record.status == "done" and seconds:
            budget = (record.benchmark, record.spec["n_tasks"], record.spec["max_epochs"])
            by_method[(*budget, record.method)].append(seconds)
            if not record.is_joint:
                by_size[(*budget, len(record.tasks[-1].stages))].append(seconds)
    guesses: dict[str, float | None] = {}
    for spec in specs:
        budget = (spec.benchmark, spec.n_tasks, spec.max_epochs)
        known = by_method.get((*budget, spec.method.name))
        if not known and not spec.method.joint:
            known = by_size.get((*budget, spec.method.n_stages if spec.n_tasks > 1 else 1))
        guesses[spec.key()] = mean(known) if known else None
    return guesses


def _total_seconds(record: Record) -> float | None:
    timed = [task.seconds for task in record.tasks if task.seconds is not None]
    if len(timed) == len(record.tasks) and timed:
        return sum(seconds.training + seconds.evaluation for seconds in timed)
    return METRICS["seconds"].of(record)


def records_of(specs: Iterable[RunSpec], store: Store) -> list[Record]:
    """Return the readable records of these runs, with the labels of the specifications."""
    found = []
    for status in status_of(specs, store):
        if status.record is not None:
            found.append(status.record.model_copy(update={"label": status.spec.method.shown}))
    return with_joint(found)

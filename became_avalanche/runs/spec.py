"""The specification of a run: everything that decides a number, as plain values."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from became_avalanche.files import suggestion
from became_avalanche.results.record import References
from became_avalanche.runs.components import NETWORKS, STREAMS, check_options, find, import_path
from became_avalanche.runs.method import Method, Options
from became_avalanche.runs.recipes import AnyRecipe, at_most


class SpecError(ValueError):
    """A specification that is wrong: which field, which value, and what is allowed."""


class _Component(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    """A registered name, or an import path ``module:name``."""
    options: Options = {}

    @field_validator("name", mode="before")
    @classmethod
    def _path(cls, value: Any) -> Any:
        return import_path(value)


class Stream(_Component):
    """The stream of tasks: a function of the seed."""

    n_tasks: Annotated[int, Ge(1)]
    """Number of tasks of the stream."""

    def function(self) -> Callable[..., Any]:
        """The function that makes the stream."""
        return find("stream", self.name, STREAMS)

    @property
    def reads_files(self) -> bool:
        """Whether it needs a folder of data sets."""
        return "dataset_root" in inspect.signature(self.function()).parameters


class Network(_Component):
    """The network, made without further arguments."""

    channels_last: bool = False
    """Memory format of its weights: about a tenth faster on a CPU, with other rounding."""


class RunSpec(BaseModel):
    """One run: a benchmark, a network, a method, a recipe and a seed.

    Two runs with equal specifications give the same numbers on the same machine with the same versions. Where the data
    lie and what is logged is not part of it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    benchmark: str
    """Name of the benchmark, as tables call it."""
    stream: Stream
    network: Network
    method: Method
    recipe: AnyRecipe
    seed: Annotated[int, Ge(0)] = 0
    """Decides on the tasks, the initial weights and the order of the data."""
    n_tasks: Annotated[int, Ge(1)]
    """Number of tasks to train."""
    max_epochs: Annotated[int, Ge(1)] | None = None
    """Budget: at most this many epochs per stage. None for the recipe's own number."""
    device: str = "cpu"
    threads: Annotated[int, Ge(1)] = 1
    """Threads of torch on the CPU. Sums are rounded differently with another number."""
    eval_batch_size: Annotated[int, Ge(1)] = 64

    @model_validator(mode="after")
    def _within_the_stream(self) -> RunSpec:
        if self.n_tasks > self.stream.n_tasks:
            raise ValueError(
                f"{self.benchmark} has {self.stream.n_tasks} tasks: choose n_tasks between 1 and "
                f"{self.stream.n_tasks}, not {self.n_tasks}"
            )
        if self.max_epochs is not None and self.max_epochs >= self.recipe.epochs:
            object.__setattr__(self, "max_epochs", None)  # no restriction, so the same run as without
        return self

    @property
    def effective_recipe(self) -> Any:
        """The recipe within the budget."""
        return at_most(self.recipe, self.max_epochs)

    @property
    def n_trainings(self) -> int:
        """Number of trainings: one per task, or a single one for joint training."""
        return 1 if self.method.joint else self.n_tasks

    def with_method(self, method: Method) -> RunSpec:
        """The same run of another method."""
        return self.model_copy(update={"method": method})

    @property
    def references(self) -> References:
        """The runs of the same seed that this one is compared with."""
        others = (self.method.baseline, self.method.equal_training)
        keys = [None if other is None else self.with_method(other).key() for other in others]
        return References(baseline=keys[0], control=keys[1])

    def key(self) -> str:
        """Name of the run's folder: readable, and different for every specification.

        Options at their default do not enter it, so a new option with a default does not orphan finished runs.
        """
        content = self.with_method(self.method.shortened()).model_dump(mode="json", exclude_defaults=True)
        text = json.dumps(_canonical(content), sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        readable = re.sub(r"[^\w+.-]", "_", f"{self.benchmark}.{self.method.name}.seed{self.seed}")
        return f"{readable}.{digest}"

    def completed(self) -> RunSpec:
        """The same with the default of every option written out."""
        return self.with_method(self.method.completed())

    def check(self) -> None:
        """Raise a SpecError if a component or one of its options does not exist. This imports torch."""
        try:
            check_options(f"the stream {self.stream.name}", self.stream.function(), self.stream.options)
            network = find("network", self.network.name, NETWORKS)
            check_options(f"the network {self.network.name}", network, self.network.options)
            self.method.make_plugins()
        except ValueError as error:
            raise SpecError(f"{self.benchmark}, {self.method.name}: {error}") from error

    def to_json(self) -> str:
        """The text of ``spec.json``: complete, with the default of every option."""
        return json.dumps(self.completed().model_dump(mode="json"), indent=1, ensure_ascii=False) + "\n"


def parse_spec(content: Any, where: str = "the specification") -> RunSpec:
    """A specification from plain values; raises a SpecError that names the field, the bad value and what is allowed."""
    spec: RunSpec = validated(RunSpec, content, where)
    return spec


def read_spec(path: Path) -> RunSpec:
    """The specification in a ``spec.json``."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise SpecError(f"{path} is corrupt: {error}") from None
    return parse_spec(content, str(path))


def validated(model: type[Any], content: Any, where: str) -> Any:
    """A pydantic model from plain values; all errors in one SpecError, a line each."""
    try:
        return model.model_validate(content)
    except ValidationError as error:
        lines = [_explained(model, problem) for problem in error.errors(include_url=False)]
        raise SpecError(f"{where}: {'; '.join(lines)}") from None


def _explained(model: type[BaseModel], problem: Any) -> str:
    place = ".".join(str(part) for part in problem["loc"] if part not in ("sgd", "nscl"))
    if problem["type"] == "extra_forbidden":
        return f"unknown field {place!r}; {suggestion(str(problem['loc'][-1]), _siblings(model, problem['loc']))}"
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "missing":
        return f"{place} is missing"
    if problem["type"] == "value_error" and not place:
        return str(message)
    value = problem["input"]
    got = "" if isinstance(value, dict) or problem["type"] == "value_error" else f"; got {value!r}"
    return f"{place}: {message[0].lower()}{message[1:]}{got}" if place else f"{message}{got}"


def _siblings(model: Any, place: tuple[Any, ...]) -> list[str]:
    """The fields that exist beside an unknown one."""
    for part in place[:-1]:
        fields = getattr(model, "model_fields", None) or getattr(model, "__pydantic_fields__", {})
        if part in fields:
            model = _model_in(fields[part].annotation)
        elif part in ("sgd", "nscl"):
            from became_avalanche.runs.recipes import NSCLRecipe, Recipe

            model = Recipe if part == "sgd" else NSCLRecipe
    return list(getattr(model, "model_fields", None) or getattr(model, "__pydantic_fields__", {}))


def _model_in(annotation: Any) -> Any:
    """The model in an annotation such as ``Model | None`` or ``list[Model]``."""
    if hasattr(annotation, "model_fields") or hasattr(annotation, "__pydantic_fields__"):
        return annotation
    inner = [_model_in(argument) for argument in getattr(annotation, "__args__", ())]
    return next((model for model in inner if model is not None), None)


def _canonical(value: Any) -> Any:
    """The value with 10.0 written as 10, so that equal settings have equal keys."""
    if isinstance(value, dict):
        return {key: _canonical(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value

"""The specification of a run: everything that affects its results, as plain values."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Lt
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from became_avalanche.files import read_file, sealed_json, suggestion, unsealed
from became_avalanche.results.migrations import in_eval_mode
from became_avalanche.results.record import SPEC_SCHEMA, References
from became_avalanche.runs.components import (
    NETWORKS,
    STREAMS,
    Options,
    check_options,
    find,
    import_path,
    without_defaults,
)
from became_avalanche.runs.components import SpecError as SpecError
from became_avalanche.runs.method import Method
from became_avalanche.runs.recipes import RECIPES, AnyRecipe, limit_epochs

Seed = Annotated[int, Ge(0), Lt(2**32)]


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
    """The stream of tasks: a function of the seed, and its options.

    ``name`` is a registered name or an import path ``module:name``. ``options`` are keyword arguments of the function.

    >>> from became_avalanche import Stream
    >>> benchmark = Stream(name="split-digits", n_tasks=5).function()(seed=0)
    >>> len(benchmark.train_stream)
    5
    """

    n_tasks: Annotated[int, Ge(1)]
    """Number of tasks in the stream."""

    @field_validator("options")
    @classmethod
    def _not_reserved(cls, value: Options) -> Options:
        for name in ("seed", "n_tasks", "dataset_root", "device"):
            if name in value:
                raise SpecError(f"{name!r} cannot be an option of the stream: the run sets it")
        return value

    def function(self) -> Callable[..., Any]:
        """Return the function that creates the stream."""
        return find("stream", self.name, STREAMS)

    @property
    def reads_files(self) -> bool:
        """Whether the stream needs a folder of data sets."""
        return "dataset_root" in inspect.signature(self.function()).parameters


class Network(_Component):
    """The network: a class or function, and its options.

    ``name`` is a registered name or an import path ``module:name``. ``options`` are keyword arguments of the class or
    function. With ``channels_last``, weights are stored in that memory format.
    """

    channels_last: bool = False
    """Whether its weights use the channels-last memory format: about 10 % faster on a CPU, with different rounding."""

    def function(self) -> Callable[..., Any]:
        """Return the class or function that creates the network."""
        return find("network", self.name, NETWORKS)


class RunSpec(BaseModel):
    """One run: a benchmark, a network, a method, a recipe and a seed.

    Two runs with equal specifications give the same numbers on the same machine with the same versions. The folder of
    data sets and the loggers are not part of the specification.

    >>> from became_avalanche import Method, Network, Recipe, RunSpec, Stream
    >>> spec = RunSpec(
    ...     benchmark="mine",
    ...     stream=Stream(name="split-digits", n_tasks=5),
    ...     network=Network(name="mlp"),
    ...     method=Method.parse("gpm+became"),
    ...     recipe=Recipe(learning_rate=0.1, batch_size=64, epochs=50, patience=4, factor=3, lr_min=0.005),
    ...     n_tasks=2,
    ... )
    >>> spec.check()  # raises an error if a name or an option is wrong
    >>> spec.key()
    'mine.gpm+became.seed0...'
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    benchmark: str
    """Name of the benchmark in tables."""
    stream: Stream
    network: Network
    method: Method
    recipe: AnyRecipe
    seed: Seed = 0
    """Determines the tasks, the initial weights and the order of the data."""
    n_tasks: Annotated[int, Ge(1)]
    """Number of tasks to train."""
    max_epochs: Annotated[int, Ge(1)] | None = None
    """Budget: maximum number of epochs per stage. None: as the recipe says."""
    device: str = "cpu"
    threads: Annotated[int, Ge(1)] = 1
    """CPU threads of torch. Another number of threads rounds sums differently."""
    eval_batch_size: Annotated[int, Ge(1)] = 64

    @model_validator(mode="after")
    def _within_the_stream(self) -> RunSpec:
        if self.n_tasks > self.stream.n_tasks:
            raise SpecError(
                f"n_tasks must be at most {self.stream.n_tasks}, the number of tasks in the stream; got {self.n_tasks}"
            )
        if self.max_epochs is not None and self.max_epochs >= self.recipe.epochs:
            object.__setattr__(self, "max_epochs", None)  # it limits nothing, so the run is the same as without it
        return self

    @property
    def effective_recipe(self) -> Any:
        """The recipe, limited to the budget."""
        return limit_epochs(self.recipe, self.max_epochs)

    @property
    def n_trainings(self) -> int:
        """Number of trainings: one per task, or a single one for joint training."""
        return 1 if self.method.joint else self.n_tasks

    def with_method(self, method: Method) -> RunSpec:
        """Return the same specification with another method."""
        return self.model_copy(update={"method": method})

    @property
    def references(self) -> References:
        """Keys of the runs with the same seed that this one is compared with."""
        others = (self.method.baseline, self.method.equal_training)
        keys = [None if other is None else self.with_method(other).key() for other in others]
        return References(baseline=keys[0], control=keys[1])

    def key(self) -> str:
        """Return the name of the run's folder. It is readable, and different for every specification.

        Options with their default value do not affect it. So finished runs keep their folders when a new version adds
        an option.
        """
        short: dict[str, Any] = {
            name: part.model_copy(update={"options": without_defaults(part.function(), part.options)})
            for name, part in (("stream", self.stream), ("network", self.network))
        }
        shortened = self.model_copy(update={**short, "method": self.method.shortened()})
        content = shortened.model_dump(mode="json", exclude_defaults=True)
        text = json.dumps(_canonical(content), sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        readable = re.sub(r"[^\w+.-]", "_", f"{self.benchmark}.{self.method.name}.seed{self.seed}")
        return f"{readable}.{digest}"

    def completed(self) -> RunSpec:
        """Return the same specification with every option of the plugins written out, defaults included."""
        return self.with_method(self.method.completed())

    def check(self) -> None:
        """Raise a SpecError if a component or one of its options does not exist. Imports torch."""
        try:
            check_options(f"the stream {self.stream.name}", self.stream.function(), self.stream.options)
            check_options(f"the network {self.network.name}", self.network.function(), self.network.options)
            self.method.make_plugins()
        except ValueError as error:
            raise SpecError(f"{self.benchmark}, {self.method.name}: {error}") from error

    def to_json(self) -> str:
        """Return the text of ``spec.json``, with every option of the plugins, defaults included."""
        return sealed_json({"schema_version": SPEC_SCHEMA, **self.completed().model_dump(mode="json")})


def parse_spec(content: Any, where: str = "the specification") -> RunSpec:
    """Create a specification from plain values. A SpecError names the wrong field, its value and what is allowed."""
    spec: RunSpec = validated(RunSpec, content, where)
    return spec


def read_spec(path: Path) -> RunSpec:
    """Read the specification in a ``spec.json``."""
    return parse_spec(read_values(path), str(path))


def read_values(path: Path) -> dict[str, Any]:
    """Read a ``spec.json`` as plain values. Raises a SpecError if it is corrupt, another file or of a newer version."""
    try:
        values = unsealed(read_file(path), str(path), "the specification of a run", SPEC_SCHEMA)
    except OSError as error:
        raise SpecError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise SpecError(str(error)) from None
    return values if values.pop("schema_version") >= SPEC_SCHEMA else in_eval_mode(values)


def validated(model: type[Any], content: Any, where: str) -> Any:
    """Create a pydantic model from plain values. Raises one SpecError that names all wrong fields.

    :param where: source of the values, for the error; may be empty.
    """
    try:
        return model.model_validate(content)
    except ValidationError as error:
        problems = [_explain(model, problem) for problem in error.errors(include_url=False)]
        raise SpecError(": ".join(filter(None, [where, "; ".join(problems)]))) from None


def _explain(model: type[BaseModel], problem: Any) -> str:
    """Explain a problem that pydantic found: which field, which value, and what is allowed."""
    kind, value = problem["type"], problem["input"]
    place = ""
    for part in problem["loc"]:
        if part not in RECIPES:
            place += f"[{part}]" if isinstance(part, int) else f".{part}"
    place = place.removeprefix(".")
    message = str(problem["msg"]).removeprefix("Value error, ")
    if kind in ("extra_forbidden", "unexpected_keyword_argument"):
        return f"unknown field {place!r}; {suggestion(str(problem['loc'][-1]), _siblings(model, problem['loc']))}"
    if kind == "missing":
        return f"{place} is missing"
    if kind == "value_error":
        return f"{place}: {message}" if place else message
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        got = value["kind"] if isinstance(value, dict) and "kind" in value else None
        return f"{place}.kind must be one of: {', '.join(RECIPES)}; got {got!r}"
    if kind == "too_short":
        return f"{place} must not be empty"
    if kind in ("model_type", "model_attributes_type", "dataclass_type", "dict_type"):
        message = "must be a table of fields"
    message = message.replace("Input should", "must").replace("a valid integer", "an integer").replace("valid ", "")
    return f"{place or 'it'} {message}; got {value!r}"


def _siblings(model: Any, place: tuple[Any, ...]) -> list[str]:
    """Return the valid fields at the place of an unknown one."""
    for part in place[:-1]:
        if isinstance(part, str):
            model = RECIPES.get(part) or _model_in(_fields(model)[part].annotation)
    return list(_fields(model))


def _fields(model: Any) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(model, "model_fields", None) or model.__pydantic_fields__
    return fields


def _model_in(annotation: Any) -> Any:
    """Return the model in an annotation such as ``Model | None`` or ``list[Model]``."""
    if hasattr(annotation, "__pydantic_fields__") or hasattr(annotation, "model_fields"):
        return annotation
    inner = [_model_in(argument) for argument in getattr(annotation, "__args__", ())]
    return next((model for model in inner if model is not None), None)


def _canonical(value: Any) -> Any:
    """Return the value with 10.0 as 10, so that equal settings have equal keys."""
    if isinstance(value, dict):
        return {key: _canonical(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_canonical(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value

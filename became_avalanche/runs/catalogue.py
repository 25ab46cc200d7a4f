"""Benchmarks by name, with the paper's networks, recipes and hyperparameters. This module holds values only.

The paper has two families of experiments: the GPM family and Adam-NSCL. They differ in data protocol, network and
recipe, so each family has separate benchmarks. Where both use the same data, the name of the Adam-NSCL benchmark ends
in ``-nscl``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from became_avalanche.files import look_up
from became_avalanche.runs.components import Options
from became_avalanche.runs.method import Method
from became_avalanche.runs.recipes import NSCLRecipe, Recipe
from became_avalanche.runs.spec import Network, RunSpec, SpecError, Stream, validated


@dataclass(frozen=True)
class Benchmark:
    """A stream and a network, with the recipe and the hyperparameters of each method.

    >>> from became_avalanche import find_benchmark
    >>> spec = find_benchmark("split-digits").spec("sgp+became", seed=1, n_tasks=2)
    >>> spec.method.options, spec.recipe.learning_rate
    ({'alpha': 30}, 0.1)
    """

    name: str
    stream: Stream
    network: Network
    recipe: Recipe | NSCLRecipe
    """Default recipe."""
    hyperparameters: Mapping[str, Options] = field(default_factory=dict)
    """Plugin options of each method that differ from the plugin's defaults."""
    recipes: Mapping[str, Recipe | NSCLRecipe] = field(default_factory=dict)
    """Recipes of the methods that do not use the default recipe."""
    merge: Options = field(default_factory=dict)
    """Options of the merge that differ from the plugin's defaults."""
    untuned: frozenset[str] = frozenset()
    """Methods whose hyperparameters are defaults that were not tuned for this benchmark."""

    def spec(
        self,
        method: str | Method,
        seed: int = 0,
        *,
        n_tasks: int | None = None,
        max_epochs: int | None = None,
        **fields: Any,
    ) -> RunSpec:
        """Return the specification of a run on this benchmark.

        :param method: a name, such as ``gpm+became``, or a ``Method``. It gets the hyperparameters of this benchmark;
            options of a ``Method`` override them.
        :param seed: the seed.
        :param n_tasks: number of tasks to train (default: all).
        :param max_epochs: maximum number of epochs per stage (default: as the recipe says).
        :param fields: further fields of ``RunSpec``: ``device``, ``threads`` and ``eval_batch_size``.
        """
        chosen = method if isinstance(method, Method) else Method.parse(method)
        options = {**self.hyperparameters.get(chosen.settings, {}), **chosen.options}
        merge = chosen.merge and chosen.merge.model_copy(update={"options": {**self.merge, **chosen.merge.options}})
        content = {
            "benchmark": self.name,
            "stream": self.stream,
            "network": self.network,
            "method": chosen.model_copy(update={"options": options, "merge": merge}),
            "recipe": self.recipes.get(chosen.settings, self.recipe),
            "seed": seed,
            "n_tasks": self.stream.n_tasks if n_tasks is None else n_tasks,
            "max_epochs": max_epochs,
            **fields,
        }
        spec: RunSpec = validated(RunSpec, content, self.name)
        return spec


def _stream(name: str, n_tasks: int, **options: Any) -> Stream:
    return Stream(name=name, n_tasks=n_tasks, options=options)


def _network(name: str, channels_last: bool = False, **options: Any) -> Network:
    return Network(name=name, options=options, channels_last=channels_last)


_DIGITS_RECIPE = Recipe(learning_rate=0.1, batch_size=64, epochs=50, patience=4, factor=3, lr_min=0.005)

EMBEDDED = (
    Benchmark(
        name="split-digits",
        stream=_stream("split-digits", 5),
        network=_network("mlp"),
        recipe=_DIGITS_RECIPE,
        hyperparameters={
            "ewc": {"ewc_lambda": 1000},
            "si": {"si_lambda": 10},
            "lwf": {"alpha": 3},
            "agem": {"patterns_per_experience": 40},
            "er": {"mem_size": 200},
            "sgp": {"alpha": 30},
            "trgp": {"trust_threshold": 0.5},
            "gpcns": {"alpha": 0.3},
            "nscl": {"a": 10000},
            "owm": {"alpha": 10},
        },
    ),
    Benchmark(
        name="permuted-digits",
        stream=_stream("permuted-digits", 10),
        network=_network("mlp"),
        recipe=_DIGITS_RECIPE,
        hyperparameters={
            "ewc": {"ewc_lambda": 1000},
            "si": {"si_lambda": 1000},
            "lwf": {"alpha": 1},
            "agem": {"patterns_per_experience": 20},
            "er": {"mem_size": 200},
            "sgp": {"alpha": 10},
            "trgp": {"trust_threshold": 0.5},
            "gpcns": {"alpha": 25},
            "nscl": {"a": 1},
            "owm": {"alpha": 100},
        },
    ),
)
"""Small benchmarks without downloads. ``experiments/tune.py`` chose the hyperparameters on the validation streams."""

UNTUNED: dict[str, Options] = {
    "ewc": {"ewc_lambda": 1000},
    "si": {"si_lambda": 100},
    "lwf": {"alpha": 1},
    "agem": {"patterns_per_experience": 20},
    "er": {"mem_size": 200},
    "owm": {"alpha": 1},
}
"""Untuned defaults for methods for which the paper gives no hyperparameters."""


def _single_head(name: str, stream: str, **options: Any) -> Benchmark:
    return Benchmark(
        name=name,
        stream=_stream(stream, 5),
        network=_network("single-head-mlp", **options),
        recipe=_DIGITS_RECIPE,
        hyperparameters=UNTUNED,
        untuned=frozenset(UNTUNED),
    )


SINGLE_HEAD = (
    _single_head("class-digits", "class-digits"),
    _single_head("class-digits-fixed", "class-digits", n_classes=10),
    _single_head("domain-digits", "domain-digits", n_classes=10),
)
"""Benchmarks with one head for all tasks. The head grows with the classes, or has all outputs from the start."""

# -------------------------------------------------------------------------------------------------------- GPM family

Column = tuple[Recipe, Options]
"""A column of the paper's table of hyperparameters: the recipe of a method, and the options of its plugin."""

_TRUST_REGION: Options = {"trust_threshold": 0.5, "top_k": 2}

_CIFAR_RECIPE = Recipe(learning_rate=0.01, batch_size=64, epochs=200, patience=6, factor=2, lr_min=1e-5)
_CIFAR_FASTER = replace(_CIFAR_RECIPE, learning_rate=0.05, lr_min=5e-5)
_THRESHOLD: Options = {"threshold": 0.97, "increment": 0.003}
_CIFAR: dict[str, Column] = {
    "gpm": (_CIFAR_RECIPE, _THRESHOLD),
    "trgp": (_CIFAR_RECIPE, {**_THRESHOLD, **_TRUST_REGION}),
    "sgp": (_CIFAR_FASTER, {**_THRESHOLD, "alpha": 10}),
    "gpcns": (_CIFAR_FASTER, {**_THRESHOLD, "alpha": 5}),
}

_MINI_RECIPE = Recipe(learning_rate=0.1, batch_size=10, epochs=10, patience=5, factor=3, lr_min=1e-3)
_THRESHOLD = {"threshold": 0.985, "increment": 0.0003, "n_samples": 100}
_MINI: dict[str, Column] = {
    "gpm": (_MINI_RECIPE, _THRESHOLD),
    "trgp": (replace(_MINI_RECIPE, batch_size=64, epochs=100), {**_THRESHOLD, **_TRUST_REGION}),
    "sgp": (_MINI_RECIPE, {**_THRESHOLD, "alpha": 1}),
    "gpcns": (
        replace(_MINI_RECIPE, batch_size=64, epochs=200),
        {**_THRESHOLD, "threshold": 0.98, "increment": 0.001, "alpha": 3},
    ),
}

_SUPERCLASS_RECIPE = replace(_CIFAR_RECIPE, epochs=50)
_THRESHOLD = {"threshold": 0.98, "increment": 0.001}
_SUPERCLASS: dict[str, Column] = {
    "gpm": (_SUPERCLASS_RECIPE, _THRESHOLD),
    "trgp": (_SUPERCLASS_RECIPE, {**_THRESHOLD, **_TRUST_REGION}),
    "sgp": (_SUPERCLASS_RECIPE, {**_THRESHOLD, "alpha": 3}),
    "gpcns": (_SUPERCLASS_RECIPE, {**_THRESHOLD, "alpha": 4.5}),
}

_FIVE_RECIPE = replace(_MINI_RECIPE, batch_size=64, epochs=100)
_THRESHOLD = {"threshold": 0.965, "increment": 0, "n_samples": 100}
# The alpha of SGP is not published. It is the one of CIFAR-100, as the paper does for GPCNS.
_FIVE: dict[str, Column] = {
    "gpm": (_FIVE_RECIPE, _THRESHOLD),
    "trgp": (_FIVE_RECIPE, {**_THRESHOLD, **_TRUST_REGION}),
    "sgp": (_FIVE_RECIPE, {**_THRESHOLD, "alpha": 10}),
    "gpcns": (_FIVE_RECIPE, {**_THRESHOLD, "alpha": 5}),
}


def _gpm_family(
    name: str, stream: Stream, network: str, columns: Mapping[str, Column], **network_options: Any
) -> Benchmark:
    """Return a benchmark with the reference merge, and with heads without bias as in the published code."""
    return Benchmark(
        name=name,
        stream=stream,
        network=_network(network, head_bias=False, **network_options),
        merge={"reference": True},
        recipe=columns["gpm"][0],
        recipes={method: recipe for method, (recipe, _) in columns.items()},
        hyperparameters={**UNTUNED, **{method: options for method, (_, options) in columns.items()}},
        untuned=frozenset(UNTUNED),
    )


GPM_FAMILY = (
    _gpm_family("10-split-cifar100", _stream("split-cifar100", 10), "alexnet", _CIFAR),
    _gpm_family("20-split-cifar100", _stream("split-cifar100", 20), "alexnet", _CIFAR),
    _gpm_family("20-split-miniimagenet", _stream("split-miniimagenet", 20), "reduced-resnet18", _MINI),
    _gpm_family("5-datasets", _stream("five-datasets-in-turn", 5), "reduced-resnet18", _FIVE, image_size=32),
    _gpm_family(
        "cifar100-superclass", _stream("cifar100-superclass-in-turn", 20), "lenet", _SUPERCLASS, kaiming_heads=True
    ),
    _gpm_family(
        "cifar100-superclass-scrambled",
        _stream("cifar100-superclass-in-turn", 20, reference=True),
        "lenet",
        _SUPERCLASS,
        kaiming_heads=True,
    ),
)

# ------------------------------------------------------------------------------------------------------- NSCL family


def _nscl_family(name: str, stream: str, n_tasks: int, batch_size: int, a: float) -> Benchmark:
    return Benchmark(
        name=name,
        stream=_stream(stream, n_tasks, protocol="nscl"),
        network=_network("preact-resnet18"),
        recipe=NSCLRecipe(batch_size),
        hyperparameters={**UNTUNED, "nscl": {"a": a, "coefficient": 100, "reference": True}},
        untuned=frozenset(UNTUNED),
    )


NSCL_FAMILY = (
    _nscl_family("10-split-cifar100-nscl", "split-cifar100", n_tasks=10, batch_size=32, a=10),
    _nscl_family("20-split-cifar100-nscl", "split-cifar100", n_tasks=20, batch_size=16, a=30),
    _nscl_family("25-split-tinyimagenet", "split-tinyimagenet", n_tasks=25, batch_size=16, a=10),
)

# ------------------------------------------------------------------------------------------------------ small machine


def _small(n_tasks: int, tuned: Mapping[str, Options]) -> Benchmark:
    return Benchmark(
        name=f"{n_tasks}-split-cifar100-cpu",
        stream=_stream("split-cifar100", n_tasks),
        network=_network("alexnet", channels_last=True),
        recipe=Recipe(learning_rate=0.05, batch_size=64, epochs=40, patience=2, factor=3, lr_min=0.005),
        hyperparameters={**UNTUNED, **tuned},
        untuned=frozenset(UNTUNED) - set(tuned),
    )


SMALL = (_small(10, {"ewc": {"ewc_lambda": 100}}), _small(20, {}))
"""CIFAR-100 for a CPU: the recipe reaches its plateau within about 15 epochs per stage."""

BENCHMARKS = {benchmark.name: benchmark for benchmark in (*EMBEDDED, *SINGLE_HEAD, *GPM_FAMILY, *NSCL_FAMILY, *SMALL)}


def find_benchmark(name: str) -> Benchmark:
    """Return the benchmark called ``name``. Raises a SpecError that suggests another name if there is none.

    >>> from became_avalanche import find_benchmark
    >>> benchmark = find_benchmark("split-digits")
    >>> benchmark.stream.n_tasks, benchmark.network.name, benchmark.hyperparameters["ewc"]
    (5, 'mlp', {'ewc_lambda': 1000})
    """
    try:
        return look_up("benchmark", name, BENCHMARKS)
    except ValueError as error:
        raise SpecError(str(error)) from None

"""Methods by name, and the methods that each is compared with.

A name is ``<base>``, ``<base>-2x`` or ``<base>+<rule>``: a method alone, its equal-training control, or the method with
a merge by this rule. ``finetune`` has no projection, so ``finetune+<rule>`` trains one free stage and merges its
weights with those before the task.

The base may also be the import path of a plugin, ``package.module:name``, again alone or with ``-2x`` or ``+<rule>``.
Stage 1 trains with the plugin. The merge suspends it in stage 2 if it is ``Suspendable``, as projections are.

To add a method to the package, add a line to ``BASES``. Its ``-2x`` and ``+<rule>`` variants then exist as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from became_avalanche.files import suggestion
from became_avalanche.runs.components import (
    Options,
    SpecError,
    check_options,
    find,
    import_path,
    options_of,
    with_defaults,
    without_defaults,
)

if TYPE_CHECKING:
    from avalanche.training.plugins import SupervisedPlugin


@dataclass(frozen=True)
class Base:
    """The parts of a method, without the second stage of ``-2x`` or ``+<rule>``."""

    plugin: str | None = None
    """Import path of the plugin."""
    staged: bool = True
    """Whether ``-2x`` and ``+<rule>`` can add a second stage."""
    stage_plugin: str | None = None
    """Import path of a further plugin, which has its own second stage."""
    settings: str | None = None
    """Name of the base whose hyperparameters and control this one shares."""


BASES: dict[str, Base] = {
    "finetune": Base(),
    "gpm": Base("became_avalanche.plugins.gpm:GPMPlugin"),
    "sgp": Base("became_avalanche.plugins.sgp:SGPPlugin"),
    "trgp": Base("became_avalanche.plugins.trgp:TRGPPlugin"),
    "gpcns": Base("became_avalanche.plugins.gpcns:GPCNSPlugin"),
    "nscl": Base("became_avalanche.plugins.nscl:NSCLPlugin"),
    "owm": Base("became_avalanche.plugins.owm:OWMPlugin"),
    "connector": Base(
        "became_avalanche.plugins.nscl:NSCLPlugin",
        stage_plugin="became_avalanche.plugins.connector:ConnectorPlugin",
        settings="nscl",
    ),
    "ewc": Base("avalanche.training.plugins:EWCPlugin", staged=False),
    "si": Base("became_avalanche.runs.baselines:SynapticIntelligence", staged=False),
    "lwf": Base("became_avalanche.runs.baselines:LwF", staged=False),
    "agem": Base("became_avalanche.runs.baselines:AGEM", staged=False),
    "er": Base("became_avalanche.runs.baselines:ExperienceReplay", staged=False),
    "joint": Base(staged=False),
}
"""All methods of the package. ``joint`` trains on all tasks at once, as an upper bound."""

RULES = ("became", "became-tensor", "became-exact", "one-over-t", "constant", "cofima", "imm-mode", "none")

COMPARED = ("finetune", "ewc", "si", "lwf", "agem", "er", "finetune+became", "gpm", "gpm-2x", "gpm+became", "joint")
"""Default methods of ``became compare``."""

MERGE_PLUGIN = "became_avalanche.plugins.merge:BecameMergePlugin"
CONTROL_PLUGIN = "became_avalanche.plugins.control:EqualTrainingPlugin"


class MergeSettings(BaseModel):
    """Settings of the merge. The rule is not among them: it is part of the method's name."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    plugin: str = MERGE_PLUGIN
    """Import path of the merge plugin: ``BecameMergePlugin`` or a subclass."""
    options: Options = {}
    """Options of the plugin, such as ``fisher`` (a name, or a table of the options of ``Fisher``) and ``epochs``."""

    @field_validator("plugin", mode="before")
    @classmethod
    def _path(cls, value: Any) -> Any:
        return import_path(value)

    @field_validator("options")
    @classmethod
    def _without_rule(cls, value: Options) -> Options:
        if "rule" in value:
            raise SpecError(f"the rule is part of the method's name: write +{value['rule']} there")
        return value


class Merge(MergeSettings):
    """The merge that follows a free second stage."""

    rule: str = "became"

    @field_validator("rule")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in RULES:
            raise SpecError(f"unknown rule {value!r}; {suggestion(value, RULES)}")
        return value


class Method(BaseModel):
    """A method with all of its options.

    >>> from became_avalanche import Method
    >>> method = Method.parse("gpm+became", {"threshold": 0.95})
    >>> method.base, method.merge.rule, method.n_stages
    ('gpm', 'became', 2)
    >>> method.baseline.name, method.equal_training.name
    ('gpm', 'gpm-2x')
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str
    """A name in ``BASES``, or the import path of a plugin."""
    options: Options = {}
    """Options of the base's plugin."""
    control: bool = False
    """Whether each task has a second stage without a merge (``-2x``)."""
    merge: Merge | None = None
    label: str | None = None
    """Name of the method in tables. It does not affect results."""

    @field_validator("base", mode="before")
    @classmethod
    def _path(cls, value: Any) -> Any:
        return import_path(value)

    @model_validator(mode="after")
    def _consistent(self) -> Method:
        if self.base not in BASES and ":" not in self.base:
            raise _unknown(self.base)
        if self.control and self.merge:
            raise SpecError(f"{self.base} cannot have both control = true and a merge")
        if (self.control or self.merge) and not self._parts.staged:
            raise _without_second_stage(self.base)
        if self.control and self._parts.stage_plugin:
            raise SpecError(f"{self.base} already has a second stage; its control is {self.settings}-2x")
        return self

    @classmethod
    def parse(cls, name: str, options: Options | None = None, **fields: Any) -> Method:
        """Return the method called ``name``, such as ``gpm+became``.

        :param options: options of the plugin.
        :param fields: ``label``, and ``merge`` with the settings of the merge.

        >>> from became_avalanche import Method
        >>> Method.parse("sgp-2x").control
        True
        >>> Method.parse("gpm+one-over-t", label="averaging").merge.rule
        'one-over-t'
        """
        base, plus, rule = name.partition("+")
        control = base.endswith("-2x") and not plus
        base = base.removesuffix("-2x") if control else base
        if (base not in BASES and ":" not in base) or (plus and rule not in RULES):
            raise _unknown(name)
        parts = BASES.get(base, Base())
        if (plus or control) and not parts.staged:
            raise _without_second_stage(base)
        if control:
            base = parts.settings or base  # the control of Connector is that of NSCL
        settings = fields.pop("merge", None)
        if plus:
            settings = MergeSettings.model_validate(settings or {})
            fields["merge"] = Merge(plugin=settings.plugin, options=settings.options, rule=rule)
        elif settings is not None:
            raise SpecError(f"{name} has settings for a merge but does not merge; name it {base}+<rule>")
        return cls(base=base, options=options or {}, control=control, **fields)

    @property
    def name(self) -> str:
        """The name, as ``parse`` accepts it."""
        return self.base + ("-2x" if self.control else "") + (f"+{self.merge.rule}" if self.merge else "")

    @property
    def shown(self) -> str:
        """Name of the method in tables: the label if there is one, otherwise the name."""
        return self.label or self.name

    @property
    def settings(self) -> str:
        """Name of the base whose hyperparameters apply."""
        return self._parts.settings or self.base

    @property
    def joint(self) -> bool:
        """Whether the method trains on all tasks at once."""
        return self.base == "joint"

    @property
    def n_stages(self) -> int:
        """Number of stages of each task after the first."""
        merged_free = self.merge is not None and self.base == "finetune"
        return 2 if (self.control or self.merge or self._parts.stage_plugin) and not merged_free else 1

    @property
    def baseline(self) -> Method | None:
        """The same method without the merge."""
        return None if self.merge is None else Method(base=self.base, options=self.options)

    @property
    def equal_training(self) -> Method | None:
        """The control for a method with a merge: it trains as long, with projection and without the merge."""
        if self.merge is None or self.n_stages == 1:
            return None
        return Method(base=self.settings, options=self.options, control=True)

    @property
    def _parts(self) -> Base:
        return BASES[self.base] if self.base in BASES else Base(self.base)

    # ------------------------------------------------------------------------------------------------------ plugins

    def completed(self) -> Method:
        """Return the same method with every option of its plugins written out, defaults included."""
        options, merge = self.options, self.merge
        if (plugin := self._parts.plugin) is not None:
            options = with_defaults(find("plugin", plugin, {}), options)
        if merge is not None:
            defaults = with_defaults(find("merge plugin", merge.plugin, {}), {"rule": merge.rule, **merge.options})
            defaults.pop("rule")
            merge = merge.model_copy(update={"options": defaults})
        return self.model_copy(update={"options": options, "merge": merge})

    def shortened(self) -> Method:
        """Return the same method without a label and without options that have their default value."""
        options, merge = self.options, self.merge
        if (plugin := self._parts.plugin) is not None:
            options = without_defaults(find("plugin", plugin, {}), options)
        if merge is not None:
            plugin_class = find("merge plugin", merge.plugin, {})
            merge = merge.model_copy(update={"options": without_defaults(plugin_class, merge.options)})
        return self.model_copy(update={"options": options, "merge": merge, "label": None})

    def make_plugins(self) -> list[SupervisedPlugin]:
        """Return new plugins, in the order in which the strategy needs them. A ValueError names a wrong option."""
        from avalanche.training.plugins import SupervisedPlugin

        from became_avalanche.plugins.merge import BecameMergePlugin

        parts = self._parts
        plugins = []
        if parts.plugin is not None:
            plugins.append(_make_plugin(self.base, parts.plugin, self.options, SupervisedPlugin))
        elif self.options:
            raise SpecError(f"{self.base} has no options; got {', '.join(self.options)}")
        if self.control:
            plugins.append(find("plugin", CONTROL_PLUGIN, {})())
        if self.merge is not None:
            options = dict(self.merge.options)
            if isinstance(fisher := options.get("fisher"), dict):
                from became_avalanche.merging.fisher import Fisher

                check_options("the Fisher estimator", Fisher, fisher)
                options["fisher"] = Fisher(**fisher)
            options["rule"] = self.merge.rule
            plugins.append(_make_plugin("the merge", self.merge.plugin, options, BecameMergePlugin))
        if parts.stage_plugin is not None:
            plugins.append(find("plugin", parts.stage_plugin, {})())
        return plugins


def known_names() -> list[str]:
    """Return the names of all methods."""
    names = []
    for base, parts in BASES.items():
        names.append(base)
        if parts.staged:
            names += [f"{base}-2x", *(f"{base}+{rule}" for rule in RULES)]
    return names


def _unknown(name: str) -> SpecError:
    choices = (
        f"choose one of: {', '.join(BASES)}, alone or with -2x or +<rule>, as in gpm+became; or the import path of a "
        "plugin, module:name"
    )
    return SpecError(f"unknown method {name!r}; {suggestion(name, known_names(), choices)}")


def _without_second_stage(base: str) -> SpecError:
    return SpecError(f"{base} has no second stage: write {base!r}, without -2x and +<rule>")


def _make_plugin(what: str, path: str, options: Mapping[str, Any], kind: type) -> Any:
    """Create the plugin at an import path. Raises a SpecError unless it is of this kind."""
    make = find("plugin", path, {})
    check_options(what, make, options)
    required = [name for name, parameter in options_of(make).items() if parameter.default is parameter.empty]
    if missing := [name for name in required if name not in options]:
        raise SpecError(f"{what} needs the option {missing[0]!r}")
    try:
        plugin = make(**options)
    except TypeError as error:
        raise SpecError(f"cannot create {what} with the options {dict(options)}: {error}") from error
    if not isinstance(plugin, kind):
        raise SpecError(f"{path} makes a {type(plugin).__name__}, which is not a {kind.__name__}")
    return plugin

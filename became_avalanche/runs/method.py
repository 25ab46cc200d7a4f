"""Methods by name, and what each is compared with.

A name is ``<base>``, ``<base>-2x`` or ``<base>+<rule>``: a method alone, with the equal-training control, or with the
merge by a rule. ``finetune`` has no projection, so ``finetune+<rule>`` merges one free stage with the weights before.

To add a method, add a line to ``BASES``; its ``-2x`` and ``+<rule>`` follow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from became_avalanche.files import suggestion
from became_avalanche.runs.components import check_options, find, import_path, with_defaults

if TYPE_CHECKING:
    from avalanche.training.plugins import SupervisedPlugin

Options = dict[str, Any]


@dataclass(frozen=True)
class Base:
    """What a method is made of, before a second stage."""

    plugin: str | None = None
    """Import path of its plugin."""
    staged: bool = True
    """Whether it can have a second stage: ``-2x`` and ``+<rule>``."""
    beside: str | None = None
    """Import path of a plugin that brings a second stage of its own."""
    settings: str | None = None
    """The base whose hyperparameters and control it shares."""


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
        beside="became_avalanche.plugins.connector:ConnectorPlugin",
        settings="nscl",
    ),
    "ewc": Base("avalanche.training.plugins:EWCPlugin", staged=False),
    "si": Base("became_avalanche.runs.baselines:SynapticIntelligence", staged=False),
    "lwf": Base("became_avalanche.runs.baselines:LwF", staged=False),
    "agem": Base("became_avalanche.runs.baselines:AGEM", staged=False),
    "er": Base("became_avalanche.runs.baselines:ExperienceReplay", staged=False),
    "joint": Base(staged=False),
}
"""``joint`` trains on all tasks at once, as an upper bound."""

RULES = ("became", "became-tensor", "became-exact", "one-over-t", "constant", "cofima", "imm-mode", "none")

COMPARED = ("finetune", "ewc", "si", "lwf", "agem", "er", "finetune+became", "gpm", "gpm-2x", "gpm+became", "joint")
"""What ``became compare`` compares by default."""

MERGE_PLUGIN = "became_avalanche.plugins.merge:BecameMergePlugin"
CONTROL_PLUGIN = "became_avalanche.plugins.control:EqualTrainingPlugin"


class MergeOptions(BaseModel):
    """The merge after a free second stage."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    rule: str = "became"
    plugin: str = MERGE_PLUGIN
    """Import path of the merge plugin: ``BecameMergePlugin`` or a subclass."""
    options: Options = {}
    """Further options of the plugin: ``fisher`` (a name, or a table of the options of ``Fisher``), ``epochs``, ..."""

    @field_validator("plugin", mode="before")
    @classmethod
    def _path(cls, value: Any) -> Any:
        return import_path(value)

    @model_validator(mode="after")
    def _known_rule(self) -> MergeOptions:
        if self.rule not in RULES:
            raise ValueError(f"unknown rule {self.rule!r}; {suggestion(self.rule, RULES)}")
        return self


class Method(BaseModel):
    """A method with all of its options."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    base: str
    """A name of ``BASES``, or the import path of a user's own plugin."""
    options: Options = {}
    """Options of the base's plugin."""
    control: bool = False
    """Whether each task has a second stage of equal training, without a merge."""
    merge: MergeOptions | None = None
    label: str | None = Field(default=None)
    """How tables call it. Does not decide any number."""

    @field_validator("base", mode="before")
    @classmethod
    def _path(cls, value: Any) -> Any:
        return import_path(value)

    @model_validator(mode="after")
    def _consistent(self) -> Method:
        if self.base not in BASES and ":" not in self.base:
            raise ValueError(
                f"unknown method {self.base!r}; {suggestion(self.base, known_names())}, or give the import path of a "
                "plugin, module:name"
            )
        if self.control and self.merge:
            raise ValueError(f"a method has either the control -2x or a merge; got both with {self.base!r}")
        if (self.control or self.merge) and not self._made_of.staged:
            raise ValueError(f"{self.base!r} has no second stage; leave out -2x and +<rule>")
        return self

    @classmethod
    def parse(cls, name: str, options: Options | None = None, **fields: Any) -> Method:
        """The method called ``name``, such as ``gpm+became``.

        :param options: options of its plugin.
        :param fields: further fields of a ``Method``.
        """
        base, plus, rule = name.partition("+")
        if (control := base.endswith("-2x")) and not plus:
            base = base.removesuffix("-2x")
            base = (BASES[base].settings or base) if base in BASES else base  # Connector's control is NSCL's
        known = base in BASES or ":" in base
        staged = not known or BASES.get(base, Base()).staged
        if not known or (plus and rule not in RULES) or ((plus or control) and not staged):
            raise ValueError(f"unknown method {name!r}; {suggestion(name, known_names())}")
        if plus:
            merge = fields.pop("merge", None) or {}
            fields["merge"] = {**(merge.model_dump() if isinstance(merge, MergeOptions) else merge), "rule": rule}
        return cls(base=base, options=options or {}, control=control and not plus, **fields)

    @property
    def name(self) -> str:
        """Its name, which ``parse`` understands."""
        return self.base + ("-2x" if self.control else "") + (f"+{self.merge.rule}" if self.merge else "")

    @property
    def settings(self) -> str:
        """The base whose hyperparameters apply."""
        return self._made_of.settings or self.base

    @property
    def joint(self) -> bool:
        """Whether all tasks are trained at once."""
        return self.base == "joint"

    @property
    def n_stages(self) -> int:
        """How often each task from the second on is trained."""
        merged_free = self.merge is not None and self.base == "finetune"
        return 2 if (self.control or self.merge or self._made_of.beside) and not merged_free else 1

    @property
    def baseline(self) -> Method | None:
        """The same method without its merge."""
        return None if self.merge is None else Method(base=self.base, options=self.options)

    @property
    def equal_training(self) -> Method | None:
        """The control for a merging method: the same training time, projected and without a merge."""
        if self.merge is None or self.n_stages == 1:
            return None
        return Method(base=self.settings, options=self.options, control=True)

    @property
    def _made_of(self) -> Base:
        return BASES[self.base] if self.base in BASES else Base(self.base)

    # ------------------------------------------------------------------------------------------------------ plugins

    def completed(self) -> Method:
        """The same with the default of every option written out."""
        options, merge = self.options, self.merge
        if (plugin := self._made_of.plugin) is not None:
            options = with_defaults(find("plugin", plugin, {}), options)
        if merge is not None:
            defaults = with_defaults(find("merge plugin", merge.plugin, {}), {"rule": merge.rule, **merge.options})
            defaults.pop("rule")
            merge = merge.model_copy(update={"options": defaults})
        return self.model_copy(update={"options": options, "merge": merge})

    def shortened(self) -> Method:
        """The same without options that have their default value."""
        options, merge = self.options, self.merge
        if (plugin := self._made_of.plugin) is not None:
            options = _without_defaults(plugin, options)
        if merge is not None:
            merge = merge.model_copy(update={"options": _without_defaults(merge.plugin, merge.options)})
        return self.model_copy(update={"options": options, "merge": merge, "label": None})

    def make_plugins(self) -> list[SupervisedPlugin]:
        """Fresh plugins, in the order in which they go into the strategy; a ValueError names a wrong option."""
        made = self._made_of
        plugins = []
        if made.plugin is not None:
            plugins.append(_make(self.base, made.plugin, self.options))
        elif self.options:
            raise ValueError(f"{self.base} has no options; got {', '.join(self.options)}")
        if self.control:
            plugins.append(find("plugin", CONTROL_PLUGIN, {})())
        if self.merge is not None:
            options = dict(self.merge.options)
            if isinstance(fisher := options.get("fisher"), dict):
                from became_avalanche.merging.fisher import Fisher

                check_options("the Fisher estimator", Fisher, fisher)
                options["fisher"] = Fisher(**fisher)
            plugins.append(_make("the merge", self.merge.plugin, {"rule": self.merge.rule, **options}))
        if made.beside is not None:
            plugins.append(find("plugin", made.beside, {})())
        return plugins


def known_names() -> list[str]:
    """The names of all methods."""
    names = []
    for base, made in BASES.items():
        names.append(base)
        if made.staged:
            names += [f"{base}-2x", *(f"{base}+{rule}" for rule in RULES)]
    return names


def _make(what: str, path: str, options: Options) -> Any:
    plugin = find("plugin", path, {})
    check_options(what, plugin, options)
    try:
        return plugin(**options)
    except TypeError as error:
        raise ValueError(f"{what} cannot be made with the options {options}: {error}") from None


def _without_defaults(path: str, options: Options) -> Options:
    defaults = with_defaults(find("plugin", path, {}), {})
    return {name: value for name, value in options.items() if name not in defaults or value != defaults[name]}

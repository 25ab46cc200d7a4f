"""The life cycle that all gradient projection plugins share."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, ClassVar, Literal, TypedDict

import torch
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor, nn

from became_avalanche.files import suggestion
from became_avalanche.layers.model import LayerMap, is_below, map_layers, seen_matrices
from became_avalanche.plugins.guard import Guard, Step, gradients_are_private
from became_avalanche.plugins.report import ProjectionReport
from became_avalanche.plugins.statistics import RunningStatistics, Statistics, drift_of, statistics_of
from became_avalanche.strategy.divergence import DivergenceError
from became_avalanche.strategy.heads import growing_heads, task_heads, trained_outputs
from became_avalanche.strategy.owner import has_weights, renamed
from became_avalanche.strategy.passes import data_pass, mean_gradients
from became_avalanche.strategy.protocols import Suspendable
from became_avalanche.strategy.tasks import TaskPlugin, continues
from became_avalanche.strategy.weights import trainable
from became_avalanche.subspace.basis import Projector
from became_avalanche.subspace.inputs import InputMatrix, recorded_inputs


class ProjectionOptions(TypedDict, total=False):
    """Options that all gradient projection plugins share; see ``GradientProjectionPlugin``."""

    bias: Literal["freeze", "augment", "free"]
    exclude: Sequence[str]
    freeze: Sequence[str]
    strict: bool
    verbose: bool


class GradientProjectionPlugin(TaskPlugin, Suspendable):
    """Keeps the outputs of a model's layers on the inputs of earlier experiences where they are.

    After each experience the method stores, per layer, which input directions matter (``update_memory``). In later
    experiences these directions (``protected``) are removed from what the optimizer does to the layer's weight.

    Layers are found by module type: Linear, convolutions, attention, embeddings and recurrent layers; weights that
    ``F.linear`` uses are found in a forward pass. What cannot be protected is named in a warning. Task heads
    (``MultiHeadClassifier``) are left out. Of a single head that grows (``IncrementalClassifier``) the outputs that
    earlier experiences have trained are protected. Parameters of normalisation layers are frozen after the first
    experience; their running statistics keep updating, which is a source of drift: see
    ``RunningStatistics``.

    The promise holds with any optimizer. Under SGD the gradient is projected, weight decay included; under any other
    optimizer the update is, since adaptive steps leave the subspace that the gradient lies in. Optimizer state does not
    survive from one experience to the next.

    **Writing a method.** A subclass implements ``update_memory`` and ``protected``. If it needs more of the life cycle,
    it overrides ``observe`` (what the memory is made of: by default the inputs of the layers), ``projector`` (what is
    done to an update), or ``freezes_normalisation``. If it trains parameters of its own, it also inherits from
    ``OwnsParameters``. During an experience, from ``before_training_exp`` to ``after_training_exp``, it can use

    - ``layers``: the protected layers by the name of their weight, their biases, and the normalisation parameters;
    - ``parts(name)`` and ``groups(name)``: which parameters form the rows of a layer, and in how many groups;
    - ``layer_inputs(...)``: the inputs of all layers in a pass over the experience;
    - ``gradient_rows(...)``: the gradients of all layers, as rows.
    """

    freezes_normalisation: ClassVar[bool] = True
    """Whether the parameters of normalisation layers are frozen after the first experience."""

    STATE: ClassVar[tuple[str, ...]] = ("experiences", "memory")

    def __init__(
        self,
        n_samples: int | None = 125,
        *,
        bias: Literal["freeze", "augment", "free"] = "freeze",
        exclude: Sequence[str] = (),
        freeze: Sequence[str] = (),
        strict: bool = False,
        verbose: bool = False,
    ) -> None:
        """Init.

        :param n_samples: training samples of each experience whose layer inputs enter the memory; None for all.
        :param bias: what happens to the biases of protected layers after the first experience. "freeze" keeps them
            fixed; "augment" protects them together with the weight, as the weight of a constant input 1; "free" lets
            them train, unprotected.
        :param exclude: names of modules to leave alone, with everything below them, or of parameters.
        :param freeze: names of modules or parameters that train in the first experience only: constants such as a class
            token, which no projection can protect.
        :param strict: raise an error, instead of a warning, if the model has parameters that cannot be protected.
        :param verbose: print ``report()`` once, after the first experience.
        """
        super().__init__()
        if n_samples is not None and n_samples < 1:
            raise ValueError(f"n_samples must be at least 1, or None for all training samples; got {n_samples}")
        if bias not in ("freeze", "augment", "free"):
            raise ValueError(f"bias must be 'freeze', 'augment' or 'free'; got {bias!r}")
        for option, chosen in (("exclude", exclude), ("freeze", freeze)):
            if isinstance(chosen, str):
                raise ValueError(f"{option} takes a list of names; got the string {chosen!r}, write [{chosen!r}]")
        self.n_samples = n_samples
        self.bias = bias
        self.exclude = tuple(exclude)
        self.freeze = tuple(freeze)
        self.strict = strict
        self.verbose = verbose

        self.experiences = 0
        """Experiences in memory."""
        self.memory: dict[str, dict[str, Tensor]] = {}
        """What the method remembers of each layer: weight name -> name -> tensor."""

        self._suspensions = 0
        self._warned: set[str] = set()
        self._bare_biases: dict[str, list[str]] = {}
        self.layers: LayerMap
        """The layers of the model in the experience being trained; empty between experiences."""
        self._augmented: set[str]
        self._guards: list[Guard] = []
        self._saw_update = False
        self._statistics: Statistics = {}
        self._forget_experience()

    @abstractmethod
    def update_memory(self, name: str, observed: InputMatrix) -> None:
        """Add what was observed of the layer with weight ``name`` in the experience to ``self.memory``."""

    @abstractmethod
    def protected(self, name: str) -> tuple[Tensor, Tensor | None]:
        """The input directions of the layer with weight ``name`` that the memory protects, and how much.

        :param name: a key of ``self.memory``.
        :return: orthonormal columns (groups, d, r), where zero columns count for nothing, and the fraction (groups, r)
            of an update that is removed along each of them; None for all of it.
        """

    def projector(self, name: str) -> Callable[[Tensor], Tensor]:
        """What to apply to the rows (groups, out, d) of a gradient or update of the weight ``name``."""
        return Projector.away_from(*self.protected(name))

    def observe(self, strategy: SupervisedTemplate, num_workers: int) -> dict[str, InputMatrix]:
        """What ``update_memory`` gets of each layer at the end of an experience: its inputs."""
        batch_size = max(strategy.train_mb_size, 128)  # the usual n_samples pass as one batch, as in the references
        inputs = self.layer_inputs(strategy, batch_size, num_workers)
        layers = self.layers.protected
        unseen = [name for name, users in layers.items() if name not in inputs and users[0].weight.grad is not None]
        self._complain(unseen, "were trained but never called as modules, so their inputs are unknown")
        return inputs

    def single_precision(self) -> bool:
        """Whether products of inputs in float32 are good enough: they change energies by up to 1e-5 of the total."""
        return False

    # ------------------------------------------------------------------------------------- for methods, read only

    def parts(self, name: str) -> list[str]:
        """The parameters that are protected together with the weight ``name``: itself, and its bias if augmented."""
        return [name, *self.layers.biases[name]] if name in self._augmented else [name]

    def groups(self, name: str) -> int:
        """Number of groups of the layer with weight ``name``: that of a grouped convolution, otherwise 1."""
        return self.layers.protected[name][0].groups

    def layer_inputs(
        self, strategy: SupervisedTemplate, batch_size: int, num_workers: int, *, batch_mean: bool = False
    ) -> dict[str, InputMatrix]:
        """The inputs of each layer in a pass over the experience."""
        dataset, other_uses = strategy.experience.dataset, dict[str, str]()
        with (
            data_pass(strategy, dataset, batch_size, self.n_samples, num_workers) as batches,
            recorded_inputs(
                self.layers.protected,
                ones=self._augmented,
                batch_mean=batch_mean,
                single=self.single_precision(),
                other_uses=other_uses,
            ) as inputs,
        ):
            for _ in batches:
                pass
        uses = [f"{name} (by {function})" for name, function in other_uses.items() if name in inputs]
        self._complain(uses, "are also used outside their modules, on inputs that are unknown", "protects the rest")
        return inputs

    def gradient_rows(self, strategy: SupervisedTemplate, num_workers: int) -> dict[str, Tensor]:
        """The gradient of the mean loss over ``n_samples`` of the experience, as rows, of the layers that have one."""
        parameters = dict(strategy.model.named_parameters())
        parts = {name: self.parts(name) for name in self.layers.protected}
        wanted = {part: parameters[part] for names in parts.values() for part in names}
        batch_size = max(strategy.train_mb_size, 128)
        gradients = mean_gradients(strategy, wanted, batch_size, self.n_samples, num_workers)
        return {
            name: self.layers.protected[name][0].rows([gradients[part] for part in names])
            for name, names in parts.items()
            if all(part in gradients for part in names)
        }

    # ------------------------------------------------------------------------------------------------ public state

    def remembered(self) -> Collection[str]:
        """The weights that the memory protects."""
        return self.memory

    def reset(self) -> None:
        """Forget everything, as if newly made: for a run with another model."""
        super().reset()
        self._warned.clear()
        self._forget_experience()

    def ranks(self) -> dict[str, int]:
        """The number of input directions in which updates of each layer are reduced, fully or in part.

        The keys are the names of the weights. For a grouped convolution it is the sum over the groups. The methods
        differ in what these directions are:

        - GPM and SGP: the basis; TRGP: the protected part of its directions;
        - GPCNS: the common directions of the old gradients that count in the next experience;
        - NSCL: all directions outside the approximate null space;
        - OWM: the rank of the covariance of the inputs.
        """
        result = {}
        for name in self.memory:
            basis, importance = self.protected(name)
            counted = basis.any(-2) if importance is None else basis.any(-2) & (importance > 0)
            result[name] = int(counted.sum())
        return result

    def report(self) -> ProjectionReport:
        """Which parameters of the model are protected, frozen and free in the next experience; ``print`` shows it."""
        model = None if self._owner is None else self._owner()
        if model is None:
            raise ValueError("a report is about a model, and this plugin has none: train it first")
        layers = self._found_layers(model)
        layers.biases.update(self._bare_biases)
        parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        present, _ = renamed(self.memory, parameters)  # a wrapper may have renamed what the memory is keyed by
        ranks = {present.get(name, name): rank for name, rank in self.ranks().items()}
        dimensions = {present.get(name, name): self.protected(name)[0].shape[:2] for name in self.memory}
        bases = {name: (ranks[name], dimensions[name].numel()) for name in ranks if name in parameters}
        together = _trainable_together(model, layers.biases) if self.bias == "augment" else set()
        protected = {*bases, *(bias for name in together & bases.keys() for bias in layers.biases[name])}
        stopped = set(chain.from_iterable(layers.constants.get(name, []) for name in bases))
        stopped |= {bias for name in bases.keys() - together for bias in layers.biases.get(name, [])}
        if self.bias == "free":
            stopped = set()
        if self.experiences and self.freezes_normalisation:
            stopped |= set(layers.normalisation)
        if self.experiences:
            stopped |= {name for name in parameters if is_below(name, self.freeze)}
        return ProjectionReport(
            plugin=type(self).__name__,
            experiences=self.experiences,
            bases=bases,
            frozen=[name for name in parameters if name in stopped - protected],
            free=[name for name in parameters if name not in stopped | protected],
            memory_bytes=self.memory_bytes(),
        )

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A context in which nothing is projected or frozen."""
        self._suspensions += 1
        try:
            yield
        finally:
            self._suspensions -= 1

    # --------------------------------------------------------------------------------------------------- callbacks

    def before_train_dataset_adaptation(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().before_train_dataset_adaptation(strategy, **kwargs)
        _refuse_heads_without_a_group(strategy)

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._forget_experience()
        self.layers = self._map_layers(strategy)
        if self.bias == "augment":
            self._augmented = _trainable_together(strategy.model, self.layers.biases)
        strategy.make_optimizer(reset_optimizer_state=True)
        parameters = dict(strategy.model.named_parameters())
        self._warn_if_all_will_freeze(parameters)
        if self.experiences == 0:
            return
        self._statistics = statistics_of(strategy.model)
        frozen: dict[str, Tensor | None] = {name: None for name in parameters if is_below(name, self.freeze)}
        if self.freezes_normalisation:
            frozen.update(dict.fromkeys(self.layers.normalisation))
        for name in self.layers.protected:
            if name not in self.memory:  # new, or not used so far
                continue
            outputs = self._old_outputs(name, parameters[name])
            if self.bias != "free":
                biases = [] if name in self._augmented else self.layers.biases.get(name, [])
                frozen.update(dict.fromkeys([*biases, *self.layers.constants.get(name, [])], outputs))
            guarded = [parameters[part] for part in self.parts(name)]
            self.memory[name] = stored_like(self.memory[name], parameters[name])
            self._guards.append(Guard(name, guarded, self.projector(name), self.layers.protected[name], outputs))
        self._guards += [
            Guard(name, [parameters[name]], torch.zeros_like, outputs=outputs) for name, outputs in frozen.items()
        ]

    def before_training_epoch(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        for guard in self._guards:
            guard.note_epoch()

    def before_forward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        guards = [guard for guard in self._guards if guard.in_backward]
        if guards and not self._suspensions and gradients_are_private(strategy, self):
            step = Step.of(strategy, self)
            for guard in guards:
                guard.enter_forward(step)

    def after_forward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        for guard in self._guards:
            guard.leave_forward()

    @torch.no_grad()
    def before_update(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        step = Step.of(strategy, self)
        for guard in self._guards:
            if self._suspensions:
                guard.note_free_update()
            else:
                guard.before_update(step)

    @torch.no_grad()
    def after_update(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._saw_update = True
        if not self._suspensions:
            for guard in self._guards:
                guard.after_update()

    @torch.no_grad()
    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if continues(kwargs):
            self._forget_experience()
            return
        self._warn_of_unseen_updates(strategy)
        refuse_divergence("the loss of the last batch", torch.as_tensor(strategy.loss))
        for name, parameter in trainable(strategy).items():
            refuse_divergence(name, parameter)
        with self.timed("memory"):
            observations = self.observe(strategy, kwargs.get("num_workers", 0))
            for name, observed in observations.items():
                refuse_divergence(f"what was observed of {name}", observed.energy())
            outputs = trained_outputs(strategy.model, strategy.experience)
            for name, observed in observations.items():
                weight = self.layers.protected[name][0].weight
                old = self._old_outputs(name, weight)
                self.update_memory(name, observed)
                if name in outputs:
                    trained = outputs[name] if old is None else outputs[name] | old
                    self.memory[name] = {**self.memory[name], "outputs": trained}
                self.memory[name] = stored_like(self.memory[name], weight)
        self.experiences += 1
        self._warn_of_statistics(strategy)
        self._forget_experience()
        if self.verbose and self.experiences == 1:
            print(self.report())

    # ----------------------------------------------------------------------------------------------------- details

    def _forget_experience(self) -> None:
        self.layers = LayerMap()
        self._augmented = set()
        self._saw_update, self._statistics = False, {}
        for guard in self._guards:
            guard.leave_forward()  # in place if the model failed in its forward pass
        self._guards = []

    def _warn_if_all_will_freeze(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Say once if only parameters train that are frozen after the first experience."""
        frozen = list(self.layers.normalisation) if self.freezes_normalisation else []
        if self.bias != "free":
            frozen += [bias for biases in self.layers.biases.values() for bias in biases]
        training = [name for name in frozen if parameters[name].requires_grad]
        if not training or any(parameters[name].requires_grad for name in self.layers.protected) or "" in self._warned:
            return
        self._warned.add("")
        warnings.warn(
            f"only biases and parameters of normalisation layers train outside the heads ({training[0]}, ...), which "
            f"{type(self).__name__} freezes after the first experience: later ones will train the heads alone; "
            "bias='free' lets biases train, unprotected, and exclude lets all parameters of a module",
            stacklevel=3,
        )

    def _warn_of_statistics(self, strategy: SupervisedTemplate) -> None:
        """Say once if running statistics have moved far enough to change what old tasks compute."""
        drift = drift_of(self._statistics, statistics_of(strategy.model))
        moved = {name: value for name, value in drift.items() if value > 0.5}
        if not moved or any(isinstance(plugin, RunningStatistics) for plugin in strategy.plugins):
            return
        worst = max(moved, key=moved.__getitem__)
        if "running statistics" not in self._warned:
            self._warned.add("running statistics")
            warnings.warn(
                f"the running statistics of {len(moved)} normalisation layers have drifted, those of {worst} by "
                f"{moved[worst]:.1f} standard deviations, so the outputs of old tasks have moved; put "
                "RunningStatistics() into the list of plugins to keep them",
                stacklevel=3,
            )

    def _warn_of_unseen_updates(self, strategy: SupervisedTemplate) -> None:
        trained = strategy.clock.train_exp_iterations > 0 or not has_weights(strategy.model, self._weights)
        if self._guards and not self._saw_update and trained:
            warnings.warn(
                f"{type(strategy).__name__} has trained without calling before_update and after_update of its plugins, "
                f"so {type(self).__name__} could not protect anything",
                stacklevel=3,
            )

    def _old_outputs(self, name: str, weight: Tensor) -> Tensor | None:
        """Which outputs of a single growing head earlier tasks have trained; None for any other layer."""
        old = self.memory.get(name, {}).get("outputs")
        return None if old is None else torch.cat([old, old.new_zeros(len(weight) - len(old))])

    def _map_layers(self, strategy: SupervisedTemplate) -> LayerMap:
        model = strategy.model
        names = [*dict(model.named_modules()), *dict(model.named_parameters())]
        for option, chosen in (("exclude", self.exclude), ("freeze", self.freeze)):
            for name in chosen:
                if name not in names:
                    hint = suggestion(name, filter(None, names))
                    raise ValueError(f"{option} names {name!r}, which the model does not have; {hint}")
        layers = self._found_layers(model)
        if layers.matrices:
            with data_pass(strategy, strategy.experience.dataset, 2, 2) as batches, seen_matrices(layers):
                for _ in batches:
                    pass
        self._bare_biases = {name: layers.biases[name] for name in layers.matrices if name in layers.biases}
        labels = list(dict.fromkeys(layers.unprotectable.values()))
        self._complain(labels, "have parameters of a kind that cannot be protected")
        if not layers.protected:
            raise ValueError(
                f"{type(self).__name__} found nothing to protect in {type(model).__name__}: it has no layer "
                "of a known kind outside its task heads and the excluded modules"
            )
        return layers

    def _found_layers(self, model: nn.Module) -> LayerMap:
        """The layers of the model outside its task heads and the modules that a user has named."""
        return map_layers(model, skip=[*task_heads(model), *self.exclude, *self.freeze])

    def _complain(self, names: list[str], what: str, outcome: str = "lets them train freely") -> None:
        """Say once of each name that it is not protected."""
        fresh = [name for name in names if name not in self._warned]
        if not fresh:
            return
        message = f"{', '.join(fresh)} {what}: {type(self).__name__} {outcome}"
        if self.strict:
            raise ValueError(f"{message}; name them in freeze or exclude, or leave out strict=True to accept this")
        self._warned.update(fresh)
        warnings.warn(
            f"{message}; name them in freeze to fix them after the first experience, or in exclude to silence this",
            stacklevel=3,
        )


def stored_like(memory: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    """The memory of a layer on the device of its weight, with floating-point tensors in the weight's dtype."""
    return {
        key: tensor.to(weight.device, weight.dtype if tensor.is_floating_point() else tensor.dtype)
        for key, tensor in memory.items()
    }


def refuse_divergence(name: str, values: Tensor) -> None:
    """Raise a DivergenceError if not all ``values`` are finite."""
    if not values.isfinite().all():
        raise DivergenceError(f"{name} is not finite")


def _trainable_together(model: nn.Module, biases: dict[str, list[str]]) -> set[str]:
    """The weights that train together with the one bias that they have."""
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {weight for weight, own in biases.items() if len(own) == 1 and {weight, *own} <= trainable}


def _refuse_heads_without_a_group(strategy: SupervisedTemplate) -> None:
    """Raise a ValueError if Avalanche could not tell into which parameter group a new head belongs."""
    groups = strategy.optimizer.param_groups
    for name, module in growing_heads(strategy.model).items():
        if len(groups) == 1:
            continue
        own = {id(parameter) for parameter in module.parameters()}
        homes = [index for index, group in enumerate(groups) if own & {id(parameter) for parameter in group["params"]}]
        if len(homes) != 1:
            raise ValueError(
                f"the optimizer has {len(groups)} parameter groups, and the parameters of the head {name!r} are in "
                f"{homes or 'none'} of them: Avalanche could not tell where those of the next task belong. Put all of "
                f"them into one group, as with {{'params': model.{name}.parameters()}}"
            )

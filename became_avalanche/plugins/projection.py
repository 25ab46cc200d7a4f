"""Base class of all gradient projection plugins."""

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
from became_avalanche.plugins.statistics import (
    RunningStatistics,
    Statistics,
    drift_of,
    other_buffers_of,
    relative_change,
    statistics_of,
)
from became_avalanche.strategy.divergence import DivergenceError
from became_avalanche.strategy.heads import growing_heads, task_heads, trained_outputs
from became_avalanche.strategy.owner import fingerprint, has_weights, renamed
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
    """Keeps the outputs of a model's layers unchanged on the inputs of earlier experiences.

    After each experience the method stores the important input directions of each layer (``update_memory``). In later
    experiences these directions (``protected``) are removed from the updates of the layer's weight.

    **Layers.** Protected layers are found by module type: Linear, convolutions, attention, embeddings and recurrent
    layers. Weights that the model passes to ``F.linear`` are found in a forward pass. A warning names everything that
    cannot be protected. Task heads (``MultiHeadClassifier``) are not protected. In a single head that grows
    (``IncrementalClassifier``), the outputs that earlier experiences have trained are protected. Parameters of
    normalisation layers are frozen after the first experience. Their running statistics keep updating, which makes
    outputs of old tasks drift: see ``RunningStatistics``.

    **Optimizers.** The protection holds with any optimizer. Under SGD the gradient and the weight decay are projected.
    Under any other optimizer the update is projected, because adaptive steps leave the subspace of the gradient. The
    optimizer state is reset before each experience.

    **Writing a method.** A subclass implements ``update_memory`` and ``protected``. It can also override ``observe``
    (the data that the memory is computed from, by default the inputs of the layers), ``projector`` (the function that
    projects an update), and ``freezes_normalisation``. If it trains parameters outside the model, it also inherits from
    ``OwnsParameters``. During an experience, from ``before_training_exp`` to ``after_training_exp``, it can use

    - ``layers``: the protected layers by the name of their weight, their biases, and the normalisation parameters;
    - ``parts(name)`` and ``groups(name)``: the parameters that form the rows of a layer, and the number of groups;
    - ``layer_inputs(...)``: the inputs of all layers in a pass over the experience;
    - ``gradient_rows(...)``: the gradients of all layers, as rows.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from became_avalanche import GradientProjectionPlugin, MultiHeadMLP, split_digits
    >>> class MeanPlugin(GradientProjectionPlugin):
    ...     def update_memory(self, name, observed):  # protect the strongest input direction of the task
    ...         energies, vectors = observed.residual_spectrum(observed.empty_basis())
    ...         self.memory[name] = {"basis": vectors[..., :1]}
    ...     def protected(self, name):
    ...         return self.memory[name]["basis"], None
    >>> model, plugin = MultiHeadMLP(), MeanPlugin()
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> strategy = Naive(model=model, optimizer=optimizer, train_mb_size=64, evaluator=None, plugins=[plugin])
    >>> _ = strategy.train(split_digits().train_stream[:2])
    >>> plugin.ranks()
    {'features.1.weight': 1, 'features.3.weight': 1}
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

        :param n_samples: number of training samples per experience whose layer inputs enter the memory; None for all.
        :param bias: what happens to the biases of protected layers after the first experience. "freeze" keeps them
            fixed; "augment" protects them together with the weight, as the weight of a constant input 1; "free" lets
            them train, unprotected.
        :param exclude: names of modules or parameters to leave unprotected. A module includes all its submodules.
        :param freeze: names of modules or parameters that train in the first experience only. Use it for constants
            such as a class token, which no projection can protect.
        :param strict: raise an error, instead of a warning, if the model has parameters that cannot be protected.
        :param verbose: print ``report()`` once, after the first experience.
        """
        super().__init__()
        if n_samples is not None and n_samples < 1:
            raise ValueError(f"n_samples must be at least 1, or None for all training samples; got {n_samples}")
        if bias not in ("freeze", "augment", "free"):
            raise ValueError(f"bias must be one of: 'freeze', 'augment', 'free'; got {bias!r}")
        for option, chosen in (("exclude", exclude), ("freeze", freeze)):
            if isinstance(chosen, str):
                raise ValueError(f"{option} must be a list of names; got the string {chosen!r}: write [{chosen!r}]")
        self.n_samples = n_samples
        self.bias = bias
        self.exclude = tuple(exclude)
        self.freeze = tuple(freeze)
        self.strict = strict
        self.verbose = verbose

        self.experiences = 0
        """Number of experiences in the memory."""
        self.memory: dict[str, dict[str, Tensor]] = {}
        """Tensors that the method stores for each layer: weight name -> tensor name -> tensor."""

        self._suspensions = 0
        self._warned: set[str] = set()
        self._bare_biases: dict[str, list[str]] = {}
        self.layers: LayerMap
        """The layers of the model in the experience being trained; empty between experiences."""
        self._augmented: set[str]
        self._guards: list[Guard] = []
        self._saw_update = False
        self._statistics: Statistics = {}
        self._buffers: dict[str, Tensor] = {}
        self._arrived: dict[str, list[float]] = {}
        self._known_parameters: set[str]
        self._watched: nn.Module | None
        self._clear_experience()

    @abstractmethod
    def update_memory(self, name: str, observed: InputMatrix) -> None:
        """Update ``self.memory[name]`` with the result of ``observe`` for the layer with weight ``name``."""

    @abstractmethod
    def protected(self, name: str) -> tuple[Tensor, Tensor | None]:
        """Return the protected input directions of the layer with weight ``name``, and the fraction to remove.

        :param name: a key of ``self.memory``.
        :return: orthonormal columns (groups, d, r), where zero columns are padding; and the fraction (groups, r) of an
            update that is removed along each column, or None to remove all of it.
        """

    def projector(self, name: str) -> Callable[[Tensor], Tensor]:
        """Return the function that projects rows (groups, out, d) of a gradient or update of the weight ``name``."""
        return Projector.away_from(*self.protected(name))

    def observe(self, strategy: SupervisedTemplate, num_workers: int) -> dict[str, InputMatrix]:
        """Return what ``update_memory`` receives for each layer after an experience: by default the layer's inputs."""
        batch_size = max(strategy.train_mb_size, 128)  # 125 samples fit into one batch, as in the published codes
        inputs = self.layer_inputs(strategy, batch_size, num_workers)
        layers = self.layers.protected
        unseen = [name for name, users in layers.items() if name not in inputs and _has_gradient(users[0].weight)]
        self._warn_unprotected(
            unseen, "were trained but never called as modules in eval mode, so their inputs are unknown"
        )
        return inputs

    def single_precision(self) -> bool:
        """Return whether float32 is accurate enough for products of inputs (errors up to 1e-5 of the total energy)."""
        return False

    # ------------------------------------------------------------------------------------- for methods, read only

    def parts(self, name: str) -> list[str]:
        """Return the parameters protected as one matrix: the weight ``name``, and its bias with ``bias="augment"``."""
        return [name, *self.layers.biases[name]] if name in self._augmented else [name]

    def groups(self, name: str) -> int:
        """Return the number of groups of the layer with weight ``name``.

        It is 1 for most layers, the groups of a convolution, 3 for attention that holds queries, keys and values in one
        weight, and the number of rows of an embedding.
        """
        return self.layers.protected[name][0].groups

    def layer_inputs(
        self, strategy: SupervisedTemplate, batch_size: int, num_workers: int, *, batch_mean: bool = False
    ) -> dict[str, InputMatrix]:
        """Return the inputs of each layer in a pass over the experience."""
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
        self._warn_unprotected(
            uses, "are also used outside their modules, on inputs that are unknown", "protects only the known inputs"
        )
        return inputs

    def gradient_rows(self, strategy: SupervisedTemplate, num_workers: int) -> dict[str, Tensor]:
        """Return the gradients of the mean loss over ``n_samples``, as rows, for all layers that have a gradient."""
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
        """Return the names of the weights in the memory."""
        return self.memory

    def reset(self) -> None:
        """Reset the plugin to its initial state, for a run with another model."""
        super().reset()
        self._warned.clear()
        self._clear_experience()

    def ranks(self) -> dict[str, int]:
        """Return the number of protected input directions of each layer, by the name of its weight.

        Directions count if updates along them are removed completely or in part. For a grouped convolution the number
        is the sum over the groups. The directions depend on the method:

        - GPM and SGP: the basis;
        - TRGP: the protected part of its directions;
        - GPCNS: the shared directions of the old gradients with an importance above 0;
        - NSCL: all directions outside the approximate null space;
        - OWM: all directions in which the covariance of the inputs is not zero.
        """
        result = {}
        for name in self.memory:
            basis, importance = self.protected(name)
            counted = basis.any(-2) if importance is None else basis.any(-2) & (importance > 0)
            result[name] = int(counted.sum())
        return result

    def report(self) -> ProjectionReport:
        """Return which parameters of the model are protected, frozen and free in the next experience, for ``print``."""
        model = None if self._owner is None else self._owner()
        if model is None:
            raise ValueError(
                f"{type(self).__name__} has nothing to report, because it has no model, or the model no longer exists: "
                "train it first, and keep a reference to the model"
            )
        layers = self._find_layers(model)
        layers.biases.update(self._bare_biases)
        parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        present, _ = renamed(self.memory, parameters)  # a wrapper may have renamed the keys of the memory
        ranks = {present.get(name, name): rank for name, rank in self.ranks().items()}
        dimensions = {present.get(name, name): self.protected(name)[0].shape[:2] for name in self.memory}
        bases = {name: (ranks[name], dimensions[name].numel()) for name in ranks if name in parameters}
        augmented = _augmentable(model, layers.biases) if self.bias == "augment" else set()
        protected = {*bases, *(bias for name in augmented & bases.keys() for bias in layers.biases[name])}
        frozen = set(chain.from_iterable(layers.constants.get(name, []) for name in bases))
        frozen |= {bias for name in bases.keys() - augmented for bias in layers.biases.get(name, [])}
        if self.bias == "free":
            frozen = set()
        if self.experiences and self.freezes_normalisation:
            frozen |= set(layers.normalisation)
        if self.experiences:
            frozen |= {name for name in parameters if is_below(name, self.freeze)}
        return ProjectionReport(
            plugin=type(self).__name__,
            experiences=self.experiences,
            bases=bases,
            frozen=[name for name in parameters if name in frozen - protected],
            free=[name for name in parameters if name not in frozen | protected],
            memory_bytes=self.memory_bytes(),
        )

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Return a context in which nothing is projected or frozen."""
        self._warn_of_moved_weights()
        self._suspensions += 1
        try:
            yield
        finally:
            self._suspensions -= 1

    # --------------------------------------------------------------------------------------------------- callbacks

    def before_train_dataset_adaptation(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().before_train_dataset_adaptation(strategy, **kwargs)
        _refuse_ambiguous_head_groups(strategy)
        weights = fingerprint(strategy.model) if self.memory else {}
        self._arrived = {name: kept for name, kept in weights.items() if name in self.memory}

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._clear_experience()
        self._set_layers(strategy)
        strategy.make_optimizer(reset_optimizer_state=True)
        parameters = dict(strategy.model.named_parameters())
        self._warn_if_all_will_freeze(parameters)
        if self.experiences == 0:
            return
        if not has_weights(strategy.model, self._arrived):
            self._warn_of_moved(["some protected weights"], "before the training of this experience")
        self._statistics = statistics_of(strategy.model)
        frozen: dict[str, Tensor | None] = {name: None for name in parameters if is_below(name, self.freeze)}
        if self.freezes_normalisation:
            frozen.update(dict.fromkeys(self.layers.normalisation))
        for name in self.layers.protected:
            if name not in self.memory:  # a new layer, or one that no experience has used
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
        self._watched, self._buffers = strategy.model, other_buffers_of(strategy.model)
        for guard in self._guards:
            guard.note_start()

    def before_training_epoch(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        for guard in self._guards:
            guard.start_epoch()

    def before_forward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        guards = [guard for guard in self._guards if guard.in_backward]
        if guards and not self._suspensions and gradients_are_private(strategy, self):
            step = Step.of(strategy, self)
            for guard in guards:
                guard.enter_forward(step)

    def after_backward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        # not earlier: gradient checkpointing calls the layers again in the backward pass
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
        self._warn_of_unseen_updates(strategy)
        self._warn_of_moved_weights()
        if continues(kwargs):
            self._clear_experience()
            return
        refuse_divergence("the loss of the last batch", torch.as_tensor(strategy.loss))
        for name, parameter in trainable(strategy).items():
            refuse_divergence(name, parameter)
        if self._known_parameters != {name for name, _ in strategy.model.named_parameters()}:
            self._set_layers(strategy)  # the model has created layers in its forward pass
        with self.timed("memory"):
            observations = self.observe(strategy, kwargs.get("num_workers", 0))
            for name, observed in observations.items():
                refuse_divergence(f"the energy of {name}", observed.energy())
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
        self._warn_of_drifted_statistics(strategy)
        self._clear_experience()
        if self.verbose and self.experiences == 1:
            print(self.report())

    # ----------------------------------------------------------------------------------------------------- details

    def _clear_experience(self) -> None:
        self.layers = LayerMap()
        self._augmented = set()
        self._saw_update, self._statistics, self._buffers = False, {}, {}
        self._known_parameters, self._watched = set(), None
        for guard in self._guards:
            guard.leave_forward()  # still entered if the forward pass of the model raised an error
        self._guards = []

    def _set_layers(self, strategy: SupervisedTemplate) -> None:
        self.layers = self._map_layers(strategy)
        self._known_parameters = {name for name, _ in strategy.model.named_parameters()}
        if self.bias == "augment":
            self._augmented = _augmentable(strategy.model, self.layers.biases)

    def _warn_if_all_will_freeze(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Warn once if the plugin will freeze everything that trains outside the heads."""
        frozen = list(self.layers.normalisation) if self.freezes_normalisation else []
        if self.bias != "free":
            frozen += [bias for biases in self.layers.biases.values() for bias in biases]
        training = [name for name in frozen if parameters[name].requires_grad]
        if not training or any(parameters[name].requires_grad for name in self.layers.protected) or "" in self._warned:
            return
        self._warned.add("")
        warnings.warn(
            f"only biases and normalisation parameters train outside the heads ({training[0]}, ...), and "
            f"{type(self).__name__} freezes them after the first experience: later experiences will train only the "
            "heads; to train them unprotected, use bias='free' for biases, or name their modules in exclude",
            stacklevel=3,
        )

    def _warn_of_drifted_statistics(self, strategy: SupervisedTemplate) -> None:
        """Warn once if running statistics have moved so far that the outputs of old tasks change."""
        buffers = other_buffers_of(strategy.model)
        changed = [
            name
            for name, before in self._buffers.items()
            if name in buffers and relative_change(before, buffers[name]) > 0.1
        ]
        if new := [name for name in changed if name not in self._warned]:
            self._warned.update(new)
            warnings.warn(
                f"the buffers {', '.join(new)} have changed in training: {type(self).__name__} protects no buffers, so "
                "the outputs of old tasks may have changed",
                stacklevel=3,
            )
        drift = drift_of(self._statistics, statistics_of(strategy.model))
        moved = {name: value for name, value in drift.items() if value > 0.5}
        if not moved or any(isinstance(plugin, RunningStatistics) for plugin in strategy.plugins):
            return
        worst = max(moved, key=moved.__getitem__)
        if "running statistics" not in self._warned:
            self._warned.add("running statistics")
            warnings.warn(
                f"the running statistics of {len(moved)} normalisation layers have drifted, most in {worst} (the mean "
                f"by {moved[worst]:.1f} standard deviations, or the variance by a factor of exp({moved[worst]:.1f})), "
                "which changes the outputs of old tasks; add RunningStatistics() to the plugins to prevent this",
                stacklevel=3,
            )

    def _warn_of_unseen_updates(self, strategy: SupervisedTemplate) -> None:
        """Warn if the model was trained without the callbacks in which this plugin projects."""
        trained = strategy.clock.train_exp_iterations > 0 or not has_weights(strategy.model, self._weights)
        if self._guards and not self._saw_update and trained:
            warnings.warn(
                f"{type(strategy).__name__} has trained without calling before_update and after_update of its plugins, "
                f"so {type(self).__name__} could not protect anything in this experience",
                stacklevel=3,
            )
            self._watched = None  # the weights have moved, and the warning says why

    def _warn_of_moved_weights(self) -> None:
        """Warn if protected weights have moved, although all updates that this plugin has seen were projected."""
        if self._watched is None or self._suspensions:
            return
        model, self._watched = self._watched, None  # once per experience: a free stage or a merge may follow
        parameters = dict(model.named_parameters())
        moved = []
        for guard in self._guards:
            tolerance = 0.01 if guard.parameters[0].dtype.itemsize >= 4 else 0.1
            names = [guard.name] if len(guard.parameters) == 1 else self.parts(guard.name)
            now = [parameters[name] for name in names if name in parameters]
            if len(now) < len(names) or guard.moved(now) > tolerance:
                moved.append(guard.name)
        if moved:
            self._warn_of_moved(moved, "outside the optimizer steps that it has seen")

    def _warn_of_moved(self, names: list[str], when: str) -> None:
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        warnings.warn(
            f"{', '.join(names[:3])}{more} have moved although {type(self).__name__} protects them: something has "
            f"changed them {when}, such as another plugin, a hook or a second optimizer; outputs of old tasks have "
            "changed",
            stacklevel=3,
        )

    def _old_outputs(self, name: str, weight: Tensor) -> Tensor | None:
        """Return a mask of the outputs of a growing head that earlier tasks have trained; None for any other layer."""
        old = self.memory.get(name, {}).get("outputs")
        return None if old is None else torch.cat([old, old.new_zeros(len(weight) - len(old))])

    def _map_layers(self, strategy: SupervisedTemplate) -> LayerMap:
        """Return the layers to protect, after checking the names in options and warning of unprotected parameters."""
        model = strategy.model
        names = [*dict(model.named_modules()), *dict(model.named_parameters())]
        for option, chosen in (("exclude", self.exclude), ("freeze", self.freeze)):
            for name in chosen:
                if name not in names:
                    hint = suggestion(name, filter(None, names))
                    raise ValueError(f"the model has no module or parameter {name!r}, which {option} names; {hint}")
        layers = self._find_layers(model)
        if layers.matrices:
            with data_pass(strategy, strategy.experience.dataset, 2, 2) as batches, seen_matrices(layers):
                for _ in batches:
                    pass
        self._bare_biases = {name: layers.biases[name] for name in layers.matrices if name in layers.biases}
        labels = list(dict.fromkeys(layers.unprotectable.values()))
        self._warn_unprotected(labels, "have parameters of a kind that cannot be protected")
        if not layers.protected:
            raise ValueError(
                f"{type(self).__name__} found nothing to protect in {type(model).__name__}: the model has no layer "
                "of a supported type outside its task heads, exclude and freeze"
            )
        return layers

    def _find_layers(self, model: nn.Module) -> LayerMap:
        """Return the layers of the model outside its task heads, ``exclude`` and ``freeze``."""
        return map_layers(model, skip=[*task_heads(model), *self.exclude, *self.freeze])

    def _warn_unprotected(self, names: list[str], why: str, outcome: str = "lets them train freely") -> None:
        """Warn once about each name that is not protected, or raise a ValueError with ``strict=True``."""
        new = [name for name in names if name not in self._warned]
        if not new:
            return
        message = f"{', '.join(new)} {why}: {type(self).__name__} {outcome}"
        if self.strict:
            raise ValueError(f"{message}; name them in freeze or exclude, or leave out strict=True to accept this")
        self._warned.update(new)
        warnings.warn(
            f"{message}; name them in freeze to fix them after the first experience, or in exclude to silence this "
            "warning",
            stacklevel=3,
        )


def _has_gradient(weight: Tensor) -> bool:
    return weight.grad is not None and bool(weight.grad.to_dense().any())


def stored_like(memory: dict[str, Tensor], weight: Tensor) -> dict[str, Tensor]:
    """Move the memory of a layer to the device of its weight, with floating-point tensors in the weight's dtype."""
    return {
        key: tensor.to(weight.device, weight.dtype if tensor.is_floating_point() else tensor.dtype)
        for key, tensor in memory.items()
    }


def refuse_divergence(name: str, values: Tensor) -> None:
    """Raise a DivergenceError if not all ``values`` are finite."""
    if not values.isfinite().all():
        raise DivergenceError(f"{name} is not finite")


def _augmentable(model: nn.Module, biases: dict[str, list[str]]) -> set[str]:
    """Return the weights that can be protected together with their bias: both train, and there is one bias."""
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return {weight for weight, own in biases.items() if len(own) == 1 and {weight, *own} <= trainable}


def _refuse_ambiguous_head_groups(strategy: SupervisedTemplate) -> None:
    """Raise a ValueError if it is ambiguous to which parameter group Avalanche adds the next head."""
    groups = strategy.optimizer.param_groups
    for name, module in growing_heads(strategy.model).items():
        if len(groups) == 1:
            continue
        own = {id(parameter) for parameter in module.parameters()}
        homes = [index for index, group in enumerate(groups) if own & {id(parameter) for parameter in group["params"]}]
        if len(homes) != 1:
            raise ValueError(
                f"the optimizer has {len(groups)} parameter groups, and the parameters of the head {name!r} are in "
                f"{f'groups {homes}' if homes else 'none of them'}, so Avalanche cannot tell which group the head of "
                f"the next task belongs to; put the head into one group: {{'params': model.{name}.parameters()}}"
            )

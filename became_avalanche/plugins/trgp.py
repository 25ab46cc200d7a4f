"""TRGP: Trust Region Gradient Projection (Lin et al., ICLR 2022)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from avalanche.training.plugins import LRSchedulerPlugin
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor, nn

from became_avalanche.layers.layer import Layer
from became_avalanche.layers.model import map_layers
from became_avalanche.plugins.threshold import EnergyThresholdPlugin, ThresholdOptions
from became_avalanche.strategy.protocols import OwnsParameters
from became_avalanche.strategy.tasks import continues
from became_avalanche.subspace import backward
from became_avalanche.subspace.basis import MAX_THRESHOLD, compact, in_double, orthonormal, take_until_threshold
from became_avalanche.subspace.inputs import InputMatrix

if TYPE_CHECKING:
    from typing_extensions import Unpack

Scales = dict[str, dict[int, Tensor]]
"""Scale matrices ``Q``: weight name -> earlier task -> matrix."""


class TRGPPlugin(EnergyThresholdPlugin, OwnsParameters):
    """Trust Region Gradient Projection: GPM in which a task can reuse old directions through task-specific matrices.

    Each task ``i`` has a subspace ``S_i`` per layer, part of the protected basis ``U``. When a new task begins, an
    earlier task is in the trust region of a layer if its subspace holds much of the layer's gradient ``G``:
    ``‖G S_i‖ > trust_threshold ‖G‖``. For the ``top_k`` nearest of these tasks the new task learns a matrix ``Q_i``,
    which starts as the identity. Instead of the layer's weight ``W`` the new task uses

        W + Σ_i W S_i (Q_i − I) S_iᵀ.

    Updates of ``W`` are projected: ``G <- G − G U Uᵀ``. So later tasks do not change ``W S_i``, and the matrices of
    each task stay valid.

    While the strategy trains or evaluates, layers use the matrices of the batch's task. The parameters of the model are
    not modified. To call the model outside the strategy, use the context ``task``. The strategy's optimizer trains the
    matrices in a separate parameter group, which exists only during the experience.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from became_avalanche import MultiHeadMLP, TRGPPlugin, split_digits
    >>> model, plugin = MultiHeadMLP(), TRGPPlugin(trust_threshold=0.0)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> strategy = Naive(model=model, optimizer=optimizer, train_mb_size=64, evaluator=None, plugins=[plugin])
    >>> _ = strategy.train(split_digits().train_stream[:2])
    >>> {weight: list(matrices) for weight, matrices in plugin.scales[1].items()}  # task 1 reuses task 0
    {'features.1.weight': [0], 'features.3.weight': [0]}
    >>> with plugin.task(1):
    ...     logits = model(torch.zeros(3, 64), task_labels=torch.ones(3, dtype=torch.long))
    >>> logits.shape
    torch.Size([3, 2])
    """

    needs_loss = True
    STATE = (*EnergyThresholdPlugin.STATE, "scales")

    def __init__(self, trust_threshold: float = 0.5, top_k: int = 2, **options: Unpack[ThresholdOptions]) -> None:
        """Init.

        :param trust_threshold: fraction of the gradient's norm that the subspace of a trusted task must hold.
        :param top_k: maximal number of earlier tasks that a layer may reuse.
        :param options: options of ``GPMPlugin``. ``reference=True`` has three more effects: the strongest new direction
            of each later task is not protected; a task that trusts no other in the first layer scales no layer; and
            the memory is computed from inputs without scaling.
        """
        super().__init__(**options)
        if not 0 <= trust_threshold <= 1:
            raise ValueError(
                f"trust_threshold must be a fraction of the gradient's norm, 0 to 1; got {trust_threshold}"
            )
        if top_k < 0:
            raise ValueError(f"top_k must be at least 0; got {top_k}")
        self.trust_threshold = trust_threshold
        self.top_k = top_k
        self.scales: dict[int, Scales] = {}
        """Scale matrices that each task has learned, by task label."""
        self._label: int | None = None
        self._current: dict[str, dict[int, nn.Parameter]] = {}
        self._model: nn.Module | None = None
        self._active: int | None = None
        self._undo: list[Callable[[], None]] = []

    # ------------------------------------------------------------------------------------------------------- memory

    def update_memory(self, name: str, observed: InputMatrix) -> None:
        old = self.memory.get(name)
        stored = observed.empty_basis() if old is None else in_double(old["directions"])
        protected = stored.any(-2) if old is None else old["protected"]
        basis = stored * protected.unsqueeze(-2)
        energies, vectors = observed.residual_spectrum(basis)
        along = torch.cat([observed.energy_along(basis), energies], dim=-1)
        order = along.argsort(dim=-1, descending=True, stable=True)
        threshold = self.threshold_of(self.experiences + 1)
        total = observed.energy().unsqueeze(-1)
        chosen = take_until_threshold(along.gather(-1, order), threshold, total, below=self.reference and old is None)
        chosen = torch.zeros_like(chosen).scatter(-1, order, chosen)
        again, fresh = chosen.split_with_sizes([stored.shape[-1], energies.shape[-1]], dim=-1)
        fresh = fresh & (energies > (1 - MAX_THRESHOLD) * total)  # less energy is rounding error: the basis is full
        new = orthonormal(vectors, fresh, basis)
        fresh = fresh[..., : new.shape[-1]]
        space = torch.cat([again, fresh], dim=-1)
        spaces = space.unsqueeze(0)
        if old is not None:
            spaces = torch.cat([F.pad(old["spaces"], (0, new.shape[-1])), spaces])
        if self.reference and old is not None:
            fresh = fresh & (torch.arange(new.shape[-1], device=fresh.device) > 0)  # a bug of the published code
        self.memory[name] = {
            "directions": torch.cat([stored, new], dim=-1),
            "protected": torch.cat([protected, fresh], dim=-1),
            "spaces": spaces,
        }

    def protected(self, name: str) -> tuple[Tensor, Tensor | None]:
        memory = self.memory[name]
        return compact(memory["directions"] * memory["protected"].unsqueeze(-2)), None

    def space(self, name: str, task: int) -> Tensor:
        """Return ``S_i`` of the layer with weight ``name``. Tasks that used the layer are counted from 0."""
        memory = self.memory[name]
        return compact(memory["directions"] * memory["spaces"][task].unsqueeze(-2))

    # ----------------------------------------------------------------------------------------------------- callbacks

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the scale matrices in training. Those of a layer are counted from the nearest task."""
        return {
            f"TRGP:{name}.{k}": scale
            for name, scales in self._current.items()
            for k, scale in enumerate(scales.values())
        }

    def reset(self) -> None:
        """Reset the plugin to its initial state, for a run with another model."""
        super().reset()
        if self._model is not None:
            self._activate(self._model, None)
        self._label, self._current, self._model, self._active = None, {}, None, None

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if continues(kwargs):
            raise ValueError(
                "TRGPPlugin cannot train one task in several calls of train(): leave out task_continues=True"
            )
        self._remove_from_optimizer(strategy)  # left over from an interrupted experience
        label = self._label_of(strategy.experience)
        if label in self.scales:
            raise ValueError(
                f"TRGPPlugin learns separate weights for each task label, but the label {label} comes a second time; "
                "give each experience a different task label"
            )
        super().before_training_exp(strategy, **kwargs)
        self._activate(strategy.model, None)  # trust depends on gradients without scaling
        self._label = label
        if self.experiences > 0:
            self._current = self._trust_regions(strategy, kwargs.get("num_workers", 0))
        self._add_to_optimizer(strategy)
        self._activate(strategy.model, label)

    @torch.no_grad()
    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        label = self._label_of(strategy.experience)
        if self.reference:
            self._activate(strategy.model, None)
        super().after_training_exp(strategy, **kwargs)
        self.scales[label] = {
            name: {task: scale.detach() for task, scale in scales.items()} for name, scales in self._current.items()
        }
        self._remove_from_optimizer(strategy)
        self._activate(strategy.model, None)
        self._activate(strategy.model, label)  # other plugins may use the model after this callback

    def after_training(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().after_training(strategy, **kwargs)
        self._label = None
        self._activate(strategy.model, None)

    def before_forward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._activate_for_batch(strategy)
        super().before_forward(strategy, **kwargs)

    def before_eval_forward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._activate_for_batch(strategy)

    def after_eval(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._activate(strategy.model, self._label)  # training may continue after the evaluation

    @contextmanager
    def task(self, label: int, model: nn.Module | None = None) -> Iterator[None]:
        """Return a context in which the model computes with the weights of a task.

        :param label: the task label.
        :param model: the model; by default the model that the strategy trained or evaluated last.
        """
        model = self._model if model is None else model
        if model is None:
            raise ValueError("this plugin has not seen a model yet; pass the model as task(label, model)")
        if label not in self.scales:
            raise ValueError(f"no task {label!r} has been learned; choose one of: {sorted(self.scales) or 'none'}")
        before = self._model, self._active
        self._activate(model, label)
        try:
            yield
        finally:
            self._activate(model if before[0] is None else before[0], before[1])

    # -------------------------------------------------------------------------------------------------- trust region

    def _trust_regions(self, strategy: SupervisedTemplate, num_workers: int) -> dict[str, dict[int, nn.Parameter]]:
        """Return an identity matrix as a parameter for each earlier task that a layer will reuse."""
        with _called_layers(self.layers.protected) as called:  # scaling works only in modules that are called
            gradients = self.gradient_rows(strategy, num_workers)
        trusted = {
            name: self._trusted(name, gradients[name])
            for name in self.layers.protected
            if name in gradients and name in called
        }
        if self.reference and not trusted.get(next(iter(self.layers.protected))):
            return {}
        return {
            name: {task: nn.Parameter(_identity(self.space(name, task))) for task in tasks}
            for name, tasks in trusted.items()
            if tasks
        }

    def _trusted(self, name: str, gradient: Tensor) -> list[int]:
        """Return the earlier tasks in the layer's trust region, at most ``top_k``, nearest first."""
        if name not in self.memory:
            return []
        tasks = range(len(self.memory[name]["spaces"]))
        held = {task: float((gradient @ self.space(name, task)).norm()) for task in tasks}
        nearest = sorted(tasks, key=lambda task: -held[task])[: self.top_k]
        return [task for task in nearest if held[task] > self.trust_threshold * float(gradient.norm())]

    # -------------------------------------------------------------------------------------------------- task weights

    def _label_of(self, experience: Any) -> int:
        """Return the one task label of the experience, or raise a ValueError."""
        labels = sorted(set(getattr(experience, "task_labels", [])))
        if len(labels) != 1:
            raise ValueError(
                "TRGPPlugin learns separate weights for each task, so each experience needs one task label; got "
                f"{labels or 'none'}"
            )
        return int(labels[0])

    def _activate_for_batch(self, strategy: SupervisedTemplate) -> None:
        """Use the scales of the current batch's task."""
        labels = strategy.mb_task_id.unique().tolist()
        if len(labels) != 1:
            raise ValueError(
                f"TRGPPlugin learns separate weights for each task, but a batch mixes the tasks {labels}; train and "
                "evaluate tasks separately, without replay"
            )
        self._activate(strategy.model, labels[0])

    def _activate(self, model: nn.Module, label: int | None) -> None:
        """Let ``model`` compute with the scales of the task ``label``; None for no scaling."""
        if model is self._model and label == self._active:
            return
        for undo in self._undo:
            undo()
        self._model, self._active, self._undo = model, label, []
        known: dict[Any, Any] = {**self.scales, self._label: self._current} if self._current else self.scales
        scales = known.get(label, {})
        layers = map_layers(model).protected if scales else {}
        for name in layers.keys() & scales.keys():
            scaling = _Scaling([(self.space(name, task), scale) for task, scale in scales[name].items()])
            self._undo += [scaling.attach(layer) for layer in layers[name]]

    # ----------------------------------------------------------------------------------------------------- optimizer

    def _add_to_optimizer(self, strategy: SupervisedTemplate) -> None:
        """Add the scales to the optimizer, with the options of its first parameter group."""
        if isinstance(strategy.optimizer, torch.optim.LBFGS):
            raise ValueError(
                "LBFGS takes one parameter group, and TRGPPlugin trains its scales in a second one: use SGD or Adam"
            )
        if not self._current:
            return
        first = strategy.optimizer.param_groups[0]
        options = {key: value for key, value in first.items() if key not in ("params", "param_names")}
        strategy.optimizer.add_param_group({**options, "params": list(self.own_parameters().values())})
        for scheduler in _schedulers(strategy):
            for key in ("base_lrs", "lr_lambdas"):
                if hasattr(scheduler, key):
                    setattr(scheduler, key, [*getattr(scheduler, key), getattr(scheduler, key)[0]])

    def _remove_from_optimizer(self, strategy: SupervisedTemplate) -> None:
        """Remove the scales and their state from the optimizer."""
        own = {id(parameter) for parameter in self.own_parameters().values()}
        groups = strategy.optimizer.param_groups
        groups[:] = [group for group in groups if not own & {id(parameter) for parameter in group["params"]}]
        for parameter in self.own_parameters().values():
            strategy.optimizer.state.pop(parameter, None)
        for scheduler in _schedulers(strategy):
            for key in ("base_lrs", "lr_lambdas"):
                if hasattr(scheduler, key):
                    setattr(scheduler, key, getattr(scheduler, key)[: len(groups)])
        self._current = {}


@dataclass
class _Scaling:
    """Lets a layer compute with ``W + Σ W S (Q − I) Sᵀ`` instead of ``W``."""

    scaled: list[tuple[Tensor, Tensor]]
    """Pairs of ``S`` and ``Q``."""

    def attach(self, layer: Layer) -> Callable[[], None]:
        """Let ``layer`` compute with the scaled weight, and return a function that undoes this."""
        if not layer.takes_rows:
            return layer.compute_with(partial(self.tensors, layer))
        dimension, out = self.scaled[0][0].shape[-2], len(layer.weight)
        operations = sum(4 * out * space.numel() for space, _ in self.scaled)
        if operations >= backward.WORTHWHILE and dimension == layer.weight.shape[-1]:
            hook: Any = partial(self.scale_input)
            hook.scales_weight = True  # see ``recorded_inputs``
            return layer.module.register_forward_pre_hook(hook, with_kwargs=True).remove
        hook = partial(self.add_to_output, layer)
        return layer.module.register_forward_hook(hook, with_kwargs=True).remove

    def scale_input(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Tensor], dict[str, Any]]:
        """Forward pre-hook: replace the input ``x`` by ``x + Σ S (Q − I) Sᵀ x``. For large ``W`` this is cheaper."""
        x = args[0] if args else kwargs["input"]
        scaled = x
        for space, scale in self.scaled:
            inside = x @ space[0]
            scaled = scaled + (inside @ scale[0].mT - inside) @ space[0].mT
        return (scaled,), {}

    def add_to_output(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """Forward hook: add ``Σ W S (Q − I) Sᵀ x`` to the output."""
        x = args[0] if args else kwargs["input"]
        return output + F.linear(x, *self._terms(layer, self._parts(layer)))

    def tensors(self, layer: Layer) -> list[Tensor]:
        """Return the scaled weight, and the scaled bias if ``S`` includes the bias."""
        parts = self._parts(layer)
        return [part + term for part, term in zip(parts, self._terms(layer, parts), strict=True)]

    def _parts(self, layer: Layer) -> list[Tensor]:
        """Return the weight, and the bias if ``S`` includes it."""
        augmented = self.scaled[0][0].shape[-2] > layer.weight_rows(layer.weight).shape[-1]
        return [layer.weight, *([layer.bias] if augmented and layer.bias is not None else [])]

    def _terms(self, layer: Layer, parts: list[Tensor]) -> list[Tensor]:
        """Return ``Σ W S (Q − I) Sᵀ`` in the shape of the weight, and its column for the bias if ``S`` includes it."""
        rows = layer.rows(parts)
        term = torch.zeros_like(rows)
        for space, scale in self.scaled:
            inside = rows @ space
            term = term + (inside @ scale - inside) @ space.mT
        return layer.from_rows(term, parts)


@contextmanager
def _called_layers(layers: Mapping[str, list[Layer]]) -> Iterator[set[str]]:
    """Return a context that collects the names of the layers whose modules are called."""
    called: set[str] = set()
    with ExitStack() as hooks:
        for name, users in layers.items():
            for layer in (layer for layer in users if layer.in_calls and layer.rule is None):
                hook = layer.module.register_forward_pre_hook(lambda *call, name=name: called.add(name))
                hooks.callback(hook.remove)
        yield called


def _identity(space: Tensor) -> Tensor:
    """Return one r x r identity matrix per group."""
    return torch.eye(space.shape[-1], dtype=space.dtype, device=space.device).expand(len(space), -1, -1).clone()


def _schedulers(strategy: SupervisedTemplate) -> Iterator[Any]:
    """Yield the learning rate schedulers of the strategy, and the schedulers inside them."""
    waiting = [plugin.scheduler for plugin in strategy.plugins if isinstance(plugin, LRSchedulerPlugin)]
    while waiting:
        scheduler = waiting.pop()
        yield scheduler
        waiting += getattr(scheduler, "_schedulers", [])

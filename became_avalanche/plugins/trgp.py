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
from became_avalanche.subspace.basis import MAX_THRESHOLD, compact, in_double, orthonormal, reach
from became_avalanche.subspace.inputs import InputMatrix

if TYPE_CHECKING:
    from typing_extensions import Unpack

Scales = dict[str, dict[int, Tensor]]
"""Weight name -> earlier task -> scale matrix ``Q``."""


class TRGPPlugin(EnergyThresholdPlugin, OwnsParameters):
    """Trust Region Gradient Projection: GPM that lets a task reuse old directions through weights of its own.

    Each experience has its own subspace ``S_i`` per layer, part of the protected basis ``U``. When a task begins, the
    earlier tasks whose subspace holds much of the layer's gradient ``G``, ``‖G S_i‖ > trust_threshold ‖G‖``, are in
    the trust region. For the ``top_k`` of them the task learns a matrix ``Q_i``, starting at the identity, and uses

        W + Σ_i W S_i (Q_i − I) S_iᵀ

    in place of the layer's weight ``W``, whose updates are projected: ``G <- G − G U Uᵀ``. Later tasks leave ``W S_i``
    where it is, so the ``Q_i`` of each task stay valid.

    The parameters of the model are left as they are: layers compute with the scaled term while the strategy trains and
    evaluates, with the matrices of the batch's task. Use ``task`` to call the model outside the strategy.
    The matrices are trained by the strategy's optimizer, as a parameter group that comes and goes with the experience.
    """

    needs_loss = True
    STATE = (*EnergyThresholdPlugin.STATE, "scales")

    def __init__(self, trust_threshold: float = 0.5, top_k: int = 2, **options: Unpack[ThresholdOptions]) -> None:
        """Init.

        :param trust_threshold: fraction of the gradient's norm that a subspace must hold to be trusted.
        :param top_k: how many earlier tasks a layer may reuse.
        :param options: those of ``GPMPlugin``. With ``reference=True`` also: the strongest new direction of each later
            task is not protected, a task without trust in the first layer scales no layer, and the memory is made of
            inputs without scaling.
        """
        super().__init__(**options)
        if not 0 <= trust_threshold <= 1:
            raise ValueError(f"trust_threshold is a fraction of the gradient's norm in 0 to 1; got {trust_threshold}")
        if top_k < 0:
            raise ValueError(f"top_k must be at least 0; got {top_k}")
        self.trust_threshold = trust_threshold
        self.top_k = top_k
        self.scales: dict[int, Scales] = {}
        """Task label -> what that task learned."""
        self._label: int | None = None
        self._training: dict[str, dict[int, nn.Parameter]] = {}
        self._model: nn.Module | None = None
        self._served: int | None = None
        self._attached: list[Callable[[], None]] = []

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
        chosen = reach(along.gather(-1, order), threshold, total, below=self.reference and old is None)
        chosen = torch.zeros_like(chosen).scatter(-1, order, chosen)
        again, fresh = chosen.split_with_sizes([stored.shape[-1], energies.shape[-1]], dim=-1)
        fresh = fresh & (energies > (1 - MAX_THRESHOLD) * total)  # less is rounding, of a basis that is full
        new = orthonormal(vectors, fresh, basis)
        fresh = fresh[..., : new.shape[-1]]
        space = torch.cat([again, fresh], dim=-1)
        spaces = space.unsqueeze(0)
        if old is not None:
            spaces = torch.cat([F.pad(old["spaces"], (0, new.shape[-1])), spaces])
        if self.reference and old is not None:
            fresh = fresh & (torch.arange(new.shape[-1], device=fresh.device) > 0)  # the published slip
        self.memory[name] = {
            "directions": torch.cat([stored, new], dim=-1),
            "protected": torch.cat([protected, fresh], dim=-1),
            "spaces": spaces,
        }

    def protected(self, name: str) -> tuple[Tensor, Tensor | None]:
        memory = self.memory[name]
        return compact(memory["directions"] * memory["protected"].unsqueeze(-2)), None

    def space(self, name: str, task: int) -> Tensor:
        """``S_i`` of the layer with weight ``name``; tasks are counted from 0 among those that used the layer."""
        memory = self.memory[name]
        return compact(memory["directions"] * memory["spaces"][task].unsqueeze(-2))

    # ----------------------------------------------------------------------------------------------------- callbacks

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """The scale matrices in training, counted from the nearest task of each layer."""
        return {
            f"TRGP:{name}.{k}": scale
            for name, scales in self._training.items()
            for k, scale in enumerate(scales.values())
        }

    def reset(self) -> None:
        """Forget everything, as if newly made: for a run with another model."""
        super().reset()
        if self._model is not None:
            self._serve(self._model, None)
        self._label, self._training, self._model, self._served = None, {}, None, None

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        if continues(kwargs):
            raise ValueError("TRGPPlugin cannot train a task in several calls: leave out task_continues=True")
        self._leave_optimizer(strategy)  # left over if an experience was broken off
        label = self._label_of(strategy.experience)
        if label in self.scales:
            raise ValueError(
                f"TRGPPlugin gives each task weights of its own, chosen by task label, and the label {label} comes a "
                "second time; give every experience its own"
            )
        super().before_training_exp(strategy, **kwargs)
        self._serve(strategy.model, None)  # gradients without scaling decide
        self._label = label
        if self.experiences > 0:
            self._training = self._trust_regions(strategy, kwargs.get("num_workers", 0))
        self._join_optimizer(strategy)
        self._serve(strategy.model, label)

    @torch.no_grad()
    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        label = self._label_of(strategy.experience)
        if self.reference:
            self._serve(strategy.model, None)
        super().after_training_exp(strategy, **kwargs)
        self.scales[label] = {
            name: {task: scale.detach() for task, scale in scales.items()} for name, scales in self._training.items()
        }
        self._leave_optimizer(strategy)
        self._serve(strategy.model, None)
        self._serve(strategy.model, label)  # other plugins may look at the task at the end of its experience

    def after_training(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().after_training(strategy, **kwargs)
        self._label = None
        self._serve(strategy.model, None)

    def before_forward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._serve_batch(strategy)
        super().before_forward(strategy, **kwargs)

    def before_eval_forward(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._serve_batch(strategy)

    def after_eval(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._serve(strategy.model, self._label)  # an evaluation may happen in the middle of a training

    @contextmanager
    def task(self, label: int, model: nn.Module | None = None) -> Iterator[None]:
        """A context in which the model computes with the weights of a task.

        :param label: the task label.
        :param model: the model; by default the one that the strategy trained or evaluated last.
        """
        model = self._model if model is None else model
        if model is None:
            raise ValueError("this plugin has not met a model yet; pass it as task(label, model)")
        if label not in self.scales:
            raise ValueError(f"no task {label!r} has been learned; choose one of: {sorted(self.scales) or 'none'}")
        before = self._model, self._served
        self._serve(model, label)
        try:
            yield
        finally:
            self._serve(model if before[0] is None else before[0], before[1])

    # -------------------------------------------------------------------------------------------------- trust region

    def _trust_regions(self, strategy: SupervisedTemplate, num_workers: int) -> dict[str, dict[int, nn.Parameter]]:
        """A fresh scale matrix for each earlier task that a layer is to reuse."""
        with _calls(self.layers.protected) as called:  # only a weight that its module uses can be scaled there
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
        """The earlier tasks in the layer's trust region, at most ``top_k``, the nearest first."""
        if name not in self.memory:
            return []
        tasks = range(len(self.memory[name]["spaces"]))
        held = {task: float((gradient @ self.space(name, task)).norm()) for task in tasks}
        nearest = sorted(tasks, key=lambda task: -held[task])[: self.top_k]
        return [task for task in nearest if held[task] > self.trust_threshold * float(gradient.norm())]

    # ------------------------------------------------------------------------------------------------------- serving

    def _label_of(self, experience: Any) -> int:
        labels = sorted(set(getattr(experience, "task_labels", [])))
        if len(labels) != 1:
            raise ValueError(
                "TRGPPlugin gives each task weights of its own, so each experience needs one task label; got "
                f"{labels or 'none'}"
            )
        return int(labels[0])

    def _serve_batch(self, strategy: SupervisedTemplate) -> None:
        labels = strategy.mb_task_id.unique().tolist()
        if len(labels) != 1:
            raise ValueError(
                f"TRGPPlugin gives each task weights of its own, but a batch mixes the tasks {labels}; train and "
                "evaluate tasks apart, without replay"
            )
        self._serve(strategy.model, labels[0])

    def _serve(self, model: nn.Module, label: int | None) -> None:
        """Let ``model`` compute with the scales of the task ``label``, or as it is."""
        if model is self._model and label == self._served:
            return
        for detach in self._attached:
            detach()
        self._model, self._served, self._attached = model, label, []
        known: dict[Any, Any] = {**self.scales, self._label: self._training} if self._training else self.scales
        scales = known.get(label, {})
        layers = map_layers(model).protected if scales else {}
        for name in layers.keys() & scales.keys():
            scaling = _Scaling([(self.space(name, task), scale) for task, scale in scales[name].items()])
            self._attached += [scaling.attach(layer) for layer in layers[name]]

    # ----------------------------------------------------------------------------------------------------- optimizer

    def _join_optimizer(self, strategy: SupervisedTemplate) -> None:
        """Train the scales as the first parameter group is trained."""
        if isinstance(strategy.optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS takes one parameter group, and TRGPPlugin trains its scales in a second one")
        if not self._training:
            return
        first = strategy.optimizer.param_groups[0]
        options = {key: value for key, value in first.items() if key not in ("params", "param_names")}
        strategy.optimizer.add_param_group({**options, "params": list(self.own_parameters().values())})
        for scheduler in _schedulers(strategy):
            for key in ("base_lrs", "lr_lambdas"):
                if hasattr(scheduler, key):
                    setattr(scheduler, key, [*getattr(scheduler, key), getattr(scheduler, key)[0]])

    def _leave_optimizer(self, strategy: SupervisedTemplate) -> None:
        own = {id(parameter) for parameter in self.own_parameters().values()}
        groups = strategy.optimizer.param_groups
        groups[:] = [group for group in groups if not own & {id(parameter) for parameter in group["params"]}]
        for parameter in self.own_parameters().values():
            strategy.optimizer.state.pop(parameter, None)
        for scheduler in _schedulers(strategy):
            for key in ("base_lrs", "lr_lambdas"):
                if hasattr(scheduler, key):
                    setattr(scheduler, key, getattr(scheduler, key)[: len(groups)])
        self._training = {}


@dataclass
class _Scaling:
    """Lets a layer compute with ``W + Σ W S (Q − I) Sᵀ`` for pairs of ``S`` and ``Q``."""

    scaled: list[tuple[Tensor, Tensor]]

    def attach(self, layer: Layer) -> Callable[[], None]:
        """Let ``layer`` compute so until the function that this returns is called."""
        if not layer.takes_rows:
            return layer.compute_with(partial(self.tensors, layer))
        dimension, out = self.scaled[0][0].shape[-2], len(layer.weight)
        operations = sum(4 * out * space.numel() for space, _ in self.scaled)
        if operations >= backward.WORTHWHILE and dimension == layer.weight.shape[-1]:
            return layer.module.register_forward_pre_hook(self.scale_input, with_kwargs=True).remove
        hook = partial(self.add_to_output, layer)
        return layer.module.register_forward_hook(hook, with_kwargs=True).remove

    def scale_input(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[Tensor], dict[str, Any]]:
        """A hook that gives the layer ``x + Σ S (Q − I) Sᵀ x``, for a large layer far cheaper than scaling ``W``."""
        x = args[0] if args else kwargs["input"]
        scaled = x
        for space, scale in self.scaled:
            inside = x @ space[0]
            scaled = scaled + (inside @ scale[0].mT - inside) @ space[0].mT
        return (scaled,), {}

    def add_to_output(self, layer: Layer, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        """A hook that adds ``Σ W S (Q − I) Sᵀ x`` to the output."""
        x = args[0] if args else kwargs["input"]
        return output + F.linear(x, *self._terms(layer, self._parts(layer)))

    def tensors(self, layer: Layer) -> list[Tensor]:
        """The scaled weight, and the scaled bias if that is part of ``S``."""
        parts = self._parts(layer)
        return [part + term for part, term in zip(parts, self._terms(layer, parts), strict=True)]

    def _parts(self, layer: Layer) -> list[Tensor]:
        augmented = self.scaled[0][0].shape[-2] > layer.weight_rows(layer.weight).shape[-1]
        return [layer.weight, *([layer.bias] if augmented and layer.bias is not None else [])]

    def _terms(self, layer: Layer, parts: list[Tensor]) -> list[Tensor]:
        """``Σ W S (Q − I) Sᵀ`` in the shape of the weight, and what it adds to the bias if that is part of ``S``."""
        rows = layer.rows(parts)
        term = torch.zeros_like(rows)
        for space, scale in self.scaled:
            inside = rows @ space
            term = term + (inside @ scale - inside) @ space.mT
        return layer.from_rows(term, parts)


@contextmanager
def _calls(layers: Mapping[str, list[Layer]]) -> Iterator[set[str]]:
    """The names of the layers whose modules are called while this is open."""
    called: set[str] = set()
    with ExitStack() as hooks:
        for name, users in layers.items():
            for layer in (layer for layer in users if layer.in_calls and layer.rule is None):
                note = layer.module.register_forward_pre_hook(lambda *call, name=name: called.add(name))
                hooks.callback(note.remove)
        yield called


def _identity(space: Tensor) -> Tensor:
    """One r x r identity per group."""
    return torch.eye(space.shape[-1], dtype=space.dtype, device=space.device).expand(len(space), -1, -1).clone()


def _schedulers(strategy: SupervisedTemplate) -> Iterator[Any]:
    """The learning rate schedules of the strategy, and those that they are made of."""
    waiting = [plugin.scheduler for plugin in strategy.plugins if isinstance(plugin, LRSchedulerPlugin)]
    while waiting:
        scheduler = waiting.pop()
        yield scheduler
        waiting += getattr(scheduler, "_schedulers", [])

"""The recipes of the gradient projection papers: lower the learning rate on a plateau of the loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from math import inf
from typing import Any

import torch
from avalanche.benchmarks.utils import AvalancheDataset
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor

from became_avalanche.strategy.divergence import DivergenceError
from became_avalanche.strategy.passes import data_pass, experiences_in_training, mean_loss
from became_avalanche.strategy.protocols import RestoresBest, StageAware
from became_avalanche.strategy.state import StatefulPlugin
from became_avalanche.strategy.weights import restore, snapshot


class _Plateau(StatefulPlugin, StageAware):
    """Lowers the learning rates whenever a loss has not improved for some epochs, and ends each training in time."""

    def __init__(self, patience: int, factor: float) -> None:
        super().__init__()
        if patience < 1:
            raise ValueError(f"patience must be at least 1 epoch; got {patience}")
        if not factor > 1:
            raise ValueError(f"factor divides the learning rate, so it must be above 1; got {factor}")
        self.patience = patience
        self.factor = factor
        self._rates: list[float] = []
        self._last_loss: float | None = None

    @property
    def last_loss(self) -> float | None:
        """The watched loss of the epoch that ended last, or None before the first epoch of a training.

        A plugin that comes later in the list can read it in its ``after_training_epoch``.
        """
        return self._last_loss

    @abstractmethod
    def loss(self, strategy: SupervisedTemplate) -> float:
        """The watched loss, after an epoch."""

    @abstractmethod
    def is_last(self, strategy: SupervisedTemplate) -> bool:
        """Whether training ends on this plateau instead of going on with a lower learning rate."""

    def improved(self, strategy: SupervisedTemplate) -> None:
        """Called when the loss is the lowest so far."""

    def ended(self, strategy: SupervisedTemplate) -> None:
        """Called when a training has ended."""

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._rates = [group["lr"] for group in strategy.optimizer.param_groups]
        self.on_stage_start(strategy, 1)

    def on_stage_start(self, strategy: SupervisedTemplate, stage: int) -> None:
        """Start a training: nothing is best yet."""
        self._best_loss, self._last_loss = inf, None
        self._left = self.patience

    def after_training_epoch(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        loss = self._last_loss = self.loss(strategy)
        ended = strategy.clock.train_exp_epochs == strategy.train_epochs - 1
        if loss < self._best_loss:
            self._best_loss, self._left = loss, self.patience
            self.improved(strategy)
        else:
            self._left -= 1
            if self._left == 0:
                self._left = self.patience
                if self.is_last(strategy):
                    if not ended:  # a stop in the last epoch would end the next experience instead
                        strategy.stop_training()
                    ended = True
                else:
                    for group in strategy.optimizer.param_groups:
                        group["lr"] /= self.factor
        if ended:
            self.ended(strategy)

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        # groups that a method adds for an experience come last, before or after this plugin has counted
        for group, rate in zip(strategy.optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate


class PlateauPlugin(_Plateau, RestoresBest):
    """Trains until the validation loss has settled, and goes back to the best weights.

    After each epoch the loss on the experience of the same index of the benchmark's validation stream is measured. If
    it has not improved for ``patience`` epochs, the learning rates are divided by ``factor``; when that would bring
    the first of them below ``lr_min``, or after the strategy's ``train_epochs``, training ends and the weights with
    the lowest validation loss are restored. With a plugin that trains in stages, each stage is such a training.
    """

    def __init__(
        self,
        patience: int = 6,
        factor: float = 2.0,
        lr_min: float = 1e-5,
        *,
        stream: str = "valid",
        valid: AvalancheDataset | Sequence[Any] | None = None,
        batch_size: int = 64,
    ) -> None:
        """Init.

        :param patience: epochs without improvement before the learning rate drops.
        :param factor: by what the learning rate is divided.
        :param lr_min: training ends instead of going below this learning rate.
        :param stream: name of the validation stream, which is looked for in the benchmark of the experience, and then
            in the ``eval_streams`` of ``train``.
        :param valid: the validation data itself: a stream or a list with an experience or dataset for each experience
            of the training stream, or one dataset for all of them. The streams of Avalanche's
            ``benchmark_with_validation_stream`` and ``benchmark_from_datasets`` do not know their benchmark and have to
            be passed here.
        :param batch_size: batch size of the validation pass.
        """
        super().__init__(patience, factor)
        if not lr_min > 0:
            raise ValueError(f"lr_min must be above 0, or training would never end; got {lr_min}")
        self.lr_min = lr_min
        self.stream = stream
        self.valid = valid
        self.batch_size = batch_size
        self._datasets: list[Any] = []
        self._keep_last = False

    @contextmanager
    def keeping_last(self) -> Iterator[None]:
        """A context in which a stage ends with the weights of its last step."""
        before, self._keep_last = self._keep_last, True
        try:
            yield
        finally:
            self._keep_last = before

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._datasets = [self._validation_data(strategy, e) for e in experiences_in_training(strategy)]
        super().before_training_exp(strategy, **kwargs)

    def on_stage_start(self, strategy: SupervisedTemplate, stage: int) -> None:
        super().on_stage_start(strategy, stage)
        self._best_weights = dict[str, Tensor]()

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        super().after_training_exp(strategy, **kwargs)
        self._datasets, self._best_weights = [], {}

    @torch.no_grad()
    def loss(self, strategy: SupervisedTemplate) -> float:
        """Mean loss over the validation data."""
        total, samples = 0.0, 0
        for dataset in self._datasets:
            with data_pass(strategy, dataset, self.batch_size) as batches:
                for size in batches:
                    total += size * float(mean_loss(strategy, size))
                    samples += size
        return total / samples

    def is_last(self, strategy: SupervisedTemplate) -> bool:
        below: bool = strategy.optimizer.param_groups[0]["lr"] / self.factor < self.lr_min
        return below

    def improved(self, strategy: SupervisedTemplate) -> None:
        self._best_weights = snapshot(strategy)

    def ended(self, strategy: SupervisedTemplate) -> None:
        if not self._best_weights:
            raise DivergenceError("the validation loss was not a number in any epoch")
        if not self._keep_last:
            restore(strategy, self._best_weights)

    def _validation_data(self, strategy: SupervisedTemplate, experience: Any) -> AvalancheDataset:
        """The validation data of the experience of the training stream."""
        index = experience.current_experience
        if isinstance(self.valid, AvalancheDataset):
            return self.valid
        if self.valid is not None:
            if index >= len(self.valid):
                raise ValueError(f"valid has data for {len(self.valid)} experiences, but experience {index} is trained")
            return getattr(self.valid[index], "dataset", self.valid[index])
        benchmark = getattr(experience._origin_stream, "benchmark", None)
        streams = {} if benchmark is None else benchmark.streams
        if self.stream in streams:
            return streams[self.stream][index].dataset
        for other in chain.from_iterable(strategy._eval_streams or ()):
            if (other.origin_stream.name, other.current_experience) == (self.stream, index):
                return other.dataset
        known = f"the benchmark has only {', '.join(sorted(streams))}" if streams else "the stream knows no benchmark"
        raise ValueError(
            f"PlateauPlugin needs a stream {self.stream!r} with validation data, but {known}; pass the data as "
            "PlateauPlugin(valid=...): avalanche's benchmark_with_validation_stream makes a valid_stream"
        )


class TrainingPlateauPlugin(_Plateau):
    """Trains until the training loss has settled, which needs no validation data: the recipe of Adam-NSCL in the paper.

    If the mean loss over an epoch's batches, penalties included, has not improved for ``patience`` epochs, the learning
    rates are divided by ``factor``; when that happens for the ``plateaus``-th time, or after the strategy's
    ``train_epochs``, training ends with the weights that it has. With a plugin that trains in stages, each stage is
    such a training.
    """

    def __init__(self, patience: int = 3, factor: float = 2.0, plateaus: int = 3) -> None:
        """Init.

        :param patience: epochs without improvement before the learning rate drops.
        :param factor: by what the learning rate is divided.
        :param plateaus: training ends at this plateau.
        """
        super().__init__(patience, factor)
        if plateaus < 1:
            raise ValueError(f"plateaus must be at least 1; got {plateaus}")
        self.plateaus = plateaus

    def on_stage_start(self, strategy: SupervisedTemplate, stage: int) -> None:
        super().on_stage_start(strategy, stage)
        self._met = 0

    def before_training_epoch(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._total, self._samples = torch.zeros((), dtype=torch.float64, device=strategy.device), 0

    def after_training_iteration(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        size = len(strategy.mb_y)
        self._total += size * strategy.loss.detach().double().sum()  # read once an epoch, not to wait for a device
        self._samples += size

    def loss(self, strategy: SupervisedTemplate) -> float:
        """Mean loss over the batches of the epoch."""
        loss = float(self._total) / self._samples
        if loss != loss:
            raise DivergenceError("the training loss is not a number")
        return loss

    def is_last(self, strategy: SupervisedTemplate) -> bool:
        self._met += 1
        return self._met == self.plateaus

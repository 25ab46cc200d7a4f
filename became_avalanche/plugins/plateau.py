"""The training recipes of the gradient projection papers: lower the learning rate on a plateau of the loss."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from math import inf, isfinite
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
    """Lowers the learning rates when a loss has not improved for some epochs, and decides when training ends."""

    def __init__(self, patience: int, factor: float) -> None:
        super().__init__()
        if patience < 1:
            raise ValueError(f"patience must be at least 1 epoch; got {patience}")
        if not factor > 1:
            raise ValueError(f"factor must be above 1, because it divides the learning rate; got {factor}")
        self.patience = patience
        self.factor = factor
        self._rates: list[float] = []
        self._last_loss: float | None = None

    @property
    def last_loss(self) -> float | None:
        """The monitored loss of the last finished epoch, or None before the first epoch of a stage ends.

        A plugin that comes later in the list can read it in its ``after_training_epoch``.
        """
        return self._last_loss

    @abstractmethod
    def loss(self, strategy: SupervisedTemplate) -> float:
        """Return the monitored loss after an epoch."""

    @abstractmethod
    def is_last(self, strategy: SupervisedTemplate) -> bool:
        """Return whether training ends on this plateau instead of continuing with a lower learning rate."""

    def improved(self, strategy: SupervisedTemplate) -> None:
        """Do something when the loss is the lowest so far. By default nothing happens."""

    def ended(self, strategy: SupervisedTemplate) -> None:
        """Do something when training has ended. By default nothing happens."""

    def before_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._rates = [group["lr"] for group in strategy.optimizer.param_groups]
        self.on_stage_start(strategy, 1)

    def on_stage_start(self, strategy: SupervisedTemplate, stage: int) -> None:
        """Reset the best loss, the last loss and the patience."""
        self._best_loss, self._last_loss = inf, None
        self._epochs_left = self.patience

    def after_training_epoch(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        loss = self._last_loss = self.loss(strategy)
        ended = strategy.clock.train_exp_epochs == strategy.train_epochs - 1
        if loss < self._best_loss:
            self._best_loss, self._epochs_left = loss, self.patience
            self.improved(strategy)
        else:
            self._epochs_left -= 1
            if self._epochs_left == 0:
                self._epochs_left = self.patience
                if self.is_last(strategy):
                    if not ended:  # stop_training() in the last epoch would stop the next experience instead
                        strategy.stop_training()
                    ended = True
                else:
                    for group in strategy.optimizer.param_groups:
                        group["lr"] /= self.factor
        if ended:
            self.ended(strategy)

    def after_training_exp(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        # A method such as TRGP may add groups for the time of an experience. They come last, and get no rate here.
        for group, rate in zip(strategy.optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate


class PlateauPlugin(_Plateau, RestoresBest):
    """Trains until the validation loss stops improving, and restores the best weights.

    After each epoch the plugin measures the loss on the validation data of the experience: by default the experience
    with the same index in the benchmark's validation stream. If the loss has not improved for ``patience`` epochs, the
    learning rates are divided by ``factor``. Training ends when this would bring the first learning rate below
    ``lr_min``, or after the strategy's ``train_epochs``. Then the weights with the lowest validation loss are restored.

    With a plugin that trains in stages, such as ``BecameMergePlugin``, this applies to each stage.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from became_avalanche import MultiHeadMLP, PlateauPlugin, split_digits
    >>> model, plugin = MultiHeadMLP(), PlateauPlugin(patience=1, lr_min=0.05)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> options = {"train_mb_size": 16, "train_epochs": 5, "evaluator": None}
    >>> strategy = Naive(model=model, optimizer=optimizer, plugins=[plugin], **options)
    >>> _ = strategy.train(split_digits().train_stream[0])
    >>> plugin.last_loss < 0.69  # validation loss of the last epoch; log(2) is chance level
    True
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

        :param patience: number of epochs without improvement before the learning rate is lowered.
        :param factor: the learning rate is divided by this number.
        :param lr_min: training ends when the learning rate would fall below this value.
        :param stream: name of the validation stream. The plugin looks for it in the benchmark of the experience, and
            then in the ``eval_streams`` that were passed to ``train``.
        :param valid: the validation data themselves: a stream or list with one experience or dataset per experience of
            the training stream, or one dataset for all experiences. This is needed for benchmarks from Avalanche's
            ``benchmark_with_validation_stream`` and ``benchmark_from_datasets``, whose streams do not know their
            benchmark, unless ``eval_streams`` has the validation stream.
        :param batch_size: batch size for the validation loss.
        """
        super().__init__(patience, factor)
        if not lr_min > 0:
            raise ValueError(f"lr_min must be above 0, because the learning rate never falls below 0; got {lr_min}")
        self.lr_min = lr_min
        self.stream = stream
        self.valid = valid
        self.batch_size = batch_size
        self._datasets: list[Any] = []
        self._keep_last = False

    @contextmanager
    def keeping_last(self) -> Iterator[None]:
        """Return a context in which a stage ends with its last weights instead of its best ones."""
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
        """Return the mean loss over the validation data."""
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
            raise DivergenceError("the validation loss was NaN or infinite in every epoch")
        if not self._keep_last:
            restore(strategy, self._best_weights)

    def _validation_data(self, strategy: SupervisedTemplate, experience: Any) -> AvalancheDataset:
        """Return the validation data for this experience of the training stream."""
        index = experience.current_experience
        if isinstance(self.valid, AvalancheDataset):
            return self.valid
        if self.valid is not None:
            if index >= len(self.valid):
                raise ValueError(
                    f"valid has data for {len(self.valid)} experiences, but got experience {index} to train; pass data "
                    "for each experience"
                )
            return getattr(self.valid[index], "dataset", self.valid[index])
        benchmark = getattr(experience._origin_stream, "benchmark", None)
        streams = {} if benchmark is None else benchmark.streams
        if self.stream in streams:
            return streams[self.stream][index].dataset
        for other in chain.from_iterable(strategy._eval_streams or ()):
            if (other.origin_stream.name, other.current_experience) == (self.stream, index):
                return other.dataset
        found = (
            f"the benchmark has only the streams {', '.join(sorted(streams))}"
            if streams
            else "the training stream does not know its benchmark"
        )
        raise ValueError(
            f"PlateauPlugin needs a stream {self.stream!r} with validation data, but {found}; pass the data as "
            "PlateauPlugin(valid=...), for example a valid_stream from Avalanche's benchmark_with_validation_stream"
        )


class TrainingPlateauPlugin(_Plateau):
    """Trains until the training loss stops improving: the paper's recipe for Adam-NSCL. It needs no validation data.

    The monitored loss is the mean training loss over an epoch, including penalties. If it has not improved for
    ``patience`` epochs, the learning rates are divided by ``factor``. Training ends when this happens for the
    ``plateaus``-th time, or after the strategy's ``train_epochs``. The weights stay as they are then.

    With a plugin that trains in stages, such as ``BecameMergePlugin``, this applies to each stage.

    >>> import torch
    >>> from avalanche.training import Naive
    >>> from became_avalanche import MultiHeadMLP, TrainingPlateauPlugin, split_digits
    >>> model, plugin = MultiHeadMLP(), TrainingPlateauPlugin(patience=1, plateaus=1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> options = {"train_mb_size": 16, "train_epochs": 5, "evaluator": None}
    >>> strategy = Naive(model=model, optimizer=optimizer, plugins=[plugin], **options)
    >>> _ = strategy.train(split_digits().train_stream[0])
    >>> plugin.last_loss < 0.69  # training loss of the last epoch; log(2) is chance level
    True
    """

    def __init__(self, patience: int = 3, factor: float = 2.0, plateaus: int = 3) -> None:
        """Init.

        :param patience: number of epochs without improvement before the learning rate is lowered.
        :param factor: the learning rate is divided by this number.
        :param plateaus: number of plateaus after which training ends.
        """
        super().__init__(patience, factor)
        if plateaus < 1:
            raise ValueError(f"plateaus must be at least 1; got {plateaus}")
        self.plateaus = plateaus

    def on_stage_start(self, strategy: SupervisedTemplate, stage: int) -> None:
        super().on_stage_start(strategy, stage)
        self._plateaus_met = 0

    def before_training_epoch(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        self._total, self._samples = torch.zeros((), dtype=torch.float64, device=strategy.device), 0

    def after_training_iteration(self, strategy: SupervisedTemplate, **kwargs: Any) -> None:
        size = len(strategy.mb_y)
        self._total += size * strategy.loss.detach().double().sum()  # summed on the device, read once per epoch
        self._samples += size

    def loss(self, strategy: SupervisedTemplate) -> float:
        """Return the mean training loss over the epoch."""
        loss = float(self._total) / self._samples
        if not isfinite(loss):
            raise DivergenceError(f"the training loss is not finite: {loss}")
        return loss

    def is_last(self, strategy: SupervisedTemplate) -> bool:
        self._plateaus_met += 1
        return self._plateaus_met == self.plateaus

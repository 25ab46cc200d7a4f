"""Metrics to Weights & Biases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from avalanche.evaluation.metric_results import AlternativeValues, TensorImage
from avalanche.logging import BaseLogger
from avalanche.training.plugins import SupervisedPlugin
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL.Image import Image
from torch import Tensor

if TYPE_CHECKING:
    import wandb

_ONE_CURVE = re.compile(r"(Stage|Lambda|Plasticity|Stability)/.*/Exp\d+")
"""Values that come once or twice per experience: a curve over steps, not one chart per experience."""


class WandBLogger(BaseLogger, SupervisedPlugin):
    """Sends metrics to a run of Weights & Biases; Avalanche's own logger does not work with the wandb of today.

    The step is the number of training iterations, over all experiences and stages. Each logger has its own run, so
    several can be open in one process. ``Stage``, ``Lambda``, ``Plasticity`` and ``Stability`` are logged under these
    short names. No code, console output or git state is recorded.

    A logger that comes out of a checkpoint resumes its run when it logs the next value. Offline, that is a second run
    folder with the same run id.
    """

    def __init__(
        self,
        project: str = "became-avalanche",
        *,
        name: str | None = None,
        group: str | None = None,
        config: Mapping[str, Any] | None = None,
        directory: str | Path | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
    ) -> None:
        """Init.

        :param project: project that the run belongs to.
        :param name: name of the run; W&B makes one up if None.
        :param group: runs of a group are shown together, such as the seeds of an experiment.
        :param config: settings of the experiment, shown and stored with the run: nothing secret.
        :param directory: where the folder ``wandb`` with the run's files goes; ``WANDB_DIR`` or the working directory
            if None.
        :param mode: where values go: to the server, to files for a later ``wandb sync``, or nowhere. ``WANDB_MODE`` if
            None, and online without it.
        """
        super().__init__()
        if mode not in (None, "online", "offline", "disabled"):
            raise ValueError(f"mode must be 'online', 'offline', 'disabled' or None; got {mode!r}")
        self._arguments: dict[str, Any] = {
            "project": project,
            "name": name,
            "group": group,
            "config": dict(config or {}),
            "dir": None if directory is None else str(directory),
            "mode": mode,
        }
        self.step = 0
        """Last step logged."""
        self.run: wandb.Run | None = self._start()
        """The run; None after unpickling, until something is logged."""

    def log_single_metric(self, name: str, value: object, x_plot: int) -> None:
        """Log a number, picture or matrix; what W&B has no form for is ignored.

        W&B drops what comes for an earlier step, so that goes to the last one. Of several values for one name and
        step, the last stays.
        """
        shown = _shown(name, value)
        if shown is not None:
            run = self._resumed()
            self.step = max(self.step, int(x_plot))
            run.log({name.split("/")[0] if _ONE_CURVE.fullmatch(name) else name: shown}, step=self.step)

    def log_result(
        self,
        *,
        accuracy: NDArray[Any] | None = None,
        picture: Path | str | Figure | None = None,
        summary: Mapping[str, float] | None = None,
    ) -> None:
        """Log what is known at the end of a stream, at the last step.

        :param accuracy: the accuracy matrix: a row per task learned, a column per task evaluated.
        :param picture: a matplotlib figure, or the path of an image file.
        :param summary: values for the table of runs.
        """
        import wandb

        run = self._resumed()
        if accuracy is not None:
            run.log({"accuracy": _table(accuracy, "after task", "task")}, step=self.step)
        if picture is not None:
            run.log({"picture": wandb.Image(picture)}, step=self.step)
        if summary:
            run.summary.update({name: float(value) for name, value in summary.items()})

    def finish(self, exit_code: int = 0) -> None:
        """End the run.

        Its files are complete when the process ends, or after ``wandb.teardown()``: wandb may write the last of them in
        the background.

        :param exit_code: anything but 0 marks the run as failed.
        """
        if self.run is not None:
            self.run.finish(exit_code=exit_code)

    def __enter__(self) -> WandBLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(exit_code=0 if kind is None else 1)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "run": None}

    def _resumed(self) -> wandb.Run:
        if self.run is None:
            self.run = self._start()
        return self.run

    def _start(self) -> wandb.Run:
        """Open the run, or open it again if it has been open before."""
        import wandb  # here, because it is slow to import

        settings = wandb.Settings(console="off", quiet=True, save_code=False, disable_git=True)
        try:
            run = wandb.init(**self._arguments, reinit="create_new", settings=settings)
        except (wandb.errors.UsageError, wandb.errors.CommError) as error:
            if self._arguments["mode"] in ("offline", "disabled"):
                raise  # has nothing to do with the server
            reason = " ".join(str(error).split())
            raise RuntimeError(
                f"wandb could not start a run online ({reason}): log in with `wandb login`, or log into files with "
                'mode="offline" or WANDB_MODE=offline'
            ) from error
        self._arguments.update(id=run.id, resume="allow")
        self.step = max(self.step, run.step)  # a resumed run may have got further than the checkpoint
        return run


def _shown(name: str, value: Any) -> Any:
    """The value in a form that W&B can show, or None."""
    import wandb

    if isinstance(value, AlternativeValues):
        forms = (_shown(name, alternative) for alternative in value.alternatives)
        return next((form for form in forms if form is not None), None)
    if isinstance(value, TensorImage):  # channels first, and fractions or bytes; W&B takes channels last, and bytes
        image = value.image.detach().cpu()
        pixels = (image.clamp(0, 1) * 255).round().byte() if image.is_floating_point() else image
        return wandb.Image(pixels.permute(1, 2, 0).numpy())
    if isinstance(value, Image | Figure):
        return wandb.Image(value)
    if isinstance(value, Tensor | np.ndarray) and value.ndim == 2:
        return _table(value, "after task", "task") if "Acc" in name else _table(value, "row", "column")
    if isinstance(value, Tensor | np.ndarray | np.generic) and value.ndim == 0:
        value = value.item()
    return value if isinstance(value, int | float) else None


def _table(matrix: Tensor | NDArray[Any], row: str, column: str) -> wandb.Table:
    import wandb

    if matrix.ndim != 2:
        raise ValueError(f"expected a matrix, but got an array of shape {tuple(matrix.shape)}")
    columns: list[str | int] = [row, *(f"{column} {i + 1}" for i in range(matrix.shape[1]))]
    cells = [[None if isnan(value) else value for value in values] for values in matrix.tolist()]
    return wandb.Table(columns=columns, data=[[i + 1, *values] for i, values in enumerate(cells)])

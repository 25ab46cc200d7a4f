"""Metrics to Weights & Biases."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
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

from became_avalanche.results.figures import FIGURES, NothingToDrawError
from became_avalanche.results.metrics import METRICS
from became_avalanche.results.record import MergeRecord, Record

if TYPE_CHECKING:
    import wandb

_ONE_CURVE = re.compile(r"(Stage|Lambda|Plasticity|Stability)/.*/Exp\d+")
"""Values that come once or twice per experience: a curve over steps, not one chart per experience."""


class WandBLogger(BaseLogger, SupervisedPlugin):
    """Sends metrics to a run of Weights & Biases; Avalanche's own logger does not work with the wandb of today.

    The step is the number of training iterations, over all experiences and stages. Each logger has its own run, so
    several can be open in one process. ``Stage``, ``Lambda``, ``Plasticity`` and ``Stability`` are logged under these
    short names: which stage begins at a step, and λ, ``Δᵀ F_t(θ̂) Δ`` and ``Δᵀ Λ_{t-1} Δ`` of each merge. No code,
    console output or git state is recorded.

    A logger that comes out of a checkpoint resumes its run when it logs the next value. Offline, that is a second run
    folder with the same run id.
    """

    def __init__(
        self,
        project: str = "became-avalanche",
        *,
        name: str | None = None,
        group: str | None = None,
        job_type: str | None = None,
        run_id: str | None = None,
        config: Mapping[str, Any] | None = None,
        directory: str | Path | None = None,
        mode: Literal["online", "offline", "disabled"] | None = None,
        start: bool = True,
    ) -> None:
        """Init.

        :param project: project that the run belongs to.
        :param name: name of the run; W&B makes one up if None.
        :param group: runs of a group are shown together, such as the seeds of an experiment.
        :param job_type: what the run does within its group, such as the name of the method.
        :param run_id: id of an earlier run to continue; a new run if None.
        :param config: settings of the experiment, shown and stored with the run: nothing secret.
        :param directory: where the folder ``wandb`` with the run's files goes; ``WANDB_DIR`` or the working directory
            if None.
        :param mode: where values go: to the server, to files for a later ``wandb sync``, or nowhere. ``WANDB_MODE`` if
            None, and online without it.
        :param start: whether to start the run now, and not with ``start()`` or the first value.
        """
        super().__init__()
        if mode not in (None, "online", "offline", "disabled"):
            raise ValueError(f"mode must be 'online', 'offline', 'disabled' or None; got {mode!r}")
        self._arguments: dict[str, Any] = {
            "project": project,
            "name": name,
            "group": group,
            "job_type": job_type,
            "config": dict(config or {}),
            "dir": None if directory is None else str(directory),
            "mode": mode,
        }
        self.step = 0
        """Last step logged."""
        self.run: wandb.Run | None = None
        """The run; None until it is started, and after unpickling until something is logged."""
        self._continue(run_id)
        if start:
            self.start(run_id)

    def start(self, run_id: str | None = None) -> None:
        """Start the run.

        :param run_id: id of an earlier run to continue.
        """
        self._continue(run_id)
        self.run = self._start()

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
        figures: Mapping[str, Path | str | Figure] | None = None,
        summary: Mapping[str, float] | None = None,
    ) -> None:
        """Log what is known at the end of a stream, at the last step.

        :param accuracy: the accuracy matrix: a row per task learned, a column per task evaluated.
        :param figures: matplotlib figures, or paths of image files, by name.
        :param summary: values for the table of runs.
        """
        import wandb

        run = self._resumed()
        if accuracy is not None:
            run.log({"accuracy": _table(accuracy, "after task", "task")}, step=self.step)
        for name, figure in (figures or {}).items():
            run.log({f"figures/{name}": wandb.Image(figure)}, step=self.step)
        if summary:
            run.summary.update({name: float(value) for name, value in summary.items()})

    def log_record(self, record: Record) -> None:
        """Log the record of a run: its status, and if it is done all metrics, tables and figures.

        The metrics are in the summary as ``final/acc`` and so on. The accuracy matrix and the merges are tables. Each
        figure that can be drawn from the record is an image, the accuracy matrix as a heatmap among them.
        """
        import wandb

        run = self._resumed()
        run.summary.update({"status": record.status})
        if record.status != "done":
            return
        values = {name: metric.of(record) for name, metric in METRICS.items()}
        self.log_result(
            accuracy=np.array(record.accuracy["test"], dtype=float),
            figures=_figures(record),
            summary={f"final/{name}": value for name, value in values.items() if value is not None},
        )
        if record.merges:
            columns: list[str | int] = list(MergeRecord.model_fields)
            rows = [list(merge.model_dump().values()) for merge in record.merges]
            run.log({"merges": wandb.Table(columns=columns, data=rows)}, step=self.step)

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

    def _continue(self, run_id: str | None) -> None:
        if run_id is not None:
            self._arguments.update(id=run_id, resume="allow")

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
        self._continue(run.id)
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


def _figures(record: Record) -> dict[str, Figure]:
    """All figures that can be drawn from one record, by name."""
    drawn = {}
    for name, figure in FIGURES.items():
        with suppress(NothingToDrawError):
            drawn[name] = figure.draw([record])
    return drawn


def _table(matrix: Tensor | NDArray[Any], row: str, column: str) -> wandb.Table:
    import wandb

    if matrix.ndim != 2:
        raise ValueError(f"expected a matrix, but got an array of shape {tuple(matrix.shape)}")
    columns: list[str | int] = [row, *(f"{column} {i + 1}" for i in range(matrix.shape[1]))]
    cells = [[None if isnan(value) else value for value in values] for values in matrix.tolist()]
    return wandb.Table(columns=columns, data=[[i + 1, *values] for i, values in enumerate(cells)])

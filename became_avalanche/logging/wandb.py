"""Send metrics to Weights & Biases."""

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
"""Values that are logged once or twice per experience. They form one curve over all steps, not one per experience."""


class WandBLogger(BaseLogger, SupervisedPlugin):
    """Sends metrics to a run of Weights & Biases. Avalanche's own logger does not work with current versions of wandb.

    The step is the number of training iterations, over all experiences and stages. Each logger has a separate run, so
    several can be open in one process. ``Stage`` (the current stage) and ``Lambda``, ``Plasticity`` and ``Stability``
    (λ, ``Δᵀ F_t(θ̂) Δ`` and ``Δᵀ Λ_{t-1} Δ`` of each merge) are logged under these short names. Code, console output
    and the state of git are not recorded.

    A logger that is loaded from a checkpoint resumes its run when it logs the next value. Offline, this creates a
    second run folder with the same run id.
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
        :param name: name of the run (default: W&B chooses one).
        :param group: group of the run. W&B shows the runs of a group together, such as the seeds of an experiment.
        :param job_type: role of the run in its group, such as the name of the method.
        :param run_id: id of an earlier run to resume (default: start a new run).
        :param config: settings of the experiment. They are stored and shown with the run, so pass no secrets.
        :param directory: folder in which wandb creates its folder ``wandb`` (default: ``WANDB_DIR``, or the working
            directory).
        :param mode: send values to the server (online), write them to files for a later ``wandb sync`` (offline), or
            drop them (disabled). Default: ``WANDB_MODE``, or online if it is not set.
        :param start: start the run now. If False, ``start()`` or the first value starts it.
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
        """The last step that was logged."""
        self.run: wandb.Run | None = None
        """The run. None until it is started, and after unpickling until a value is logged."""
        self._set_run_id(run_id)
        if start:
            self.start(run_id)

    def start(self, run_id: str | None = None) -> None:
        """Start the run.

        :param run_id: id of an earlier run to resume (default: the ``run_id`` that the logger was created with).
        """
        self._set_run_id(run_id)
        self.run = self._start()

    def log_single_metric(self, name: str, value: object, x_plot: int) -> None:
        """Log a number, image or matrix. Values that W&B cannot show are ignored.

        W&B drops values of earlier steps, so these are logged at the last step. If a step has several values of the
        same name, W&B keeps the last one.
        """
        shown = _for_wandb(name, value)
        if shown is not None:
            run = self._open_run()
            self.step = max(self.step, int(x_plot))
            run.log({name.split("/")[0] if _ONE_CURVE.fullmatch(name) else name: shown}, step=self.step)

    def log_result(
        self,
        *,
        accuracy: NDArray[Any] | None = None,
        figures: Mapping[str, Path | str | Figure] | None = None,
        summary: Mapping[str, float] | None = None,
    ) -> None:
        """Log the results at the end of a stream, at the last step.

        :param accuracy: the accuracy matrix, with a row per trained task and a column per evaluated task.
        :param figures: matplotlib figures, or paths of image files, by name.
        :param summary: values for the table of runs.
        """
        import wandb

        run = self._open_run()
        if accuracy is not None:
            run.log({"accuracy": _table(accuracy, "after task", "task")}, step=self.step)
        for name, figure in (figures or {}).items():
            run.log({f"figures/{name}": wandb.Image(figure)}, step=self.step)
        if summary:
            run.summary.update({name: float(value) for name, value in summary.items()})

    def log_record(self, record: Record) -> None:
        """Log the status of a recorded run, and if the run is done, its metrics, tables and figures.

        The summary has the metrics as ``final/acc`` and so on. The accuracy matrix and the merges are tables. Each
        figure that can be drawn from the record is an image, including a heatmap of the accuracy matrix.
        """
        import wandb

        run = self._open_run()
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

        wandb may still write its last files in the background. They are complete when the process ends, or after
        ``wandb.teardown()``.

        :param exit_code: any value other than 0 marks the run as failed.
        """
        if self.run is not None:
            self.run.finish(exit_code=exit_code)

    def __enter__(self) -> WandBLogger:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.finish(exit_code=0 if kind is None else 1)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "run": None}

    def _set_run_id(self, run_id: str | None) -> None:
        if run_id is not None:
            self._arguments.update(id=run_id, resume="allow")

    def _open_run(self) -> wandb.Run:
        if self.run is None:
            self.run = self._start()
        return self.run

    def _start(self) -> wandb.Run:
        """Start the run, or resume it if it was started before."""
        import wandb  # not at the top of the file, because the import is slow

        settings = wandb.Settings(console="off", quiet=True, save_code=False, disable_git=True)
        try:
            run = wandb.init(**self._arguments, reinit="create_new", settings=settings)
        except (wandb.errors.UsageError, wandb.errors.CommError) as error:
            if self._arguments["mode"] in ("offline", "disabled"):
                raise  # the server is not used, so the advice below would not help
            reason = " ".join(str(error).split())
            raise RuntimeError(
                f"wandb could not start a run online ({reason}): log in with `wandb login`, or log to files with "
                'mode="offline" or WANDB_MODE=offline'
            ) from error
        self._set_run_id(run.id)
        self.step = max(self.step, run.step)  # a resumed run may be ahead of the checkpoint
        return run


def _for_wandb(name: str, value: Any) -> Any:
    """Return the value in a form that W&B can show, or None if there is none."""
    import wandb

    if isinstance(value, AlternativeValues):
        forms = (_for_wandb(name, alternative) for alternative in value.alternatives)
        return next((form for form in forms if form is not None), None)
    if isinstance(value, TensorImage):  # channels first, fractions or bytes; W&B expects channels last, bytes
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
    """Return all figures that can be drawn from one record, by name."""
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

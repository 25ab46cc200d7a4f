"""Analyse a run from the weights of its merges, which ``became study --keep endpoints`` keeps in the run's folder.

The analyses use data of all tasks, which training never does. They return plain values for figures.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from avalanche.models.utils import avalanche_model_adaptation
from avalanche.training.templates import SupervisedTemplate
from torch import Tensor
from tqdm import tqdm

from became_avalanche.analysis.path import check_in_model, grid, measure, measure_path
from became_avalanche.files import UserError
from became_avalanche.results.record import read_record
from became_avalanche.results.scans import Landscape, PathScan
from became_avalanche.runs.session import Session
from became_avalanche.runs.spec import read_spec
from became_avalanche.strategy.statefile import StateFileError, read_state
from became_avalanche.strategy.weights import restore


class AnalysisError(UserError, ValueError):
    """Raised if a run cannot be analysed: its weights were not kept, or they lie on one line."""


@dataclass(frozen=True)
class KeptMerge:
    """The three weight vectors of a merge, with a strategy and the data to measure them on."""

    t: int
    """Number of the task, counted from 1."""
    strategy: SupervisedTemplate
    training: Sequence[Any]
    """Training experiences of the first t tasks."""
    testing: Sequence[Any]
    """Test experiences of the first t tasks."""
    anchor: Mapping[str, Tensor]
    """θ*_{t-1}."""
    base: Mapping[str, Tensor]
    """θ_GP."""
    candidate: Mapping[str, Tensor]
    """θ̂."""
    coefficient: float
    """λ, or the mean λ if the rule gives more than one."""
    plasticity: float
    """Δᵀ F Δ of the merge."""


def kept_tasks(folder: Path) -> list[int]:
    """Return the numbers of the tasks whose merge can be analysed."""
    return [int(path.stem.removeprefix("endpoints-")) for path in sorted(folder.glob("endpoints-*.safetensors"))]


def open_merge(folder: Path, t: int, data: str | PathLike[str] | None = None) -> KeptMerge:
    """Load the merge of task ``t`` from the folder of a run. Raises an AnalysisError if its weights were not kept.

    :param folder: the folder of the run.
    :param t: number of the task, counted from 1.
    :param data: folder of data sets, for a benchmark that reads files.
    """
    if t not in kept_tasks(folder):
        raise AnalysisError(
            f"{folder} does not have the weights of the merge of task {t}: train the run again in another folder, "
            "with --keep endpoints"
        )
    try:
        state = read_state(folder / f"endpoints-{t:03d}.safetensors", kind="endpoints")
    except StateFileError as error:
        raise AnalysisError(str(error)) from None
    session = Session(read_spec(folder / "spec.json"), data=data)
    strategy, stream = session.strategy, session.stream
    for experience in stream.train_stream[:t]:
        avalanche_model_adaptation(strategy.model, experience)
    strategy.model.to(strategy.device)
    try:
        check_in_model(strategy, state["base"])
    except ValueError as error:
        raise AnalysisError(str(error)) from None
    merge = next(merge for merge in read_record(folder / "record.json").merges if merge.t == t)
    vectors = {
        name: {key: tensor.to(strategy.device) for key, tensor in state[name].items()}
        for name in ("anchor", "base", "candidate")
    }
    return KeptMerge(
        t=t,
        strategy=strategy,
        training=stream.train_stream[:t],
        testing=stream.test_stream[:t],
        coefficient=merge.coefficient,
        plasticity=merge.plasticity,
        **vectors,
    )


def scan_kept_path(kept: KeptMerge, *, n_samples: int | None = 500, step: float = 0.05) -> PathScan:
    """Return loss and accuracy of each task along the path of a kept merge, on training data.

    :param kept: the merge, from ``open_merge``.
    :param n_samples: samples per task, the same for each λ; None for all.
    :param step: distance between two values of λ.
    """
    coefficients = grid(step)
    loss, accuracy = measure_path(kept.strategy, kept.base, kept.candidate, coefficients, kept.training, n_samples)
    return PathScan(
        t=kept.t,
        n_samples=n_samples,
        coefficients=coefficients,
        loss=loss,
        accuracy=accuracy,
        chosen=kept.coefficient,
        plasticity=kept.plasticity,
    )


@dataclass(frozen=True)
class Plane:
    """The plane through three weight vectors: ``anchor + a · (base − anchor) + b · (candidate − anchor)``.

    Its coordinates x and y are orthonormal, with the anchor at (0, 0) and x along ``base − anchor``.
    """

    anchor: Mapping[str, Tensor]
    base: Mapping[str, Tensor]
    candidate: Mapping[str, Tensor]
    width: float
    """x of ``base``: its distance from the anchor."""
    candidate_at: tuple[float, float]
    """x and y of ``candidate``."""

    @staticmethod
    def through(
        anchor: Mapping[str, Tensor], base: Mapping[str, Tensor], candidate: Mapping[str, Tensor], names: Sequence[str]
    ) -> Plane:
        """Return the plane. Raises an AnalysisError if the vectors lie on one line.

        :param names: names of the tensors that distances are computed from: the parameters.
        """
        u = torch.cat([(base[name].double() - anchor[name].double()).flatten() for name in names])
        v = torch.cat([(candidate[name].double() - anchor[name].double()).flatten() for name in names])
        width = float(u.norm())
        along = float(u @ v) / width if width else 0.0
        height = float((v - along / width * u).norm()) if width else 0.0
        if not height > 1e-6 * float(v.norm()):
            raise AnalysisError(
                "θ*_{t-1}, θ_GP and θ̂ lie on one line, so they span no plane: the landscape needs a method with "
                "projection and a free second stage"
            )
        return Plane(anchor, base, candidate, width, (along, height))

    def at(self, x: float, y: float) -> dict[str, Tensor]:
        """Return the weights at a point. Integer tensors (counters) are taken from ``candidate``."""
        along, height = self.candidate_at
        b = y / height
        a = (x - b * along) / self.width
        return {
            name: anchor + a * (self.base[name] - anchor) + b * (self.candidate[name] - anchor)
            if anchor.is_floating_point()
            else self.candidate[name]
            for name, anchor in self.anchor.items()
        }


def measure_landscape(kept: KeptMerge, *, n_samples: int | None = 500, size: int = 21) -> Landscape:
    """Return training loss and test accuracy of each task on a grid in the plane through θ*_{t-1}, θ_GP and θ̂.

    On each side the grid extends beyond the points by a third of their extent. With more than one coefficient the
    merged weights are not in the plane; θ* is then shown at the mean coefficient.

    :param kept: the merge, from ``open_merge``.
    :param n_samples: samples per task, the same for each point; None for all.
    :param size: number of grid points in each direction.
    """
    if size < 2:
        raise ValueError(f"size must be at least 2; got {size}")
    names = [name for name, _ in kept.strategy.model.named_parameters() if name in kept.base]
    plane = Plane.through(kept.anchor, kept.base, kept.candidate, names)
    base, candidate = (plane.width, 0.0), plane.candidate_at
    merged = tuple((1 - kept.coefficient) * b + kept.coefficient * c for b, c in zip(base, candidate, strict=True))
    points = {"anchor": (0.0, 0.0), "base": base, "candidate": candidate, "merged": (merged[0], merged[1])}
    x, y = (_around([point[axis] for point in points.values()], size) for axis in (0, 1))
    shape = (len(kept.training), size, size)
    loss, accuracy = torch.zeros(shape).tolist(), torch.zeros(shape).tolist()
    for row, column in tqdm(
        [(row, column) for row in range(size) for column in range(size)], desc="landscape", leave=False, disable=None
    ):
        restore(kept.strategy, plane.at(x[column], y[row]))
        for i, (training, testing) in enumerate(zip(kept.training, kept.testing, strict=True)):
            loss[i][row][column] = _rounded(measure(kept.strategy, training, n_samples)[0])
            accuracy[i][row][column] = _rounded(measure(kept.strategy, testing, n_samples)[1])
    return Landscape(t=kept.t, n_samples=n_samples, x=x, y=y, loss=loss, accuracy=accuracy, points=points)


def _around(values: Sequence[float], size: int) -> list[float]:
    """Return ``size`` evenly spaced values that extend beyond ``values`` by a third of their extent on each side."""
    low, high = min(values), max(values)
    margin = (high - low) / 3
    return [_rounded(low - margin + k * (high - low + 2 * margin) / (size - 1)) for k in range(size)]


def _rounded(value: float) -> float:
    """Round to six significant digits, so that files stay small."""
    return float(f"{value:.6g}")

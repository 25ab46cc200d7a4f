"""The command ``became``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from became_avalanche.runs.compare import Comparison
    from became_avalanche.runs.progress import Progress
    from became_avalanche.runs.train import RunResult


DATA = click.option(
    "--data", default="data", show_default=True, type=click.Path(path_type=Path), help="Folder of data sets."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="became-avalanche")
def became() -> None:
    """Continual learning with gradient projection and Bayesian model merging."""


@became.command()
@click.option("--benchmark", default="split-digits", show_default=True, help="A name; `became presets` lists them.")
@click.option("--methods", help="Comma-separated names, such as gpm,gpm-2x,gpm+became. Default: all of the usual ones.")
@click.option("--tasks", type=int, help="Learn only so many tasks.")
@click.option("--epochs", type=int, help="Train each stage for at most so many epochs.")
@DATA
@click.option("--device", default="cpu", show_default=True, help="Where to train: cpu, cuda, ...")
@click.option("--seeds", default=2, show_default=True, type=click.IntRange(1, 1000), help="Runs per method.")
@click.option("--out", default="runs/compare", show_default=True, type=click.Path(path_type=Path), help="Folder.")
@click.option("--wandb", metavar="PROJECT", help="Also log each run to this Weights & Biases project.")
def compare(
    benchmark: str,
    methods: str | None,
    tasks: int | None,
    epochs: int | None,
    data: Path,
    device: str,
    seeds: int,
    out: Path,
    wandb: str | None,
) -> None:
    """Train several methods on a benchmark and show how they compare.

    Prints a table of ACC and BWT and writes results.json, table.csv and comparison.png. An interrupted comparison goes
    on where it was when the command is given again.
    """
    _make_writable(out)
    _quiet()
    from became_avalanche.runs.catalogue import find_benchmark
    from became_avalanche.runs.compare import Comparison
    from became_avalanche.runs.methods import COMPARED, METHODS
    from became_avalanche.runs.names import look_up

    _check_device(device)
    names = list(dict.fromkeys(name.strip() for name in methods.split(",") if name.strip())) if methods else COMPARED
    try:
        preset = find_benchmark(benchmark).scaled(tasks, epochs).at(data)
        for name in names:
            look_up("method", name, METHODS)
        if preset.data:
            preset.open(0)  # what is wrong with the data is said before anything is trained
    except (ValueError, FileNotFoundError) as error:
        raise click.UsageError(str(error)) from None
    if not names:
        raise click.UsageError("--methods names no method")
    comparison = Comparison(preset, names, seeds, out)
    comparison.resume()
    _train_all(comparison, device, wandb)
    _show(comparison)


@became.command()
@click.argument("name", required=False)
def presets(name: str | None) -> None:
    """List the benchmarks, or show all settings of the one called NAME."""
    _quiet()
    from became_avalanche.runs.catalogue import BENCHMARKS, find_benchmark
    from became_avalanche.runs.describe import list_presets, show_preset

    try:
        click.echo(list_presets(BENCHMARKS.values()) if name is None else show_preset(find_benchmark(name)))
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@became.command()
@DATA
def data(data: Path) -> None:
    """List the data sets of the benchmarks: which are there and whole, and what to do about the others."""
    _quiet()
    from became_avalanche.runs.catalogue import SOURCES
    from became_avalanche.runs.describe import describe_source

    for source in SOURCES:
        click.echo(describe_source(source, data))


def main() -> None:
    """Entry point: user errors are one line and exit code 2."""
    try:
        sys.exit(became(standalone_mode=False))
    except click.UsageError as error:
        click.echo(f"became: {error.format_message()}", err=True)
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        click.echo("became: interrupted", err=True)
        sys.exit(130)


def _make_writable(folder: Path) -> None:
    probe = folder / ".writable"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise click.UsageError(f"cannot write to {folder}: {error.strerror}; choose another with --out") from None


def _check_device(device: str) -> None:
    import torch

    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise click.UsageError(f"cannot train on --device {device}: {str(error).splitlines()[0]}") from None


def _quiet() -> None:
    """Avalanche warns on import that GEM, which is not used here, lacks a solver."""
    import warnings

    warnings.filterwarnings("ignore", message="no QP solver found")


def _train_all(comparison: Comparison, device: str, wandb: str | None) -> None:
    import torch

    from became_avalanche.runs.progress import Progress
    from became_avalanche.runs.train import train

    if not comparison.preset.data:  # networks are so small that further threads only wait, and numbers depend on them
        torch.set_num_threads(1)
    progress = Progress(comparison)

    def run(method: str, seed: int) -> RunResult:
        progress.begin(method, seed)
        if wandb is None:
            result = train(comparison.preset, method, seed, device=device, plugins=[progress])
        else:
            result = _train_logged(comparison, method, seed, device, wandb, progress)
        progress.end(result)
        return result

    try:
        with progress:
            comparison.run(run)
    except KeyboardInterrupt:
        kept = f"{len(comparison.runs)} finished runs are in {comparison.folder / 'results.json'}"
        click.echo(f"became: interrupted; {kept if comparison.runs else 'no run was finished'}", err=True)
        sys.exit(130)


def _train_logged(
    comparison: Comparison, method: str, seed: int, device: str, project: str, progress: Progress
) -> RunResult:
    """A run that also goes to Weights & Biases."""
    import numpy as np
    from avalanche.evaluation.metrics import loss_metrics

    from became_avalanche.logging.wandb import WandBLogger
    from became_avalanche.runs.figures import run_figure
    from became_avalanche.runs.train import train

    config = {**comparison.settings, "method": method, "seed": seed}
    try:
        logger = WandBLogger(
            project, name=f"{method}-{seed}", group=comparison.preset.name, config=config, directory=comparison.folder
        )
    except RuntimeError as error:
        raise click.UsageError(str(error)) from None
    with logger:
        result = train(
            comparison.preset,
            method,
            seed,
            device=device,
            plugins=[progress],
            loggers=[logger],
            metrics=[loss_metrics(epoch=True)],
        )
        summary = {"ACC": result.acc, **({} if result.bwt is None else {"BWT": result.bwt})}
        logger.log_result(accuracy=np.array(result.accuracy, dtype=float), picture=run_figure(result), summary=summary)
    return result


def _show(comparison: Comparison) -> None:
    """Print the table and the gains, write the files and name them."""
    from became_avalanche.runs.catalogue import untuned
    from became_avalanche.runs.compare import text_gains, text_table
    from became_avalanche.runs.figures import comparison_figure
    from became_avalanche.runs.methods import base_of

    comparison.save()
    comparison.save_table()
    picture = comparison.folder / "comparison.png"
    comparison_figure(comparison).savefig(picture, dpi=150)
    seeds = "one seed" if comparison.seeds == 1 else f"{comparison.seeds} seeds, mean ± standard deviation"
    click.echo(f"\n{comparison.preset.title}, {seeds}\n")
    click.echo(text_table(comparison.rows(), bold=lambda text: click.style(text, bold=True)))
    if comparison.gains():
        click.echo(f"\n{text_gains(comparison.gains())}")
    if names := sorted(untuned(comparison.preset) & set(map(base_of, comparison.methods))):
        click.echo(f"\nStrengths that were not chosen for this benchmark: {', '.join(names)}")
    click.echo(f"\nAll runs: {comparison.folder / 'results.json'}")
    click.echo(f"Table:    {comparison.folder / 'table.csv'}")
    click.echo(f"Picture:  {picture}")

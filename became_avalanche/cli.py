"""The command ``became``: parses arguments, calls the package and prints results.

torch and Avalanche take seconds to import, so this module imports them only in the commands that need them.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from became_avalanche.files import UserError

if TYPE_CHECKING:
    from became_avalanche.results.record import Record
    from became_avalanche.runs.engines import Engine, Outcome
    from became_avalanche.runs.spec import RunSpec
    from became_avalanche.runs.store import Store
    from became_avalanche.runs.study import Study


COMPARISON = "comparison"
"""Name of the study that ``became compare`` creates. Its files have no prefix."""

DATA = click.option(
    "--data", default="data", show_default=True, type=click.Path(path_type=Path), help="Folder of data sets."
)
OUT = click.option("--out", default="runs", show_default=True, type=click.Path(path_type=Path), help="Folder of runs.")


SOURCE = click.argument("source", type=click.Path(path_type=Path, exists=True))


def training_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the options of all commands that train."""
    for option in reversed(
        [
            DATA,
            OUT,
            click.option(
                "--engine",
                default="inline",
                show_default=True,
                type=click.Choice(["inline", "processes", "ray"]),
                help="Where to train: in this process, in local processes, or on a Ray cluster.",
            ),
            click.option(
                "--workers",
                type=click.IntRange(1),
                help="Number of runs at a time, for --engine processes. Default: one per CPU.",
            ),
            click.option("--address", help="Address of a running Ray cluster. Default: start one on this machine."),
            click.option("--wandb", metavar="PROJECT", help="Also log each run to this Weights & Biases project."),
            click.option(
                "--keep",
                default="checkpoint",
                show_default=True,
                type=click.Choice(["checkpoint", "endpoints"]),
                help="endpoints: also keep the three weight vectors of each merge.",
            ),
        ]
    ):
        command = option(command)
    return command


@click.group(
    invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(package_name="became-avalanche")
@click.pass_context
def became(context: click.Context) -> None:
    """Continual learning with gradient projection and Bayesian model merging."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@became.command()
@click.option(
    "--benchmark", default="split-digits", show_default=True, help="Name of a benchmark; `became presets` lists them."
)
@click.option("--methods", help="Comma-separated names. Default: gpm, gpm-2x, gpm+became and baselines.")
@click.option("--tasks", type=click.IntRange(1), help="Number of tasks to train. Default: all.")
@click.option(
    "--epochs", type=click.IntRange(1), help="Maximum number of epochs per stage. Default: as the recipe says."
)
@click.option("--device", default="cpu", show_default=True, help="Device to train on: cpu, cuda, ...")
@click.option("--threads", default=1, show_default=True, type=click.IntRange(1), help="CPU threads per run.")
@click.option("--seeds", default=2, show_default=True, type=click.IntRange(1, 1000), help="Number of seeds.")
@training_options
def compare(
    benchmark: str,
    methods: str | None,
    tasks: int | None,
    epochs: int | None,
    device: str,
    threads: int,
    seeds: int,
    out: Path,
    **options: Any,
) -> None:
    """Train several methods on a benchmark and compare them.

    Prints a table of ACC and BWT. Each run has its own folder in --out, next to table.csv and comparison.png. Finished
    runs are not trained again. Rerun the same command to resume.

    Example: became compare --methods gpm,gpm-2x,gpm+became
    """
    _quiet()
    from became_avalanche.runs.method import COMPARED
    from became_avalanche.runs.spec import validated
    from became_avalanche.runs.study import Study

    names = COMPARED if methods is None else [name.strip() for name in methods.split(",") if name.strip()]
    if not names:
        raise click.UsageError("--methods is empty; give at least one method")
    content = {
        "name": COMPARISON,
        "benchmarks": [benchmark],
        "methods": list(names),
        "seeds": seeds,
        "n_tasks": tasks,
        "max_epochs": epochs,
        "device": device,
        "threads": threads,
    }
    _run_study(validated(Study, content, ""), out, **options)


@became.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--dry-run", is_flag=True, help="Only show what would be trained and how long it may take.")
@training_options
def study(file: Path, dry_run: bool, out: Path, **options: Any) -> None:
    """Train the missing runs of the study in the TOML file FILE, and compare the methods.

    Finished runs are not trained again. Rerun the same command to resume.
    """
    _quiet()
    from became_avalanche.runs.study import Study

    chosen = Study.read(file)
    if dry_run:
        _show_plan(chosen, out, options["workers"] if options["engine"] == "processes" else 1)
    else:
        _run_study(chosen, out, **options)


@became.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@training_options
def run(file: Path, out: Path, **options: Any) -> None:
    """Train one run. Its specification is FILE, the spec.json of a run.

    A finished run in --out is not trained again. To repeat it, choose another folder.
    """
    _quiet()
    from became_avalanche.runs.spec import read_spec

    spec = read_spec(file)
    _run_specs(lambda: [spec], out, show=_show_run, **options)


@became.command()
@click.argument("file", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@OUT
def status(file: Path, out: Path) -> None:
    """Show which runs of the study in the TOML file FILE are done, running, interrupted, failed or missing."""
    _quiet()
    from became_avalanche.runs.store import Store
    from became_avalanche.runs.study import Study, status_of

    statuses = status_of(Study.read(file).specs(), Store(out))
    for status in statuses:
        spec = status.spec
        name = f"{spec.benchmark}, {spec.method.shown}, seed {spec.seed}"
        click.echo(f"{status.state:12} {name}" + (f": {status.note}" if status.note else ""))
    counts = Counter(status.state for status in statuses)
    click.echo(f"\n{len(statuses)} runs: " + ", ".join(f"{number} {state}" for state, number in counts.items()))


@became.command()
@SOURCE
@OUT
@click.option(
    "--file", type=click.Path(path_type=Path, dir_okay=False), help="File to write. Default: next to the runs."
)
def report(source: Path, out: Path, file: Path | None) -> None:
    """Write the results of SOURCE as one HTML page. It opens in any browser, also offline.

    SOURCE is a folder of runs, the folder of one run, or the TOML file of a study.
    """
    from became_avalanche.files import write_atomically
    from became_avalanche.results.report import report as page

    if not source.is_dir():
        _quiet()
    title = source.resolve().name if source.is_dir() else source.stem
    file = file or (source / "report.html" if source.is_dir() else out / f"{title}-report.html")
    records = [record for group in _read_comparisons(source, out) for record in group]
    try:
        write_atomically(file, page(records, title))
    except OSError as error:
        raise UserError(f"cannot write {file}: {error.strerror}; choose another place with --file") from None
    click.echo(f"Report: {file}\nOpen it in a browser: {file.resolve().as_uri()}")


@became.command()
@click.option("--out", default="runs/demo", show_default=True, type=click.Path(path_type=Path), help="Folder of runs.")
@click.pass_context
def demo(context: click.Context, out: Path) -> None:
    """Compare nine methods on digits with three seeds, and write a report. Takes about a minute.

    Nothing is downloaded. Rerun the same command to resume.
    """
    methods = "finetune,ewc,lwf,agem,er,finetune+became,gpm,gpm-2x,gpm+became"
    context.invoke(compare, methods=methods, seeds=3, engine="processes", out=out)
    click.echo()
    context.invoke(report, source=out)


@became.command()
@click.argument("name", required=False)
def presets(name: str | None) -> None:
    """List the benchmarks, or show all settings of the one called NAME."""
    _quiet()
    from became_avalanche.runs.catalogue import BENCHMARKS, find_benchmark
    from became_avalanche.runs.describe import list_benchmarks, show_benchmark

    click.echo(list_benchmarks(BENCHMARKS.values()) if name is None else show_benchmark(find_benchmark(name)))


@became.command()
@DATA
def data(data: Path) -> None:
    """List the data sets of the benchmarks: which are complete, and how to get the others."""
    _quiet()
    from became_avalanche.runs.describe import all_sources, describe_source

    for source in all_sources():
        click.echo(_wrap(describe_source(source, data)))


@became.command("table")
@SOURCE
@OUT
@click.option(
    "--format",
    "form",
    default="text",
    show_default=True,
    type=click.Choice(["text", "markdown", "latex", "csv"]),
    help="Output format. latex needs the package booktabs.",
)
@click.option(
    "--metrics", default="acc,bwt,epochs,seconds", show_default=True, help="Comma-separated names of metrics."
)
def print_table(source: Path, out: Path, form: str, metrics: str) -> None:
    """Print the table of SOURCE: a folder of runs, the folder of one run, or the TOML file of a study.

    Shows mean and standard deviation over seeds, the gains over the baseline and over equal training with their 95 %
    intervals, and the published results of the paper.
    """
    _quiet()
    from became_avalanche.results.tables import gains, table, text_gains

    names = [name.strip() for name in metrics.split(",") if name.strip()]
    try:
        tables = [(records, table(records, names, with_published=True)) for records in _read_comparisons(source, out)]
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    for k, (records, shown) in enumerate(tables):
        title = f"{_title(records)}, {_seeds_text(len({record.seed for record in records}))}"
        click.echo("\n" * (k > 0), nl=False)
        if form != "text":
            text = shown.latex(title) if form == "latex" else shown.csv() if form == "csv" else shown.markdown()
            click.echo(text.rstrip("\n"))
            continue
        styles = {"bold": partial(click.style, bold=True), "underline": partial(click.style, underline=True)}
        click.echo(f"{title}\n\n{shown.text(**styles)}")
        if found := text_gains(gains(records, names[0])):
            click.echo(f"\n{found}")


@became.command()
@SOURCE
@OUT
@click.option("--figure", help="Name of a figure; `--figure list` lists them. Default: all that can be drawn.")
@click.option("--to", type=click.Path(path_type=Path), help="Folder to write to. Default: figures, next to the runs.")
@click.option(
    "--task", type=click.IntRange(2), help="Task of the merge (path, landscape). Default: the first that was kept."
)
@click.option(
    "--samples", default=500, show_default=True, type=click.IntRange(1), help="Samples per task (path, landscape)."
)
@DATA
def plot(source: Path, out: Path, figure: str | None, to: Path | None, **options: Any) -> None:
    """Draw the figures of SOURCE: a folder of runs, the folder of one run, or the TOML file of a study.

    Each figure is written as PDF and PNG. The figures path and landscape show the loss around the weights of a merge.
    They need runs that were trained with --keep endpoints. Their measurements are saved next to the record and used
    again.
    """
    _quiet()
    from became_avalanche.files import look_up
    from became_avalanche.results.figures import FIGURES, SCANS, NothingToDrawError, save_figure

    known = {**{name: named.title for name, named in FIGURES.items()}, **SCANS}
    if figure == "list":
        for name, title in known.items():
            click.echo(f"{name:13} {title}")
        return
    if figure is not None:
        try:
            look_up("figure", figure, known)
        except ValueError as error:
            raise click.UsageError(str(error)) from None
    alone = (source / "record.json").exists()
    root = source.parent if alone else source if source.is_dir() else out
    folder = to or (source if source.is_dir() else out) / "figures"
    written, problems = [], []
    groups = _read_comparisons(source, out)
    for k, records in enumerate(groups):
        prefix = "" if len(groups) == 1 else f"{k + 1}-{records[0].benchmark}-"
        for name in [figure] if figure else known:
            try:
                drawn = (
                    {name: FIGURES[name].draw(records)}
                    if name in FIGURES
                    else _draw_scans(name, records, root, measure=figure is not None, **options)
                )
            except NothingToDrawError as error:
                problems.append(f"{name} of {records[0].benchmark}: {error}")
                continue
            except ValueError as error:
                raise click.UsageError(str(error)) from None
            folder.mkdir(parents=True, exist_ok=True)
            for stem, image in drawn.items():
                written += save_figure(image, folder / f"{prefix}{stem}")
    for path in written:
        click.echo(path)
    for problem in problems:
        click.echo(f"became: not drawn: {problem}", err=True)
    if not written:
        sys.exit(2)


def main() -> None:
    """Run the command. User errors are one line and exit code 2. Modules in the working directory can be imported."""
    sys.path.append(str(Path.cwd()))
    try:
        sys.exit(became(standalone_mode=False))
    except click.UsageError as error:
        _fail(error.format_message())
    except (click.Abort, KeyboardInterrupt):
        click.echo("became: interrupted", err=True)
        sys.exit(130)
    except UserError as error:
        _fail(str(error))


def _fail(message: str) -> None:
    click.echo(f"became: {message}", err=True)
    sys.exit(2)


def _check_device(device: str) -> None:
    import torch

    try:
        torch.ones(1, device=device).item()  # the device "meta" creates tensors, but they have no values
    except (RuntimeError, AssertionError, NotImplementedError):
        backends = {"cuda": torch.cuda, "mps": torch.backends.mps, "xpu": torch.xpu}
        available = ["cpu", *(name for name, backend in backends.items() if backend.is_available())]
        raise click.UsageError(f"cannot train on --device {device}; available: {', '.join(available)}") from None


def _check_wandb() -> None:
    """Raise an error before training starts if nobody is logged in. On a terminal, wandb asks for the key once."""
    import os

    import wandb

    if os.environ.get("WANDB_MODE") in ("offline", "disabled", "dryrun"):
        return
    try:
        wandb.login(verify=False)
    except wandb.errors.UsageError:
        advice = "run `wandb login`, or set WANDB_MODE=offline to write the logs into the folders of the runs"
        raise click.UsageError(f"--wandb needs a login to Weights & Biases: {advice}") from None


def _wrap(text: str) -> str:
    """Wrap lines that are too long for the terminal, and keep their indent."""
    import shutil
    import textwrap

    wrapper = textwrap.TextWrapper(
        shutil.get_terminal_size().columns - 1, break_long_words=False, break_on_hyphens=False
    )
    lines = []
    for line in text.splitlines():
        wrapper.initial_indent = wrapper.subsequent_indent = line[: len(line) - len(line.lstrip())]
        lines += wrapper.wrap(line.strip())
    return "\n".join(lines)


def _quiet() -> None:
    """Ignore a warning of Avalanche's import: GEM, which is not used here, has no solver."""
    import warnings

    warnings.filterwarnings("ignore", message="no QP solver found")


def _read_comparisons(source: Path, out: Path) -> list[list[Record]]:
    """Read the records of a folder of runs, of one run or of a study, in groups that can be compared.

    :param source: the folder, or the TOML file of the study.
    :param out: the folder of the runs of a study.
    """
    from became_avalanche.results.record import read_record, read_records
    from became_avalanche.results.tables import comparisons, in_families, in_order

    if source.is_dir():
        alone = source / "record.json"
        records = [read_record(alone)] if alone.exists() else in_families(read_records(source))
    else:
        from became_avalanche.runs.store import Store
        from became_avalanche.runs.study import Study, records_of

        study = Study.read(source)
        records = in_order(records_of(study.specs(), Store(out)), study.labels())
    if not records:
        raise click.UsageError(
            f"no records of runs found in {source}" if source.is_dir() else f"no records of {source} found in {out}"
        )
    return comparisons(records)


def _draw_scans(
    name: str, records: Sequence[Record], root: Path, measure: bool, task: int | None, samples: int, data: Path
) -> dict[str, Any]:
    """Draw the figures around the merges of each run, by file name. Saved measurements are used again.

    :param root: the folder of the runs.
    :param measure: whether to measure now if there are no saved measurements (of ``task``, if given).
    """
    from became_avalanche.files import write_atomically
    from became_avalanche.results.figures import NothingToDrawError, landscape_figure, path_figure
    from became_avalanche.results.scans import Landscape, PathScan, read_scans

    kind: Any = PathScan if name == "path" else Landscape
    drawn = {}
    for record in (record for record in records if record.merges):
        folder = root / record.key
        scans = [scan for scan in read_scans(kind, folder) if task in (None, scan.t)]
        if not scans and measure and (kept := sorted(folder.glob("endpoints-*.safetensors"))):
            from became_avalanche.analysis.endpoints import measure_landscape, open_merge, scan_kept_path

            t = task or int(kept[0].stem.removeprefix("endpoints-"))
            measured: Any = scan_kept_path if name == "path" else measure_landscape
            scans = [measured(open_merge(folder, t, data), n_samples=samples)]
            write_atomically(kind.path(folder, t), scans[0].to_json())
        stem = name if sum(bool(other.merges) for other in records) == 1 else f"{name}-{record.label}-seed{record.seed}"
        if scans:
            drawn[stem] = path_figure(scans) if name == "path" else landscape_figure(scans[0])
    if not drawn:
        how = "train with --keep endpoints" if measure else f"measure it with --figure {name}"
        raise NothingToDrawError(f"no run has measurements around a merge; {how}")
    return drawn


# ----------------------------------------------------------------------------------------------------------- studies


def _run_study(study: Study, out: Path, **options: Any) -> None:
    """Train the missing runs of a study and print the tables."""
    group = None if study.name == COMPARISON else study.name
    _run_specs(study.specs, out, show=lambda specs, store: _show_study(study, specs, store), group=group, **options)


def _run_specs(
    make_specs: Callable[[], Sequence[RunSpec]],
    out: Path,
    data: Path,
    engine: str,
    workers: int | None,
    address: str | None,
    wandb: str | None,
    keep: Any,
    show: Callable[[Sequence[RunSpec], Store], None],
    group: str | None = None,
) -> None:
    """Train the missing runs and show the results."""
    chosen_engine = _make_engine(engine, workers, address)  # first, because it may import torch in another process
    from became_avalanche.runs.progress import Progress
    from became_avalanche.runs.run import Local
    from became_avalanche.runs.store import Store
    from became_avalanche.runs.study import missing, status_of

    specs, store = make_specs(), Store(out)
    store.make_writable()
    statuses = status_of(specs, store)
    for status in statuses:
        if status.state == "unreadable":
            click.echo(f"became: {status.note}; this run is skipped", err=True)
    wanted = missing(statuses)
    if wanted:
        _check_specs(wanted, data)
        if wandb is not None:
            _check_wandb()
    local = Local(data=data, keep=keep, wandb=wandb, group=group)
    outcomes: list[Outcome] = []
    try:
        with Progress({spec.key(): spec for spec in wanted}, done=len(specs) - len(wanted)) as progress:
            for outcome in chosen_engine.run(wanted, store, local, progress):
                progress.finished(outcome.spec.key(), outcome.record, outcome.problem)
                outcomes.append(outcome)
    except KeyboardInterrupt:
        ended = [outcome for outcome in outcomes if outcome.record is not None and outcome.record.finished]
        finished = len(specs) - len(wanted) + len(ended)
        click.echo(
            f"became: interrupted; {finished} of {len(specs)} runs are finished in {out}. Rerun the same command to "
            "resume.",
            err=True,
        )
        sys.exit(130)
    show(specs, store)
    problems = [outcome for outcome in outcomes if outcome.record is None or outcome.record.status != "done"]
    if any(outcome.record is None or outcome.record.status == "failed" for outcome in problems):
        click.echo("\nSome runs failed. Rerun the same command to try them again.", err=True)
        sys.exit(1)


def _check_specs(specs: Sequence[RunSpec], data: Path) -> None:
    """Report errors in methods, device and data before training starts."""
    from became_avalanche.runs.session import open_stream

    for device in {spec.device for spec in specs}:
        _check_device(device)
    for spec in {(spec.benchmark, spec.method.shown): spec for spec in specs}.values():
        spec.check()
    for spec in {spec.stream.name: spec for spec in specs if spec.stream.reads_files}.values():
        open_stream(spec, data)


def _make_engine(name: str, workers: int | None, address: str | None) -> Engine:
    from became_avalanche.runs.engines import Inline, Processes, Ray

    if workers is not None and name != "processes":
        raise click.UsageError("--workers needs --engine processes")
    if address is not None and name != "ray":
        raise click.UsageError("--address needs --engine ray")
    if name == "inline":
        return Inline()
    return Processes(workers) if name == "processes" else Ray(address)


def _show_plan(study: Study, out: Path, workers: int | None) -> None:
    """Print the missing runs, with an estimate of their time from finished runs."""
    import os

    from became_avalanche.runs.progress import duration
    from became_avalanche.runs.store import Store
    from became_avalanche.runs.study import estimate, missing, status_of

    store = Store(out)
    statuses = status_of(study.specs(), store)
    wanted = missing(statuses)
    for spec in wanted:
        spec.check()
    seconds = estimate(wanted, store.records())
    for spec in wanted:
        guess = seconds[spec.key()]
        name = f"{spec.benchmark}, {spec.method.shown}, seed {spec.seed}"
        click.echo(f"{name}: " + ("no estimate" if guess is None else f"about {duration(guess)}"))
    known = [value for value in seconds.values() if value is not None]
    total = f", about {duration(sum(known) / (workers or os.cpu_count() or 1))}" if known else ""
    unknown = f" and {len(wanted) - len(known)} runs without estimate" if known and len(known) < len(wanted) else ""
    click.echo(f"{len(wanted)} of {len(statuses)} runs to train{total}{unknown}")


def _show_run(specs: Sequence[RunSpec], store: Store) -> None:
    """Print the result of a single run, and its folder."""
    from became_avalanche.results.tables import table
    from became_avalanche.runs.study import records_of

    if records := records_of(specs, store):
        click.echo(f"\n{_title(records)}, seed {records[0].seed}\n\n{table(records).text()}")
        click.echo(f"\nRun: {store.root / records[0].key}")


def _show_study(study: Study, specs: Sequence[RunSpec], store: Store) -> None:
    """Print table and gains of each benchmark, write CSV and figure, and print the names of the files."""
    from became_avalanche.results.tables import gains, table, text_gains
    from became_avalanche.runs.study import records_of

    for name in study.benchmarks:
        records = records_of([spec for spec in specs if spec.benchmark == name], store)
        if not records:
            continue
        records = [record for label in study.labels() for record in records if record.label == label]
        shown = table(records)
        click.echo(f"\n{_title(records)}, {_seeds_text(len(study.seeds))}\n")
        click.echo(shown.text(bold=lambda text: click.style(text, bold=True)))
        if found := text_gains(gains(records)):
            click.echo(f"\n{found}")
        _warn_untuned(name, specs)
        _write_files(study, name, records, shown.csv(), store.root)


def _seeds_text(number: int) -> str:
    return "one seed" if number == 1 else f"{number} seeds, mean ± standard deviation"


def _title(records: Sequence[Record]) -> str:
    from became_avalanche.results.tables import longest_budget

    budget = longest_budget(records)
    return records[0].benchmark + (f" ({budget})" if budget else "")


def _warn_untuned(name: str, specs: Sequence[RunSpec]) -> None:
    from became_avalanche.runs.catalogue import find_benchmark

    benchmark = find_benchmark(name)
    methods = [spec.method for spec in specs if spec.benchmark == name]
    used = {method.settings for method in methods if method.options == benchmark.hyperparameters.get(method.settings)}
    if names := sorted(benchmark.untuned & used):
        click.echo(f"\nMethods with untuned default hyperparameters on this benchmark: {', '.join(names)}")


def _write_files(study: Study, benchmark: str, records: Sequence[Record], csv: str, root: Path) -> None:
    import io

    from became_avalanche.files import write_atomically
    from became_avalanche.results.figures import comparison_figure

    prefix = "" if study.name == COMPARISON else f"{study.name}-"
    prefix += f"{benchmark}-" if len(study.benchmarks) > 1 else ""
    write_atomically(root / f"{prefix}table.csv", csv)
    picture = io.BytesIO()
    title = _title(records)
    comparison_figure(records, title if title != benchmark else "").savefig(picture, dpi=150)
    write_atomically(root / f"{prefix}comparison.png", picture.getvalue())
    click.echo(f"\nRuns:   {root}")
    click.echo(f"Table:  {root / f'{prefix}table.csv'}")
    click.echo(f"Figure: {root / f'{prefix}comparison.png'}")

"""Generate the tables and figures of README.md and docs/ from the records in experiments/results/runs.

    make tables

Two marks in a page enclose each table. Everything between them is replaced:

    <!-- table: experiments/studies/split-digits.toml -->
    <!-- end -->

``TABLES`` lists the kinds of tables. Each study has a figure, experiments/results/figures/<study>.png, and ``PICTURES``
lists the figures in docs/figures.md.
"""

from __future__ import annotations

import io
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean

from matplotlib.figure import Figure
from PIL import Image

from became_avalanche.files import look_up, write_atomically
from became_avalanche.results.figures import FIGURES as FIGURES_OF_RECORDS
from became_avalanche.results.figures import comparison_figure, landscape_figure, path_figure
from became_avalanche.results.metrics import METRICS
from became_avalanche.results.record import Record, read_records, with_joint
from became_avalanche.results.scans import Landscape, PathScan, read_scan, read_scans
from became_avalanche.results.statistics import Spread
from became_avalanche.results.tables import FORMATS, Gain, budget, gains, gains_over, in_families, in_order, table
from became_avalanche.runs.catalogue import BENCHMARKS
from became_avalanche.runs.store import Store
from became_avalanche.runs.study import Study, status_of

ROOT = Path(__file__).parents[1]
STUDIES = sorted((ROOT / "experiments" / "studies").glob("*.toml"))
RUNS = Store(ROOT / "experiments" / "results" / "runs")
FIGURES = ROOT / "experiments" / "results" / "figures"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKED = re.compile(r"(?P<start><!-- (?P<kind>[a-z]+): (?P<source>\S+) -->\n).*?(?P<end><!-- end -->)", re.DOTALL)


@cache
def records_in(study: Path) -> list[Record]:
    """Return the records of a study in the order of its methods. Raises a ValueError if one is missing or not done."""
    content = Study.read(study)
    statuses = status_of(content.specs(), RUNS)
    records = []
    for status in statuses:
        if status.record is None or status.state != "done":
            raise ValueError(f"{study.name} is incomplete: {status.spec.key()} is {status.state}; {status.note}")
        records.append(status.record.model_copy(update={"label": status.spec.method.shown}))
    shown = content.labels()
    return in_order([record for record in with_joint(records) if record.label in shown], shown)


def comparison(study: Path) -> str:
    """Return ACC and BWT of all methods, and the gains over baseline and control."""
    return _with_references(records_in(study))


def _with_references(records: Sequence[Record]) -> str:
    found = gains(records)
    columns = {
        heading: [gain for gain in found if gain.kind == kind]
        for heading, kind in (("over the method alone", "baseline"), ("over equal training", "control"))
    }
    return _with_gains(records, ("acc", "bwt", "epochs"), columns)


def trials(study: Path) -> str:
    """Return the validation accuracy of all variants of the merge, and their gains over BECAME and equal training."""
    records = records_in(study)
    columns = {
        "over became": gains_over(records, "became", "valid_acc"),
        "over equal training": gains_over(records, "gpm-2x", "valid_acc"),
    }
    return _with_gains(records, ("valid_acc", "acc", "epochs"), columns)


def choices(study: Path) -> str:
    """Return the validation accuracy of all settings of the merge, and their gains over the first setting."""
    records = records_in(study)
    first = next(record.label for record in records if "+" in record.method)
    columns = {f"over *{first}*": gains_over(records, first, "valid_acc")}
    return _with_gains(records, ("valid_acc", "acc", "bwt", "coefficient", "epochs"), columns)


def _with_gains(records: Sequence[Record], metrics: Sequence[str], columns: Mapping[str, Sequence[Gain]]) -> str:
    """Return a table of metrics, with columns of gains after the first metric, and of seeds if their numbers differ."""
    shown = table(records, metrics)
    of_label = {heading: {gain.label: gain.short() for gain in own} for heading, own in columns.items() if own}
    values = [metric.heading for metric in shown.metrics]
    seeds = ["seeds"] if len({row.runs for row in shown.rows}) > 1 else []
    rows = []
    for row in shown.rows:
        first, *others = [FORMATS[metric.unit].cell(row.values[metric.name]) for metric in shown.metrics]
        own = [of_label[heading].get(row.label, "") for heading in of_label]
        cells = [cell.replace(" ", "\N{NO-BREAK SPACE}") for cell in (first, *own, *others)]
        rows.append([row.label, *(str(row.runs) for _ in seeds), *cells])
    return _markdown(["method", *seeds, values[0], *of_label, *values[1:]], rows)


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def summary(studies: Path) -> str:
    """Return the gains of BECAME in the studies ``SUMMARY``: one row per method, of the first study that has it."""
    rows: dict[tuple[str, str], dict[str, Gain]] = {}
    for stem in SUMMARY:
        records = records_in(studies / f"{stem}.toml")
        scaled = budget(records[0].spec)
        data = f"{records[0].benchmark}, {scaled}" if scaled else records[0].benchmark
        for gain in gains(records):
            if gain.label.endswith("+became"):
                rows.setdefault((data, gain.label), {}).setdefault(gain.kind, gain)
    lines = []
    for (data, label), own in rows.items():
        over = [own[kind].short().replace(" ", "\N{NO-BREAK SPACE}") for kind in ("baseline", "control")]
        lines.append([data, label.removesuffix("+became"), str(own["control"].paired.gain.n), *over])
    return _markdown(["benchmark", "method", "seeds", "over the method alone", "over equal training"], lines)


SUMMARY = (
    "10-split-cifar100-cpu-ten",
    "cifar100-superclass",
    "cifar100-superclass-scrambled",
    "permuted-digits-gpm-20",
    "permuted-digits-nscl-20",
    "permuted-digits-family",
    "split-digits-gpm-20",
    "split-digits-nscl-20",
    "split-digits-family",
)
"""The studies of ``summary``. If two have the same method, the first one counts, which has more seeds."""


PUBLISHED = ("10-split-cifar100-cpu-ten", "cifar100-superclass-scrambled")
"""The studies of ``reported``."""


def reported(studies: Path) -> str:
    """Return ACC and BWT of the methods in the studies ``PUBLISHED`` that the paper has results for, next to these.

    The rows of a method come from the first study that has it.
    """
    rows: dict[tuple[str, str], list[list[str]]] = {}
    for stem in PUBLISHED:
        records = records_in(studies / f"{stem}.toml")
        shown = table(records, ("acc", "bwt"), with_published=True)
        for row in shown.rows:
            lines = []
            for metric in shown.metrics:
                ours, paper = row.values[metric.name], row.published.get(metric.name)
                if ours is not None and paper is not None:
                    style = FORMATS[metric.unit]
                    cells = [style.cell(ours), style.cell(paper), difference(ours, paper)]
                    cells = [cell.replace(" ", "\N{NO-BREAK SPACE}") for cell in cells]
                    lines.append([records[0].benchmark, row.label, metric.heading, *cells, shown.difference])
            rows.setdefault((records[0].benchmark, row.label), lines)
    headings = ["benchmark", "method", "metric", "ours", "paper", "difference", "ours differs in"]
    return _markdown(headings, [line for lines in rows.values() for line in lines])


def difference(ours: Spread, paper: Spread) -> str:
    """Return the difference in points, such as ``+1.38 (2.1 sd)``: in brackets, in the paper's standard deviations."""
    points = f"{100 * (ours.mean - paper.mean):+.2f}"
    return points if not paper.std else f"{points} ({abs(ours.mean - paper.mean) / paper.std:.1f} sd)"


def paths(scans: Path) -> str:
    """Return the coefficients of all estimators on each path."""
    from experiments.paths import table

    return _block(table(json.loads(scans.read_text())))


def records_in_folder(folder: Path) -> list[Record]:
    """Return the records of a folder of runs. Each control and merge stands after its method."""
    return in_families(read_records(folder))


def runs(folder: Path) -> str:
    """Return ACC and BWT of the runs in a folder, and their gains."""
    return _with_references(records_in_folder(folder))


def merges(prefix: Path) -> str:
    """Return the ways to merge on the same trainings. The mark names the files without ``.seed0.json`` and so on."""
    from experiments.merges import table

    files = sorted(prefix.parent.glob(f"{prefix.name}.seed*"))
    if not files:
        raise ValueError(f"no files {prefix.name}.seed*.json in {prefix.parent}")
    return _block(table([json.loads(path.read_text()) for path in files]))


def stages(source: Path) -> str:
    """Return the training losses between the stages of each method that has two, as means over tasks and seeds.

    The last column counts the tasks in which the first epoch of stage 2 has a higher loss than the first epoch of
    stage 1. The source is a study or a folder of runs.
    """
    losses: dict[str, list[list[list[float]]]] = {}
    for record in records_in(source) if source.is_file() else records_in_folder(source):
        losses.setdefault(record.label, []).extend(
            [stage.training_loss for stage in task.stages] for task in record.tasks if len(task.stages) == 2
        )
    lines = []
    for label, tasks in losses.items():
        if tasks:
            columns = ((one[-1] for one, _ in tasks), (two[0] for _, two in tasks), (two[-1] for _, two in tasks))
            above = sum(two[0] > one[0] for one, two in tasks)
            means = [f"{fmean(column):.2f}" for column in columns]
            lines.append([label, *means, f"{above} of {len(tasks)} tasks"])
    epochs = ["stage 1, last epoch", "stage 2, first epoch", "stage 2, last epoch"]
    return _markdown(["method", *epochs, "above stage 1, first epoch"], lines)


def jumps(study: Path) -> str:
    """Return how far stage 2 moves the parameters, and what the merges forget in which its training loss jumped.

    A merge counts as such if the mean training loss of an epoch of stage 2 is above ``JUMP``. Its part of BWT is the
    change of the accuracy of earlier tasks over its task. The parts of all tasks add up to BWT.
    """
    runs: dict[str, list[Record]] = {}
    for record in records_in(study):
        if record.merges:
            runs.setdefault(record.label, []).append(record)
    lines = []
    for label, own in runs.items():
        lengths = [merge.delta_norm for record in own for merge in record.merges]
        losses = [task.stages[1].training_loss for record in own for task in record.tasks[1:]]
        changes = [change for record in own for change in _changes(record)]
        jumped = ["–"] * 3
        if all(losses):
            parts = [change for loss, change in zip(losses, changes, strict=True) if max(loss) > JUMP]
            jumped = [f"{max(map(max, losses)):.2f}", f"{len(parts)} of {len(changes)}", _points(sum(parts) / len(own))]
        bwt = _points(sum(changes) / len(own))
        lines.append([label, f"{fmean(lengths):.2f}", f"{max(lengths):.2f}", *jumped, bwt])
    norms = ["‖Δ‖, mean", "‖Δ‖, largest"]
    return _markdown(["method", *norms, "highest loss", f"merges above {JUMP}", "their part of BWT %", "BWT %"], lines)


JUMP = 0.2


def _changes(record: Record) -> list[float]:
    """Return the part of each task, from the second on, in BWT."""
    rows = record.accuracy["test"]
    return [sum(rows[t][i] - rows[t - 1][i] for i in range(t)) / (len(rows) - 1) for t in range(1, len(rows))]


def _points(change: float) -> str:
    return FORMATS[METRICS["bwt"].unit].number(change, "+")


def barrier(folder: Path) -> str:
    """Return the paths of all variants in a folder."""
    from experiments.barrier import VARIANTS, table

    seeds = sorted({path.name.split(".")[1] for path in folder.glob("*.json")})
    files = [folder / f"{variant}.{seed}.json" for seed in seeds for variant in VARIANTS]
    return table({path.stem: read_scan(PathScan, path) for path in files if path.exists()})


def memory(sizes: Path) -> str:
    """Return the memory that each method holds between tasks."""
    from experiments.memory import table

    return table(json.loads(sizes.read_text()))


def layers(drift: Path) -> str:
    """Return the drift of layer outputs."""
    from experiments.layers import table

    return table(json.loads(drift.read_text()))


def benchmarks(catalogue: Path) -> str:
    """Return the list of benchmarks in the catalogue."""
    from became_avalanche.runs.describe import list_benchmarks

    return _block(list_benchmarks(BENCHMARKS.values()))


def _block(*parts: str) -> str:
    """Return a Markdown code block of the parts, separated by empty lines."""
    return "```\n" + "\n\n".join(parts) + "\n```"


TABLES: dict[str, Callable[[Path], str]] = {
    "table": comparison,
    "reported": reported,
    "trials": trials,
    "choices": choices,
    "summary": summary,
    "paths": paths,
    "runs": runs,
    "merges": merges,
    "stages": stages,
    "jumps": jumps,
    "barrier": barrier,
    "memory": memory,
    "layers": layers,
    "benchmarks": benchmarks,
}
"""Kind of table -> function that makes it from the file named in the mark."""


def regenerated(page: str) -> str:
    """Return the text of a page with all tables regenerated."""

    def replace(match: re.Match[str]) -> str:
        text = look_up("kind of table", match["kind"], TABLES)(ROOT / match["source"])
        return f"{match['start']}{text}\n{match['end']}"

    return MARKED.sub(replace, page)


def draw(study: Path) -> None:
    """Draw the comparison figure of a study."""
    records = records_in(study)
    scaled = budget(records[0].spec)
    title = f"{records[0].benchmark} ({scaled})" if scaled else ""
    FIGURES.mkdir(exist_ok=True)
    _save(comparison_figure(records, title), FIGURES / f"{study.stem}.png", dpi=150)


def _save(figure: Figure, path: Path, dpi: int) -> None:
    """Save a figure with 256 colours, which reduces the file to a third of its size."""
    figure.savefig(content := io.BytesIO(), dpi=dpi)
    Image.open(content).convert("RGB").quantize(256).save(path, optimize=True)


PICTURES = {
    "split-digits": ("training", "matrix", "average", "final", "bwt_im", "coefficients", "path", "landscape"),
    "10-split-cifar100-cpu": ("training", "matrix", "average", "final", "coefficients"),
    "figures-cifar100": ("losses", "aoa", "ranks", "costs", "path", "landscape"),
}
"""Study -> the figures in docs/figures.md that are drawn from its records."""


def pictures(folder: Path) -> Iterator[tuple[Path, str, Path]]:
    """Yield the file, the name and the study of each figure in docs/figures.md."""
    for stem, names in PICTURES.items():
        benchmark = next(name for name in ("cifar100", "digits") if name in stem)
        for name in names:
            yield folder / benchmark / f"{name}.png", name, ROOT / "experiments" / "studies" / f"{stem}.toml"


def draw_pictures(folder: Path) -> None:
    """Draw the figures in docs/figures.md."""
    for path, name, study in pictures(folder):
        records = records_in(study)
        folders = [RUNS.root / record.key for record in records if record.merges]
        if name == "path":
            figure = path_figure([scan for own in folders for scan in read_scans(PathScan, own)])
        elif name == "landscape":
            figure = landscape_figure(next(scan for own in folders for scan in read_scans(Landscape, own)))
        else:
            figure = FIGURES_OF_RECORDS[name].draw(records)
        path.parent.mkdir(parents=True, exist_ok=True)
        _save(figure, path, dpi=110)


def main() -> None:
    """Regenerate all tables and figures."""
    warnings.filterwarnings("ignore", message="no QP solver found")
    try:
        for page in PAGES:
            text = page.read_text()
            if (new := regenerated(text)) != text:
                write_atomically(page, new)
                print(f"changed: {page.relative_to(ROOT)}")
        for study in STUDIES:
            draw(study)
        draw_pictures(ROOT / "docs" / "figures")
    except ValueError as error:
        sys.exit(f"tables: {error}")


if __name__ == "__main__":
    main()

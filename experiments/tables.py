"""Write the tables and figures of README.md and docs/ anew from the records in experiments/results/runs.

    make tables

A page marks the place of a table, and everything between the two marks is replaced:

    <!-- table: experiments/studies/split-digits.toml -->
    <!-- end -->

``TABLES`` lists the kinds of tables. Each study has a figure, experiments/results/figures/<study>.png, and ``PICTURES``
lists the figures of docs/figures.md.
"""

from __future__ import annotations

import io
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from PIL import Image

from became_avalanche.files import look_up, write_atomically
from became_avalanche.results.figures import FIGURES as FIGURES_OF_RECORDS
from became_avalanche.results.figures import comparison_figure, landscape_figure, path_figure
from became_avalanche.results.record import Record, with_joint
from became_avalanche.results.scans import Landscape, PathScan, read_scans
from became_avalanche.results.tables import budget, gains, gains_over, in_order, table, text_gains
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
    """The records of a study in the order of its methods; raises a ValueError if one is missing or not done."""
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
    """ACC and BWT of all methods, and the gains over baseline and control."""
    records = records_in(study)
    return _block(table(records).text(), text_gains(gains(records)))


def trials(study: Path) -> str:
    """Validation accuracy of all variants of the merge, and their gains over the paper's and over equal training."""
    records = records_in(study)
    over = [text_gains(gains_over(records, label, "valid_acc")) for label in ("became", "gpm-2x")]
    return _block(table(records, ("valid_acc", "acc", "epochs")).text(), *over)


def choices(study: Path) -> str:
    """Validation accuracy of all settings of the merge, and their gains over the first of them."""
    records = records_in(study)
    first = next(record.label for record in records if "+" in record.method)
    over = text_gains(gains_over(records, first, "valid_acc"))
    return _block(table(records, ("valid_acc", "acc", "bwt", "coefficient", "epochs")).text(), over)


def gained(study: Path) -> str:
    """What BECAME gains over each method, and over equal training."""
    became = [gain for gain in gains(records_in(study)) if gain.label.endswith("+became")]
    return _block(text_gains(became))


def paths(scans: Path) -> str:
    """The coefficients of all estimators on each path."""
    from experiments.paths import table

    return _block(table(json.loads(scans.read_text())))


def memory(sizes: Path) -> str:
    """What each method holds between tasks."""
    from experiments.memory import table

    return table(json.loads(sizes.read_text()))


def layers(drift: Path) -> str:
    """How far the outputs of layers move."""
    from experiments.layers import table

    return table(json.loads(drift.read_text()))


def benchmarks(catalogue: Path) -> str:
    """The benchmarks of the catalogue."""
    from became_avalanche.runs.describe import list_benchmarks

    return _block(list_benchmarks(BENCHMARKS.values()))


def _block(*parts: str) -> str:
    """A code block of parts with an empty line between them."""
    return "```\n" + "\n\n".join(parts) + "\n```"


TABLES: dict[str, Callable[[Path], str]] = {
    "table": comparison,
    "trials": trials,
    "choices": choices,
    "gains": gained,
    "paths": paths,
    "memory": memory,
    "layers": layers,
    "benchmarks": benchmarks,
}
"""Kind of table -> function of the file that the mark names."""


def rewritten(page: str) -> str:
    """The text of a page with all of its tables made anew."""

    def replace(match: re.Match[str]) -> str:
        text = look_up("kind of table", match["kind"], TABLES)(ROOT / match["source"])
        return f"{match['start']}{text}\n{match['end']}"

    return MARKED.sub(replace, page)


def draw(study: Path) -> None:
    """Draw the figure of a study."""
    records = records_in(study)
    scaled = budget(records[0].spec)
    title = f"{records[0].benchmark} ({scaled})" if scaled else ""
    FIGURES.mkdir(exist_ok=True)
    comparison_figure(records, title).savefig(FIGURES / f"{study.stem}.png", dpi=150)


PICTURES = {
    "split-digits": ("training", "matrix", "average", "final", "bwt_im", "coefficients", "path", "landscape"),
    "10-split-cifar100-cpu": ("training", "matrix", "average", "final", "coefficients"),
    "figures-cifar100": ("losses", "aoa", "ranks", "costs", "path", "landscape"),
}
"""Study -> the figures of docs/figures.md that are made of its records."""


def pictures(folder: Path) -> Iterator[tuple[Path, str, Path]]:
    """The file, the name and the study of each figure of docs/figures.md."""
    for stem, names in PICTURES.items():
        benchmark = "cifar100" if "cifar100" in stem else "digits"
        for name in names:
            yield folder / benchmark / f"{name}.png", name, ROOT / "experiments" / "studies" / f"{stem}.toml"


def draw_pictures(folder: Path) -> None:
    """Draw the figures of docs/figures.md."""
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
        figure.savefig(content := io.BytesIO(), dpi=110)
        Image.open(content).convert("RGB").quantize(256).save(path, optimize=True)  # a third of the size


def main() -> None:
    """Write all tables and figures anew."""
    warnings.filterwarnings("ignore", message="no QP solver found")
    try:
        for page in PAGES:
            text = page.read_text()
            if (new := rewritten(text)) != text:
                write_atomically(page, new)
                print(f"changed: {page.relative_to(ROOT)}")
        for study in STUDIES:
            draw(study)
        draw_pictures(ROOT / "docs" / "figures")
    except ValueError as error:
        sys.exit(f"tables: {error}")


if __name__ == "__main__":
    main()

"""Measure the speed of the package, print a table, and write it to measured.json next to this file.

    python experiments/speed/table.py [--quick] [--data FOLDER] [--reference FOLDER] [--only projection ...] [--docs]

Each file listed in MODULES has a function ``rows(quick)``. A new row replaces the stored row with the same name. Ratios
are medians of CPU time over interleaved repeats, in one process with one thread, unless a note says otherwise. With
``--reference`` the authors' codes are measured; reference.py says what that folder must contain.
"""

import argparse
import json
import warnings
from collections.abc import Iterable
from dataclasses import asdict
from importlib import import_module
from inspect import signature
from pathlib import Path

import rows as speed
import torch
from rows import Row

MODULES = (
    "projection",
    "memory_update",
    "trgp",
    "merge_share",
    "many_tasks",
    "networks",
    "compiled",
    "pipeline",
    "startup",
)
REFERENCE = "reference"
RESULTS = Path(__file__).with_name("measured.json")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer tasks and repeats; write nothing")
    parser.add_argument("--data", type=Path, help="folder with cifar-100-python; random images without it")
    parser.add_argument("--reference", type=Path, help="folder with the authors' codes, to compare with")
    parser.add_argument("--only", nargs="+", choices=MODULES, help="measure only these; keep all other rows")
    parser.add_argument("--docs", action="store_true", help="only write the table of measured.json into docs")
    arguments = parser.parse_args()
    if arguments.docs:
        write_docs()
        return
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    speed.DATA = arguments.data
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    chosen = list(arguments.only or ([] if arguments.reference else MODULES))
    for name in chosen + [REFERENCE] * (arguments.reference is not None):
        module = import_module(name)
        takes = signature(module.rows).parameters
        given = {"data": arguments.data, "folder": arguments.reference}
        options = {key: value for key, value in given.items() if key in takes and value is not None}
        known = {row["what"]: row for row in results.get(name, [])}
        for row in module.rows(arguments.quick, **options):
            print(line(row), flush=True)
            known[row.what] = asdict(row)
            results[name] = list(known.values())
            if not arguments.quick:  # after each row, since the whole table takes long
                ordered = {key: results[key] for key in (*MODULES, REFERENCE) if key in results}
                RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


def line(row: Row) -> str:
    """Return a row as a line of the Markdown table."""
    return f"| {row.what} | {row.value:.4g} | {row.goal} | {'yes' if row.met else '**no**'} | {row.note} |"


def write_docs() -> None:
    """Write the stored rows into docs/speed.md and docs/speed-networks.md."""
    stored = json.loads(RESULTS.read_text())
    theirs = stored.pop(REFERENCE, [])
    speed.write_between("measured", table(own for rows in stored.values() for own in rows))
    if theirs:
        speed.write_between("reference", table(theirs), "speed-networks.md")


def table(rows: Iterable[dict]) -> str:
    """Return stored rows as a Markdown table."""
    lines = [line(Row(**row)) for row in rows]
    return "\n".join(["| what | measured | goal | met | how |", "| --- | --- | --- | --- | --- |", *lines])


if __name__ == "__main__":
    main()

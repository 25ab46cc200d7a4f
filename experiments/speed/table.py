"""Measures what the package costs, prints a table, and writes it to measured.json beside this file.

    python experiments/speed/table.py [--quick] [--data FOLDER] [--only projection trgp ...] [--docs]

Each file named in MODULES has a function ``rows(quick)``. Ratios are medians over interleaved repeats of CPU time, in
one process with one thread, unless a note says otherwise.
"""

import argparse
import json
import warnings
from dataclasses import asdict
from importlib import import_module
from inspect import signature
from pathlib import Path

import rows as speed
import torch
from rows import Row

MODULES = ("projection", "memory_update", "trgp", "merge_share", "many_tasks", "networks", "pipeline")
RESULTS = Path(__file__).with_name("measured.json")
DOCS = Path(__file__).parents[2] / "docs" / "speed.md"
START, END = "<!-- measured, by table.py --docs -->", "<!-- end -->"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true", help="fewer tasks and repeats; nothing is written")
    parser.add_argument("--data", type=Path, help="folder with cifar-100-python; random images without it")
    parser.add_argument("--only", nargs="+", choices=MODULES, default=MODULES, help="measure these; keep other rows")
    parser.add_argument(
        "--docs", action="store_true", help="write the table of measured.json into docs/speed.md, no more"
    )
    arguments = parser.parse_args()
    if arguments.docs:
        write_docs()
        return
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    speed.DATA = arguments.data
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for name in arguments.only:
        module = import_module(name)
        if not hasattr(module, "rows"):
            continue
        takes_data = "data" in signature(module.rows).parameters and arguments.data is not None
        measured = module.rows(arguments.quick, **({"data": arguments.data} if takes_data else {}))
        for row in measured:
            print(line(row), flush=True)
        results[name] = [asdict(row) for row in measured]
        if not arguments.quick:
            ordered = {key: results[key] for key in MODULES if key in results}
            RESULTS.write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


def line(row: Row) -> str:
    return f"| {row.what} | {row.value:.4g} | {row.goal} | {'yes' if row.met else '**no**'} | {row.note} |"


def write_docs() -> None:
    text = DOCS.read_text()
    head, tail = text[: text.index(START)], text[text.index(END) :]
    stored = json.loads(RESULTS.read_text())
    lines = [line(Row(**row)) for own in stored.values() for row in own]
    table = "\n".join(["| what | measured | goal | met | how |", "| --- | --- | --- | --- | --- |", *lines])
    DOCS.write_text(f"{head}{START}\n{table}\n{tail}")


if __name__ == "__main__":
    main()

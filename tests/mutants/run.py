"""Break each formula and each guard on purpose, and list which test noticed: ``make mutants``.

A mutant is one place of the package with other text (``table.py``). No file is changed: a forked process imports the
package with the changed source and runs the few tests that matter for the file, up to the first failure. A mutant that
no test notices is a failure, unless the table gives the reason why it changes nothing that can be seen.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "became_avalanche"
PRELOADED = (
    "torch",
    "torchvision",
    "avalanche.training.supervised",
    "avalanche.training.plugins",
    "hypothesis",
    "scipy",
)
"""Imported once, before processes are forked. The package itself is not: each process imports its own version."""
BROKEN = 70
TIME_LIMIT = 900.0
"""Seconds after which a mutant that does not come to an end counts as noticed."""


class Mutated(MetaPathFinder, SourceFileLoader):
    """Imports one module of the package from another source."""

    def __init__(self, mutant: Mutant) -> None:
        file = PACKAGE / mutant.file
        name = ".".join(("became_avalanche", *Path(mutant.file).with_suffix("").parts))
        super().__init__(name, str(file))
        self.source = file.read_text().replace(mutant.old, mutant.new)

    def find_spec(self, fullname: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return spec_from_file_location(fullname, self.path, loader=self) if fullname == self.name else None

    def get_code(self, fullname: str) -> object:
        return compile(self.source, self.path, "exec")


def stale(mutants: list[Mutant]) -> list[str]:
    """What is wrong with the table: text that is not in its file exactly once, or tests that are not there."""
    problems = []
    for mutant in mutants:
        found = (PACKAGE / mutant.file).read_text().count(mutant.old) if (PACKAGE / mutant.file).is_file() else 0
        if found != 1:
            problems.append(f"{mutant.file} has this text {found} times instead of once: {mutant.old!r}")
        problems += [f"{test} is not there" for test in mutant.tests if not (ROOT / test).exists()]
    return problems


def start(mutant: Mutant | None, tests: tuple[str, ...], log: Path) -> int:
    """Run tests in a forked process, on the mutant or on the package as it is; returns the process id."""
    pid = os.fork()
    if pid > 0:
        return pid
    code = BROKEN
    try:
        os.setpgid(0, 0)
        with log.open("w") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        if mutant is not None:
            sys.meta_path.insert(0, Mutated(mutant))
        options = [
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "--tb=line",
            "--hypothesis-profile=first failure",
            "-W",
            "ignore::pytest.PytestAssertRewriteWarning",
        ]
        code = int(pytest.main([*options, *(str(ROOT / test) for test in tests)]))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def verdict(code: int, log: Path) -> str | None:
    """What noticed a mutant; None if nothing did."""
    text = log.read_text(errors="replace")
    if code == 0:
        return None
    if code < 0:
        return "the time limit"
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?)(?:\[.*\])?(?: - .*)?$", text, re.M)
    if code != pytest.ExitCode.TESTS_FAILED or failed is None:
        sys.exit(f"the tests could not run:\n{text}")
    return failed[1]


def run(mutants: list[Mutant | None], tests_of: dict[int, tuple[str, ...]], jobs: int) -> list[str | None]:
    """What noticed each of the mutants."""
    verdicts: list[str | None] = [None] * len(mutants)
    waiting, running = list(range(len(mutants))), {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < jobs:
                i = waiting.pop(0)
                log = Path(folder) / f"{i}.txt"
                running[start(mutants[i], tests_of[i], log)] = i, log, time.monotonic() + TIME_LIMIT
            for pid, (i, log, end) in list(running.items()):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done == 0:
                    if time.monotonic() > end:
                        os.killpg(pid, signal.SIGKILL)
                    continue
                del running[pid]
                verdicts[i] = verdict(os.waitstatus_to_exitcode(status), log)
                report(mutants[i], verdicts[i])
            time.sleep(0.1)
    return verdicts


def report(mutant: Mutant | None, noticed: str | None) -> None:
    if mutant is None:
        print(f"without a mutant: {noticed or 'all tests pass'}", flush=True)
        return
    change = f"{mutant.file}: {mutant.old.strip()!r} -> {mutant.new.strip()!r}"
    outcome = f"noticed by {noticed}" if noticed else f"survives: {mutant.reason or 'NO TEST NOTICES IT'}"
    print(f"{change}\n    {outcome}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Break formulas and guards on purpose and see which test notices.")
    parser.add_argument("files", nargs="*", help="only mutants of files whose path contains one of these")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--quick", action="store_true", help="do not try the tests without a mutant first")
    arguments = parser.parse_args()
    chosen = [m for m in MUTANTS if not arguments.files or any(part in m.file for part in arguments.files)]
    if problems := stale(chosen):
        sys.exit("the table of mutants is out of date:\n" + "\n".join(problems))
    os.chdir(ROOT)
    for name in PRELOADED:
        importlib.import_module(name)
    importlib.import_module("torch").set_num_threads(1)
    if not arguments.quick:
        files = tuple(dict.fromkeys(test for mutant in chosen for test in mutant.tests))
        if run([None], {0: files}, 1)[0] is not None:
            sys.exit("the tests fail without any mutant")
    noticed = run([*chosen], {i: mutant.tests for i, mutant in enumerate(chosen)}, arguments.jobs)
    survivors = [mutant for mutant, by in zip(chosen, noticed, strict=True) if by is None]
    unexplained = [mutant for mutant in survivors if not mutant.reason]
    needless = [mutant for mutant, by in zip(chosen, noticed, strict=True) if by is not None and mutant.reason]
    for mutant in needless:
        print(f"{mutant.file}: {mutant.old.strip()!r} is noticed after all: drop its reason")
    print(
        f"{len(chosen)} mutants: {len(chosen) - len(survivors)} noticed, {len(survivors) - len(unexplained)} survive "
        f"for the reason given, {len(unexplained)} without a reason"
    )
    sys.exit(1 if unexplained or needless else 0)


if __name__ == "__main__":
    main()

"""Measure the CPU time of ``became --help`` and of importing the package."""

import subprocess
import sys
from resource import RUSAGE_CHILDREN, getrusage
from statistics import median

from rows import Row, at_most

COMMANDS = {
    "became --help, seconds of CPU time": ["-m", "became_avalanche", "--help"],
    "import became_avalanche, seconds of CPU time": ["-c", "import became_avalanche"],
}


def rows(quick: bool) -> list[Row]:
    repeats = 1 if quick else 5
    return [
        at_most(1, what, median([seconds(command) for _ in range(repeats + 1)][1:]), f"median of {repeats} processes")
        for what, command in COMMANDS.items()
    ]


def seconds(arguments: list[str]) -> float:
    """Return the CPU seconds of a separate Python process."""
    before = getrusage(RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = getrusage(RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

"""docs/faults.md names tests that exist."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROWS = [line for line in (ROOT / "docs" / "faults.md").read_text().splitlines() if "::" in line]
NAMED = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


@cache
def collected(file):
    """The tests that pytest finds in a file: functions at its top level whose names begin with ``test_``."""
    if not Path(file).name.startswith("test_") or not (ROOT / file).exists():
        return set()
    functions = [node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)]
    return {name for name in functions if name.startswith("test_") and functions.count(name) == 1}


def test_there_are_at_least_sixty_rows_with_a_test_each():
    assert len(ROWS) >= 60
    for row in ROWS:
        cells = [cell.strip() for cell in row.strip("|").split(" | ")]
        assert len(cells) == 3, row
        assert NAMED.search(cells[2]), row


def test_every_test_on_the_page_exists():
    named = {match.groups() for row in ROWS for match in NAMED.finditer(row)}
    assert not sorted("::".join(test) for test in named if test[1] not in collected(test[0]))

"""The table of mutants belongs to the source as it is, so that ``make mutants`` can run."""

from tests.mutants.run import stale
from tests.mutants.table import MUTANTS, Mutant


def test_every_mutant_can_be_made():
    assert stale(MUTANTS) == []
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS) >= 60
    assert all(mutant.old != mutant.new and mutant.tests for mutant in MUTANTS)


def test_a_mutant_that_cannot_be_made_is_named():
    lost = Mutant("files.py", "no such line", "", ("tests/nowhere.py",))
    assert stale([lost]) == [
        "files.py has this text 0 times instead of once: 'no such line'",
        "tests/nowhere.py is not there",
    ]

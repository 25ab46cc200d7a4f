"""The examples in module docstrings of ``results`` run as shown. tests/test_doctests.py runs those of public names."""

import doctest

import pytest

from became_avalanche.results import figures, metrics


@pytest.mark.parametrize("module", [figures, metrics], ids=lambda module: module.__name__.rpartition(".")[2])
def test_examples_of_modules(module):
    (example,) = doctest.DocTestFinder(recurse=False).find(module)
    assert example.examples
    printed = []
    doctest.DocTestRunner().run(example, out=printed.append)
    assert not printed, "".join(printed)

"""The examples in the docstrings of public names run as shown."""

import doctest

import pytest

import became_avalanche


def examples():
    """The docstrings with examples: one per public name or method."""
    finder = doctest.DocTestFinder()
    for name in became_avalanche.__all__:
        item = getattr(became_avalanche, name)
        if callable(item):
            yield from (found for found in finder.find(item, name, globs={}) if found.examples)


@pytest.mark.filterwarnings("ignore:No loggers specified", "ignore:No benchmark provided")
@pytest.mark.parametrize("example", list(examples()), ids=lambda example: example.name)
def test_examples_run_as_shown(example, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    printed = []
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=printed.append)
    assert not printed, "".join(printed)


def test_there_are_examples():
    assert len(list(examples())) >= 20

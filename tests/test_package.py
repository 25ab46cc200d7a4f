import inspect
import re
import runpy
from functools import partial
from pathlib import Path

import became_avalanche

ROOT = Path(__file__).parents[1]


def test_public_names_are_documented_and_typed():
    for name in became_avalanche.__all__:
        member = getattr(became_avalanche, name)
        assert inspect.getdoc(member), name
        functions = [(name, member)] if inspect.isfunction(member) else []
        methods = inspect.getmembers(member, inspect.isfunction) if inspect.isclass(member) else functions
        for method_name, method in methods:
            if method.__module__.startswith("became_avalanche") and not method_name.startswith("_"):
                assert "return" in method.__annotations__, f"{name}.{method_name}"


def test_quickstart_prints_acc_and_bwt(capsys, monkeypatch):
    """With two of its ten tasks."""
    script = ROOT / "experiments" / "quickstart.py"
    assert len(script.read_text().splitlines()) <= 30
    assert "plugins=[GPMPlugin(), BecameMergePlugin()]" in script.read_text()
    monkeypatch.setattr(became_avalanche, "permuted_digits", partial(became_avalanche.permuted_digits, n_tasks=2))
    runpy.run_path(str(script), run_name="__main__")
    pattern = r"after task +(\d+): ACC (\d+\.\d)%, BWT (.*)%"
    numbers = [re.fullmatch(pattern, line) for line in capsys.readouterr().out.splitlines()]
    assert all(numbers)
    assert [int(match[1]) for match in numbers] == [1, 2]
    assert float(numbers[-1][2]) > 80  # chance is 10

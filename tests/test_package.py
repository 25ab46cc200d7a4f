import inspect
import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import became_avalanche
from became_avalanche.runs.catalogue import BENCHMARKS, EMBEDDED
from became_avalanche.runs.compare import Comparison, text_gains, text_table
from became_avalanche.runs.describe import list_presets
from became_avalanche.runs.train import RunResult

ROOT = Path(__file__).parents[1]
DIGITS = [preset.name for preset in EMBEDDED]
THREE_TASKS = BENCHMARKS["10-split-cifar100-cpu"].scaled(tasks=3)
PAGES = [("README.md", ""), ("docs/methods.md", "-family"), ("docs/merging.md", "-rules")]


def test_public_names_are_documented_and_typed():
    for name in became_avalanche.__all__:
        member = getattr(became_avalanche, name)
        assert inspect.getdoc(member), name
        methods = inspect.getmembers(member, inspect.isfunction) if inspect.isclass(member) else [(name, member)]
        for method_name, method in methods:
            if method.__module__.startswith("became_avalanche") and not method_name.startswith("_"):
                assert "return" in method.__annotations__, f"{name}.{method_name}"


def test_maths_knows_nothing_of_avalanche():
    for room, known in (("subspace", {"subspace"}), ("merging", {"merging", "subspace"})):
        for file in (ROOT / "became_avalanche" / room).glob("*.py"):
            assert not re.search(r"^\s*(from|import) avalanche\b", file.read_text(), re.M), file
            imports = re.findall(r"from became_avalanche\.(\w+)", file.read_text())
            assert set(imports) <= known, file


def test_quickstart_prints_acc_and_bwt():
    script = ROOT / "experiments" / "quickstart.py"
    assert len(script.read_text().splitlines()) <= 30
    assert "plugins=[GPMPlugin(), BecameMergePlugin()]" in script.read_text()
    run = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    pattern = r"after task +(\d+): ACC (\d+\.\d)%, BWT (.*)%"
    numbers = [re.fullmatch(pattern, line) for line in run.stdout.splitlines()]
    assert all(numbers)
    assert [int(match[1]) for match in numbers] == list(range(1, 11))
    assert float(numbers[-1][2]) > 80  # chance is 10


@pytest.mark.parametrize(
    ("page", "name", "preset", "seeds"),
    [
        *((page, f"{preset.name}{suffix}", preset, 5) for page, suffix in PAGES for preset in EMBEDDED),
        ("docs/benchmarks.md", "10-split-cifar100-cpu", THREE_TASKS, 1),
        ("docs/benchmarks.md", "10-split-cifar100-cpu-gpm", THREE_TASKS, 2),
    ],
)
def test_tables_are_those_of_the_recorded_results(page, name, preset, seeds):
    folder = ROOT / "experiments" / "results" / name
    recorded = json.loads((folder / "results.json").read_text())
    text = (folder / "table.csv").read_text()
    methods = [line.split(",")[0] for line in text.splitlines()[1:]]
    comparison = Comparison(preset, methods, seeds, folder)
    assert recorded["complete"]
    assert recorded["settings"] == json.loads(json.dumps(comparison.settings))
    comparison.runs = [RunResult(**run) for run in recorded["runs"]]
    content = (ROOT / page).read_text()
    assert len(comparison.runs) == seeds * len(methods)
    assert text_table(comparison.rows()) in content
    assert text_gains(comparison.gains()) in content
    assert f"--out experiments/results/{name}" in content


def script(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "experiments")
    return import_module(name)


@pytest.mark.parametrize("benchmark", [*DIGITS, "split-cifar100"])
def test_trials_in_the_docs_are_the_recorded_ones(benchmark, monkeypatch):
    recorded = json.loads((ROOT / "experiments" / "results" / "became-plus" / f"{benchmark}.json").read_text())
    assert script("became_plus", monkeypatch).table(recorded["runs"]) in (ROOT / "docs" / "merging.md").read_text()


def test_presets_in_the_docs_are_those_of_the_catalogue():
    assert list_presets(BENCHMARKS.values()) in (ROOT / "docs" / "benchmarks.md").read_text()


def test_paths_in_the_docs_are_the_recorded_ones(monkeypatch):
    recorded = json.loads((ROOT / "experiments" / "results" / "paths" / "paths.json").read_text())
    assert script("paths", monkeypatch).table(recorded) in (ROOT / "docs" / "merging.md").read_text()
    assert len(recorded) >= 4

"""README and documentation: every code block runs, every command exists, every link leads somewhere."""

import re
import shlex
import sys
from contextlib import redirect_stdout
from pathlib import Path

import click
import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient

import became_avalanche
from became_avalanche.cli import became
from became_avalanche.results.metrics import METRICS
from tests.runs.conftest import forked, how_it_ended

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts),
]
BLOCK = re.compile(r"^(?P<mark>```+|<!-- setup)(?P<kind>[^\n]*)\n(?P<code>.*?)^(?:```+|-->)$", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\((?P<target>[^)\s]+)\)")


def name_of(page):
    return str(page.relative_to(ROOT))


def blocks(page, *kinds):
    """The code blocks of these kinds. Blocks ``<!-- setup ... -->`` are of the kind ``setup`` and come first."""
    found = []
    for match in BLOCK.finditer(page.read_text()):
        kind = "setup" if match["mark"].startswith("<!--") else match["kind"].strip()
        found.append((kind, match["code"]))
    return [code for kind, code in sorted(found, key=lambda block: block[0] != "setup") if kind in kinds]


def commands(page):
    """The commands in blocks that begin with one; what such a command prints may follow it."""
    command = re.compile(r"(became|python|make) \S")
    for code in blocks(page, "", "bash", "console"):
        for line in code.replace("\\\n", " ").splitlines() if command.match(code) else []:
            if command.match(line):
                yield shlex.split(line, comments=True)


@pytest.mark.filterwarnings("ignore:No loggers specified", "ignore:No benchmark provided")
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_python_blocks_run(page, tmp_path, monkeypatch, capsys):
    """The blocks of a page run one after the other, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("became_avalanche.results.metrics.METRICS", dict(METRICS))  # a page adds one
    namespace = {"__name__": "documentation", "repository": ROOT}
    for code in blocks(page, "setup", "python"):
        exec(compile(code, name_of(page), "exec"), namespace)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=name_of)
def test_toml_blocks_are_studies(page):
    from became_avalanche import Study

    for code in blocks(page, "toml"):
        assert Study.model_validate({"name": "study", **tomllib.loads(code)}).methods


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))], ids=name_of)
def test_commands_exist(page):
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    for program, *words in commands(page):
        if program == "make":
            assert {word for word in words if "=" not in word} <= targets, words
        elif program == "python":
            script = words[1].replace(".", "/") + ".py" if words[0] == "-m" else words[0]
            assert words[0] == "-m" or (ROOT / script).exists(), words
        else:
            parse(words)


def parse(words):
    """Raise an error unless ``became`` accepts these words; nothing is run."""
    with click.Context(became, info_name="became") as context:
        name, command, rest = became.resolve_command(context, words)
        assert command is not None
        for word in rest:
            assert not word.startswith("experiments/") or (ROOT / word).exists(), word
        rest = ["pyproject.toml" if word.startswith("my-") else word for word in rest]  # a file of the reader's own
        command.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = BLOCK.sub("", page.read_text())
    for match in LINK.finditer(text):
        target, _, anchor = match["target"].partition("#")
        if re.match(r"[a-z]+:", target):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), match[0]
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path), match[0]


def anchors(page):
    headings = re.findall(r"^#+ (.+)$", BLOCK.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_public_name_is_in_the_reference():
    page = (ROOT / "docs" / "api.md").read_text()
    assert set(re.findall(r"became_avalanche\.(\w+)$", page, re.M)) == set(became_avalanche.__all__)


class Shell(InteractiveShell):
    def enable_gui(self, gui=None):
        """Let ``%matplotlib inline`` pass; there is no window to open."""


def in_a_child(notebook, printed):
    """Run the cells in a forked process, which has all imports already."""

    def child():
        shell = Shell.instance()
        with printed.open("w") as file, redirect_stdout(file):
            for cell in notebook.cells:
                if cell.cell_type == "code":
                    shell.run_cell(cell.source).raise_error()

    assert how_it_ended(forked(child)) == 0


def in_jupyter(notebook, printed):
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed.write_text("".join(output.get("text", "") for output in outputs))


@pytest.mark.parametrize("execute", [in_a_child, pytest.param(in_jupyter, marks=pytest.mark.long)])
def test_the_notebook_runs(execute, tmp_path, monkeypatch):
    """With fewer tasks, epochs and steps than in the notebook that is shown."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(ROOT / "docs" / "notebook.ipynb", as_version=4)
    for cell in notebook.cells:
        for setting in ("n_tasks=2", "train_epochs=1", "train_mb_size=64"):
            cell.source = re.sub(setting.partition("=")[0] + r"=\d+", setting, cell.source)
    execute(notebook, tmp_path / "printed")
    printed = (tmp_path / "printed").read_text()
    assert re.search(r"gpm\+became +ACC \d", printed)
    assert "chosen λ" in printed

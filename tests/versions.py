"""Run the tests on other versions of Python and of what the package needs: ``make test-versions``.

``oldest`` has the lower bound of every dependency in ``pyproject.toml``, ``newest`` what is newest for this Python.
Each environment is made in a temporary folder and deleted after use: torch takes gigabytes. Versions of Python that
this machine does not have are named and left out.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ENVIRONMENTS = [("3.10", "oldest"), ("3.10", "newest"), ("3.11", "newest"), ("3.12", "newest"), ("3.13", "newest")]
SHOWN = ("torch", "torchvision", "numpy", "wandb", "avalanche-lib")
LEFT_OUT = ("tests/test_docs.py", "tests/results/test_browser.py")
"""Tests that need more than the package does."""


def interpreter(version: str) -> str | None:
    """A Python of this version: of pyenv, or on the path."""
    found = sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for path in (*map(str, reversed(found)), shutil.which(f"python{version}")):
        if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0:
            return path
    return None


def run(version: str, kind: str) -> str:
    """The last line that pytest prints in a new environment, or what is missing."""
    python = interpreter(version)
    if python is None:
        return f"left out: there is no Python {version} here"
    uv = [sys.executable, "-m", "uv", "--quiet", "--no-cache"]
    with tempfile.TemporaryDirectory(prefix="became-versions-") as folder:
        place = Path(folder) / "environment"
        made = str(place / "bin" / "python")
        subprocess.run([*uv, "venv", "--python", python, str(place)], check=True)
        options = ["--resolution", "lowest-direct"] if kind == "oldest" else []
        tools = ["hypothesis", "pytest", "pytest-xdist"]
        wanted = ["-r", str(ROOT / "pyproject.toml"), "--extra", "ray", *(f"{name}>={_bound(name)}" for name in tools)]
        subprocess.run([*uv, "pip", "install", *options, "--python", made, *wanted], check=True)
        subprocess.run([*uv, "pip", "install", "--no-deps", "--python", made, str(ROOT)], check=True)
        freeze = subprocess.run([*uv, "pip", "freeze", "--python", made], check=True, capture_output=True, text=True)
        versions = [line.strip() for line in freeze.stdout.splitlines() if line.split("==")[0] in SHOWN]
        print(f"{version} {kind}: {', '.join(versions)}", flush=True)
        warnings = "default" if kind == "oldest" else "ignore::DeprecationWarning"  # of packages beside newer ones
        arguments = ["-q", "-p", "no:cacheprovider", "-n", "2", "--dist", "loadfile", "-W", warnings]
        arguments += [f"--ignore={test}" for test in LEFT_OUT]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        ended = subprocess.run([made, "-m", "pytest", *arguments], cwd=ROOT, env=environment, stdout=subprocess.PIPE)
        lines = ended.stdout.decode(errors="replace").strip().splitlines()
        print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR"))), flush=True)
        return lines[-1]


def _bound(name: str) -> str:
    """The lower bound of a tool in ``pyproject.toml``."""
    found = re.search(rf'"{name}>=([^"]+)"', (ROOT / "pyproject.toml").read_text())
    assert found is not None, name
    return found[1]


def main() -> None:
    chosen = [pair for pair in ENVIRONMENTS if set(sys.argv[1:]) <= set(pair)]
    ends = {f"{version} {kind}": run(version, kind) for version, kind in chosen}
    print("\n".join(f"Python {name}: {end}" for name, end in ends.items()))
    sys.exit(any("failed" in end or "error" in end for end in ends.values()))


if __name__ == "__main__":
    main()

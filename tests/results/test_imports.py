import subprocess
import sys

from tests.results.records import ROOT

SCRIPT = """
import sys
from importlib import import_module
from pkgutil import iter_modules
import became_avalanche.results as room
names = [module.name for module in iter_modules(room.__path__)]
assert {"record", "metrics", "tables", "figures"} <= set(names), names
for name in names:
    import_module(f"{room.__name__}.{name}")
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "avalanche"}))
print(*sorted(name for name in sys.modules if name.startswith("became_avalanche.") and ".results" not in name))
"""


def test_results_need_neither_torch_nor_avalanche_nor_other_rooms():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["", "became_avalanche.files"]

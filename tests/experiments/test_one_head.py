"""The example scripts of docs/class-incremental.md, on a tenth of the digits."""

import re
import runpy

import pytest
from sklearn.datasets import load_digits

from became_avalanche.benchmarks import digits
from experiments.tables import ROOT


@pytest.fixture
def few_digits(monkeypatch):
    def few(**options):
        x, y = load_digits(**options)
        return x[:180], y[:180]

    monkeypatch.setattr(digits, "load_digits", few)


@pytest.mark.usefixtures("few_digits")
@pytest.mark.filterwarnings("ignore:No loggers specified")
@pytest.mark.parametrize("script", ["class_incremental", "domain_incremental"])
def test_script_reports_accuracy_after_each_experience(script, capsys):
    variables = runpy.run_path(str(ROOT / "experiments" / f"{script}.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "nan" not in said
    assert len(re.findall(r"^after .*: ACC [\d.]+%", said, re.MULTILINE)) == 5
    assert len(re.findall(r"BWT [+-][\d.]+%$", said, re.MULTILINE)) == 4
    assert f"ACC {variables['accuracy'].acc:.1%}, BWT {variables['accuracy'].bwt:+.1%}\n" in said
    moved = re.findall(r"^(\S+) +([\d.]+)%$", said, re.MULTILINE)
    assert [layer for layer, _ in moved] == (
        ["features.1", "features.3", "classifier.classifier"] if script == "class_incremental" else []
    )
    assert all(float(share) < 10 for _, share in moved)

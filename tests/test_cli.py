import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

BECAME = [sys.executable, "-c", "from became_avalanche.cli import main; main()"]


def run(*arguments, **kwargs):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled"}
    return subprocess.run([*BECAME, *arguments], capture_output=True, text=True, env=environment, **kwargs)


def test_help_is_quick_because_torch_is_not_imported():
    code = "import sys, became_avalanche.cli; print('torch' in sys.modules, 'avalanche' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False False\n"
    result = run("compare", "--help")
    assert result.returncode == 0
    for option in (
        "--benchmark",
        "--methods",
        "--seeds",
        "--out",
        "--wandb",
        "--tasks",
        "--epochs",
        "--data",
        "--device",
    ):
        assert option in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "gpm,ewk"], "unknown method 'ewk'; did you mean 'ewc'?"),
        (["--methods", ","], "--methods names no method"),
        (["--benchmark", "split-digts"], "unknown benchmark 'split-digts'; did you mean 'split-digits'?"),
        (["--seeds", "0"], "'--seeds'"),
        (["--seeds", "many"], "'--seeds'"),
        (["--out", "file/below"], "cannot write to file/below"),
        (["--tasks", "6"], "split-digits has 5 tasks: choose between 1 and 5, not 6"),
        (["--device", "nowhere"], "cannot train on --device nowhere"),
        (["--epochs", "0"], "a stage has at least 1 epoch; got 0"),
        (["--benchmark", "20-split-miniimagenet", "--data", "here"], "so that here/miniimagenet is there"),
        (["--colour", "red"], "No such option"),
    ],
)
def test_user_errors_are_one_line_and_code_2(tmp_path, arguments, message):
    (tmp_path / "file").write_text("in the way")
    result = run("compare", *arguments, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1
    assert message in result.stderr


def test_comparison_of_two_methods(tmp_path):
    result = run("compare", "--methods", "gpm,gpm+became", "--seeds", "1", "--out", "out", "--wandb", "x", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert re.search(r"^gpm, seed 0: ACC \d\d\.\d\d %, .*1 of 2 runs", result.stderr, re.M)
    assert re.search(r"^gpm\+became +\d\d\.\d\d +[+-]\d+\.\d\d +\d+ +\d+\.\d$", result.stdout, re.M)
    assert re.search(r"^gpm\+became over gpm: [+-]\d+\.\d\d points of ACC$", result.stdout, re.M)
    for name in ("results.json", "table.csv", "comparison.png"):
        assert str(Path("out") / name) in result.stdout
        assert (tmp_path / "out" / name).stat().st_size > 0
    assert "Warning" not in result.stderr


def test_a_scaled_comparison_says_so(tmp_path):
    result = run("compare", "--methods", "gpm", "--seeds", "1", "--tasks", "2", "--epochs", "3", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (
        "split-digits, scaled down to 2 of 5 tasks, at most 3 instead of 50 epochs a stage, one seed" in result.stdout
    )
    kept = json.loads((tmp_path / "runs" / "compare" / "results.json").read_text())
    assert kept["settings"]["budget"] == "2 of 5 tasks, at most 3 instead of 50 epochs a stage"


def test_presets_and_data_are_listed(tmp_path):
    listed = run("presets")
    assert listed.returncode == 0, listed.stderr
    assert "20-split-miniimagenet" in listed.stdout
    shown = run("presets", "5-datasets")
    assert "gpm: threshold 0.965" in shown.stdout
    unknown = run("presets", "6-datasets")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "did you mean '5-datasets'?" in unknown.stderr
    (tmp_path / "tiny-imagenet-200").mkdir()
    data = run("data", "--data", str(tmp_path))
    assert data.returncode == 0, data.stderr
    assert "CIFAR-100: missing\n" in data.stdout
    assert f"TinyImageNet: damaged\n  {tmp_path}" in data.stdout
    assert data.stderr == ""


def test_interrupt_keeps_what_is_finished_and_says_where(tmp_path):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*BECAME, "compare", "--methods", "finetune,gpm", "--seeds", "50"],
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # background jobs are started without it
    )
    results = tmp_path / "runs" / "compare" / "results.json"
    deadline = time.monotonic() + 300
    while not results.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    try:
        _, stderr = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130
    assert re.search(r"became: interrupted; \d+ finished runs are in runs/compare/results\.json", stderr)
    assert "Traceback" not in stderr
    assert results.exists()

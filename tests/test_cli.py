import os
import re
import runpy
import subprocess
import sys
from functools import partial

import pytest
import torch
import wandb

from became_avalanche import DivergenceError
from became_avalanche.analysis import endpoints
from became_avalanche.cli import main
from became_avalanche.results.record import read_record, read_records
from became_avalanche.runs import catalogue
from became_avalanche.runs.session import Session
from tests.results.records import made_up, make_spec
from tests.runs.components import BLOBS

BECAME = [sys.executable, "-c", "from became_avalanche.cli import main; main()"]


@pytest.fixture
def became(monkeypatch, capsys, tmp_path):
    """Call the command in this process, in an empty folder; returns exit code, standard output and standard error."""
    monkeypatch.setitem(catalogue.BENCHMARKS, "blobs", BLOBS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])  # the command adds the working directory

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["became", *arguments])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code or 0, *capsys.readouterr()

    return call


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(
        'benchmarks = ["blobs"]\nseeds = 2\nn_tasks = 2\nmax_epochs = 1\n'
        'methods = ["gpm+became", {name = "sgp", label = "SGP, weaker", options = {alpha = 3}}, "gpm"]'
    )
    return str(path)


def compare(became, methods, *arguments):
    return became("compare", "--benchmark", "blobs", "--methods", methods, "--seeds", "1", "--epochs", "1", *arguments)


def test_help_is_quick_because_torch_is_not_imported():
    code = "import sys, became_avalanche.cli as c; c.became(['compare', '-h'], standalone_mode=False)"
    code += "; print('torch' in sys.modules, 'avalanche' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "False False"
    options = ("benchmark", "methods", "tasks", "epochs", "device", "threads", "seeds")
    shared = ("data", "out", "engine", "workers", "address", "wandb", "keep")
    assert all(f"--{option}" in run.stdout for option in (*options, *shared))


def test_without_a_command_there_is_help(became):
    code, out, err = became()
    assert (code, err) == (0, "")
    assert all(command in out for command in ("compare", "study", "run", "status", "report", "presets", "data"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("compare --methods gpm,ewk", "methods[1]: unknown method 'ewk'; did you mean 'ewc'?"),
        ("compare --methods GPM", "methods[0]: unknown method 'GPM'; did you mean 'gpm'?"),
        ("compare --methods GPM+BECAME", "methods[0]: unknown method 'GPM+BECAME'; did you mean 'gpm+became'?"),
        ("compare --methods quux", "unknown method 'quux'; choose one of: finetune, gpm, "),
        ("compare --methods ,", "--methods is empty; give at least one method"),
        ("compare --methods=", "--methods is empty; give at least one method"),
        ("compare --methods foo:Bar", "cannot import the plugin 'foo:Bar': No module named 'foo'"),
        ("compare --methods tests.helpers:mlp", "tests.helpers:mlp makes a Network, which is not a SupervisedPlugin"),
        ("compare --benchmark blob", "benchmarks: unknown benchmark 'blob'; did you mean 'blobs'?"),
        ("compare --seeds 0", "'--seeds'"),
        ("compare --seeds many", "'--seeds'"),
        ("compare --out small.toml/below", "cannot write to small.toml/below: Not a directory; choose another folder"),
        ("compare --tasks 6", "split-digits: n_tasks must be at most 5, the number of tasks in the stream; got 6"),
        ("compare --epochs 0", "'--epochs'"),
        ("compare --device nowhere", "cannot train on --device nowhere; available: cpu"),
        ("compare --device meta", "cannot train on --device meta; available: cpu"),
        ("compare --device cuda:99", "cannot train on --device cuda:99; available: cpu"),
        ("compare --workers 2", "--workers needs --engine processes"),
        ("compare --address auto", "--address needs --engine ray"),
        ("compare --engine slow", "'--engine'"),
        ("compare --benchmark 20-split-miniimagenet --data here", "so that here/miniimagenet exists"),
        ("compare --colour red", "No such option"),
        ("study nowhere.toml", "'nowhere.toml' does not exist"),
        ("study wrong.toml", "wrong.toml: unknown field 'method'; did you mean 'methods'?"),
        ("study wrong.toml --dry-run", "wrong.toml: unknown field 'method'; did you mean 'methods'?"),
        ("status wrong.toml", "wrong.toml: unknown field 'method'; did you mean 'methods'?"),
        ("study options.toml", "blobs, gpm: gpm has no option 'alpha' (given 1); choose one of: threshold"),
        ("study options.toml --dry-run", "blobs, gpm: gpm has no option 'alpha' (given 1); choose one of: threshold"),
        ("table nowhere", "'nowhere' does not exist"),
        ("table .", "no records of runs found in ."),
        ("table small.toml", "no records of small.toml found in runs"),
        ("table small.toml --format html", "'--format'"),
        ("run nowhere.json", "'nowhere.json' does not exist"),
        ("run wrong.toml", "wrong.toml is corrupt: "),
        ("report nowhere", "'nowhere' does not exist"),
        ("report .", "no records of runs found in ."),
        ("report wrong.toml", "wrong.toml: unknown field 'method'; did you mean 'methods'?"),
        ("plot .", "no records of runs found in ."),
        ("plot . --figure heatmap", "unknown figure 'heatmap'; "),
        ("presets 6-datasets", "unknown benchmark '6-datasets'; did you mean '5-datasets'?"),
        ("campare", "No such command 'campare'"),
    ],
)
def test_user_errors_are_one_line_and_code_2(became, file, tmp_path, arguments, message):
    (tmp_path / "wrong.toml").write_text('benchmarks = ["blobs"]\nmethods = ["gpm"]\nmethod = 1')
    options = 'benchmarks = ["blobs"]\nmethods = [{name = "gpm", options = {alpha = 1}}]'
    (tmp_path / "options.toml").write_text(options)
    code, out, err = became(*arguments.split())
    assert (code, out) == (2, "")
    assert err.startswith("became: ")
    assert len(err.splitlines()) == 1
    assert len(err) < 300
    assert message in err
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has the device")
def test_a_device_that_is_not_there_is_named_without_the_words_of_torch(became):
    code, _, err = became("compare", "--device", "mps")
    assert (code, "cannot train on --device mps; available: cpu" in err, len(err) < 90) == (2, True, True)


def test_wandb_without_login_is_noticed_before_anything_is_trained(became, fresh_wandb, monkeypatch, tmp_path):
    code, out, err = compare(became, "gpm", "--wandb", "mine")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1] == (
        "became: --wandb needs a login to Weights & Biases: run `wandb login`, or set WANDB_MODE=offline to write "
        "the logs into the folders of the runs"
    )
    assert not list(tmp_path.glob("runs/*/"))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    wandb.teardown()
    assert compare(became, "gpm", "--tasks", "1", "--wandb", "mine")[0] == 0


def test_long_lines_are_wrapped_to_the_terminal(became, monkeypatch):
    for columns in (80, 60):
        monkeypatch.setenv("COLUMNS", str(columns))
        code, out, _ = became("data")
        assert code == 0
        assert all(len(line) < columns or " " not in line.strip() for line in out.splitlines())
        assert "\n  downloaded automatically when a run needs it;" in out


def test_the_package_is_the_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["became", "presets", "nowhere"])
    monkeypatch.setattr(sys, "path", sys.path[:])
    with pytest.raises(SystemExit):
        runpy.run_module("became_avalanche", run_name="__main__")
    assert capsys.readouterr().err.startswith("became: unknown benchmark 'nowhere'")


@pytest.mark.usefixtures("unrendered")
def test_tables_of_a_folder_a_run_and_a_study(became, tmp_path, file):
    for n, seed in enumerate((0, 1)):
        for method in ("gpm", "gpm-2x", "gpm+became"):
            run = made_up(method, seed, spec=make_spec(method, seed, benchmark="10-split-cifar100"))
            write(tmp_path / "folder" / f"{method}.{n}", run)
    code, out, err = became("table", "folder", "--metrics", "acc, forgetting")
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "10-split-cifar100, 2 seeds, mean ± standard deviation"
    assert "paper ACC %" in out
    assert "gpm+became over gpm-2x: " in out
    heads = {"csv": "method,acc_mean,", "latex": "% needs", "markdown": "| method | ACC %"}
    for form, head in heads.items():
        code, out, err = became("table", "folder", "--format", form)
        assert (code, err) == (0, "")
        assert out.startswith(head)
    code, out, _ = became("table", "folder/gpm.0")
    assert "10-split-cifar100, one seed" in out
    code, out, err = became("table", "folder", "--metrics", "acc,forgeting")
    assert (code, out) == (2, "")
    assert err == "became: unknown metric 'forgeting'; did you mean 'forgetting'?\n"
    assert compare(became, "gpm", "--tasks", "2")[0] == 0
    (tmp_path / "own.toml").write_text('benchmarks = ["blobs"]\nmethods = ["gpm"]\nn_tasks = 2\nmax_epochs = 1')
    code, out, _ = became("table", "own.toml")
    assert "blobs (2 of 3 tasks, at most 1 epoch per stage), one seed" in out


def write(folder, record):
    folder.mkdir(parents=True)
    (folder / "record.json").write_text(record.to_json())


def test_figures_of_a_folder_and_of_a_study(became, tmp_path, unrendered, monkeypatch):
    coarse = partial(endpoints.measure_landscape, size=4)
    monkeypatch.setattr(endpoints, "measure_landscape", coarse)
    unrendered |= {"final"}
    for method in ("gpm", "gpm-2x", "gpm+became"):
        write(tmp_path / "folder" / f"{method}.0", made_up(method, 0))
    code, out, err = became("plot", "folder", "--figure", "final")
    assert (code, out, err) == (0, "folder/figures/final.pdf\nfolder/figures/final.png\n", "")
    assert (tmp_path / "folder" / "figures" / "final.pdf").read_bytes().startswith(b"%PDF")
    assert (tmp_path / "folder" / "figures" / "final.png").read_bytes().startswith(b"\x89PNG")
    unrendered.clear()
    code, out, err = became("plot", "folder", "--to", "there")
    assert code == 0
    assert (tmp_path / "there" / "comparison.pdf").exists()
    assert "became: not drawn: ranks of made-up: none of these runs is done and has protected layers" in err
    assert "measure it with --figure landscape" in err
    code, out, err = became("plot", "folder", "--figure", "ranks")
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
    code, out, _ = became("plot", "folder", "--figure", "list")
    assert {"training", "path", "landscape"} <= {line.split()[0] for line in out.splitlines()}

    assert compare(became, "gpm+became", "--tasks", "2", "--keep", "endpoints")[0] == 0
    (run,) = (tmp_path / "runs").glob("blobs*/")
    for name, file in (("path", "pathscan-002.json"), ("landscape", "landscape-002.json")):
        code, out, err = became("plot", str(run), "--figure", name, "--samples", "5")
        assert (code, err) == (0, "")
        assert (run / "figures" / f"{name}.pdf").exists()
        measured = (run / file).read_bytes()
        assert became("plot", "runs", "--figure", name, "--samples", "6")[0] == 0
        assert (run / file).read_bytes() == measured  # measured once
    (run / "endpoints-002.safetensors").unlink()
    code, out, _ = became("plot", "runs", "--figure", "landscape")
    assert code == 0
    assert "runs/figures/landscape.png" in out
    code, _, err = became("plot", "runs", "--figure", "path", "--task", "3")
    assert code == 2
    assert "train with --keep endpoints" in err


def test_tables_of_records_need_no_torch(tmp_path):
    write(tmp_path / "gpm.0", made_up("gpm", 0))
    code = f"import sys, became_avalanche.cli as c; c.became(['table', {str(tmp_path)!r}], standalone_mode=False)"
    code += "; print('torch' in sys.modules, 'avalanche' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.splitlines()[-1] == "False False", run.stderr


def test_an_error_of_ours_is_not_hidden(became, monkeypatch):
    def fail(*args, **kwargs):
        raise ZeroDivisionError

    monkeypatch.setattr("became_avalanche.runs.study.Study.specs", fail)
    with pytest.raises(ZeroDivisionError):
        compare(became, "gpm")


def test_comparison(became, tmp_path):
    code, out, err = compare(became, "finetune,gpm+became,gpm", "--tasks", "2")
    assert code == 0
    where = r"gpm\+became, seed 0, task 2 of 2, stage"
    assert re.search(rf"^{where} 1: 1 epoch, \d+\.\d s \(about \d+ s left\)$", err, re.M)
    assert re.search(rf"^{where} 2: 1 epoch, accuracy \d+\.\d\d %, \d+\.\d s \(about \d+ s left\)$", err, re.M)
    ends = re.findall(r"^(\S+), seed 0: done, ACC \d+\.\d\d %, BWT -?\d+\.\d\d % \((\d) of 3 runs\)$", err, re.M)
    assert ends == [("gpm", "1"), ("gpm+became", "2"), ("finetune", "3")]
    assert err.startswith("3 of 3 runs to train\n")
    assert len(err.splitlines()) == 1 + 2 + 3 + 2 + 3
    assert "blobs (2 of 3 tasks, at most 1 epoch per stage), one seed\n" in out
    rows = re.findall(r"^(\S+) +\d+\.\d\d +[+-]\d+\.\d\d +\d+ +\d+\.\d$", out, re.M)
    assert rows == ["finetune", "gpm+became", "gpm"]
    assert re.search(r"^gpm\+became over gpm: [+-]\d+\.\d\d points of ACC$", out, re.M)
    assert "untuned" not in out
    for name in ("table.csv", "comparison.png"):
        assert os.path.join("runs", name) in out
        assert (tmp_path / "runs" / name).stat().st_size > 0
    assert {record.method for record in read_records(tmp_path / "runs")} == {"finetune", "gpm", "gpm+became"}


@pytest.mark.usefixtures("unrendered")
def test_finished_runs_are_used_again(became, monkeypatch, tmp_path):
    first = compare(became, "gpm,gpm+became")
    kept = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("record.json")}
    again = compare(became, "gpm,gpm+became")
    assert (again[1], again[2]) == (first[1], "")
    trained = []
    step = Session.step
    monkeypatch.setattr(Session, "step", lambda self: (trained.append(self.spec.method.name), step(self)))
    code, _, err = compare(became, "sgp,gpm")
    assert code == 0
    assert set(trained) == {"sgp"}
    assert "(2 of 2 runs)" in err
    assert {path: path.read_bytes() for path in kept} == kept


@pytest.mark.usefixtures("unrendered")
def test_report_of_a_folder_and_of_a_study_and_repeating_a_run(became, file, tmp_path):
    assert compare(became, "gpm,sgp", "--tasks", "2")[0] == 0
    code, out, _ = became("report", "runs")
    page = tmp_path / "runs" / "report.html"
    assert (code, out) == (0, f"Report: runs/report.html\nOpen it in a browser: {page.as_uri()}\n")
    assert "Two methods learned the two tasks of blobs" in page.read_text()

    code, out, err = became("report", file, "--file", "mine.html")
    assert (code, err) == (0, "")
    text = (tmp_path / "mine.html").read_text()  # the study has gpm, too, but not this sgp
    assert "<h1>small</h1>" in text
    assert "One method learned the two tasks of blobs" in text
    code, out, err = became("report", file, "--file", "no/where.html")
    assert (code, err) == (
        2,
        "became: cannot write no/where.html: No such file or directory; choose another place with --file\n",
    )

    (spec,) = (tmp_path / "runs").glob("*.gpm.*/spec.json")
    code, out, _ = became("run", str(spec), "--out", "repeated")
    assert code == 0
    assert out.endswith(f"Run: repeated/{spec.parent.name}\n")
    first, again = (read_record(tmp_path / root / spec.parent.name / "record.json") for root in ("runs", "repeated"))
    assert again.accuracy == first.accuracy
    assert again.tasks[0].seconds != first.tasks[0].seconds


def test_the_same_method_by_two_names_is_one_row(became):
    code, out, _ = compare(became, "connector-2x,nscl-2x", "--tasks", "1")
    assert code == 0
    assert len(re.findall(r"^nscl-2x ", out, re.M)) == 1


@pytest.mark.usefixtures("unrendered")
def test_a_plugin_in_the_working_directory_is_found(became, tmp_path):
    (tmp_path / "plugin_beside.py").write_text(
        "from became_avalanche import GPMPlugin\n\n\nclass Mine(GPMPlugin):\n    pass\n"
    )
    code, out, err = compare(became, "plugin_beside:Mine,plugin_beside:Mine+became", "--tasks", "2")
    assert (code, "plugin_beside:Mine+became over plugin_beside:Mine: " in out) == (0, True), err


@pytest.mark.usefixtures("unrendered")
def test_hyperparameters_that_were_not_tuned_are_named(became, monkeypatch):
    untuned = catalogue.replace(BLOBS, untuned=frozenset({"ewc", "er", "owm"}))
    monkeypatch.setitem(catalogue.BENCHMARKS, "blobs", untuned)
    _, out, _ = compare(became, "gpm,ewc,owm", "--tasks", "1")
    assert "\nMethods with untuned default hyperparameters on this benchmark: ewc, owm\n" in out


def test_study_dry_run_and_status(became, file, tmp_path):
    code, out, _ = became("study", file, "--dry-run")
    assert code == 0
    assert out.splitlines()[0] == "blobs, gpm, seed 0: no estimate"
    assert out.splitlines()[-1] == "6 of 6 runs to train"
    assert became("status", file)[1].splitlines()[-1] == "6 runs: 6 missing"
    assert not (tmp_path / "runs").exists()

    assert compare(became, "gpm", "--tasks", "2")[0] == 0
    _, out, _ = became("study", file, "--dry-run")
    lines = out.splitlines()
    assert lines[0] == "blobs, gpm+became, seed 0: no estimate"
    assert re.fullmatch(r"blobs, SGP, weaker, seed 0: about \d+ s", lines[1])
    assert re.fullmatch(r"5 of 6 runs to train, about \d+ s and 2 runs without estimate", lines[-1])

    code, out, _ = became("study", file)
    assert code == 0
    rows = re.findall(r"^(.+?)  +\d+\.\d\d ± ", out, re.M)
    assert rows == ["gpm+became", "SGP, weaker", "gpm"]
    assert "2 seeds, mean ± standard deviation" in out
    assert {"small-table.csv", "small-comparison.png"} <= {path.name for path in (tmp_path / "runs").iterdir()}
    assert became("study", file, "--dry-run")[1] == "0 of 6 runs to train\n"
    _, out, _ = became("status", file)
    assert out.splitlines()[0] == "done         blobs, gpm, seed 0"
    assert out.splitlines()[-1] == "6 runs: 6 done"


def failing(name, error):
    """A step of a session that raises an error in the runs of one method."""
    step = Session.step

    def fail(self):
        if self.spec.method.name == name:
            raise error
        step(self)

    return fail


@pytest.mark.usefixtures("unrendered")
def test_one_failure_does_not_stop_the_others(became, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Session, "step", failing("gpm", ValueError("no reason")))
        code, out, err = compare(became, "gpm,sgp")
    assert code == 1
    assert "gpm, seed 0: failed: ValueError: no reason (1 of 2 runs)\n" in err
    assert err.endswith("\nSome runs failed. Rerun the same command to try them again.\n")
    assert re.search(r"^sgp +\d", out, re.M)
    code, _, err = compare(became, "gpm,sgp")
    assert code == 0
    assert "sgp" not in err


def test_divergence_is_a_result(became, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Session, "step", failing("gpm", DivergenceError("the loss is nan")))
        code, out, err = compare(became, "gpm,sgp")
    assert code == 0
    assert re.search(r"^gpm, seed 0: diverged: DivergenceError: the loss is nan.* \(1 of 2 runs\)$", err, re.M)
    assert "gpm: 1 of 1 run diverged" in out
    assert compare(became, "gpm,sgp")[2] == ""


@pytest.mark.usefixtures("unrendered")
def test_a_run_that_cannot_be_read_is_left_alone(became, tmp_path):
    compare(became, "gpm")
    (path,) = (tmp_path / "runs").glob("*/record.json")
    path.write_text("{")
    code, out, err = compare(became, "gpm,sgp")
    assert (code, path.read_text()) == (0, "{")
    assert re.search(r"^became: .*record\.json is corrupt: .*; this run is skipped$", err, re.M)
    assert not re.search(r"^gpm ", out, re.M)


@pytest.mark.usefixtures("unrendered")
def test_an_interrupt_says_how_to_resume(became, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Session, "step", failing("sgp", KeyboardInterrupt()))
        code, out, err = compare(became, "gpm,sgp,trgp")
    assert (code, out) == (130, "")
    assert err.endswith("became: interrupted; 1 of 3 runs are finished in runs. Rerun the same command to resume.\n")
    code, out, err = compare(became, "gpm,sgp,trgp")
    assert code == 0
    assert "gpm, seed" not in err
    assert "(3 of 3 runs)" in err


def test_presets_and_data_are_listed(became, tmp_path):
    code, out, err = became("presets")
    assert (code, err) == (0, "")
    assert "20-split-miniimagenet" in out
    assert "gpm: threshold 0.965" in became("presets", "5-datasets")[1]
    (tmp_path / "tiny-imagenet-200").mkdir()
    code, out, err = became("data", "--data", str(tmp_path))
    assert (code, err) == (0, "")
    assert "CIFAR-100: missing\n" in out
    assert f"TinyImageNet: incomplete or corrupt\n  {tmp_path}/tiny-imagenet-200" in out


def test_the_demo_compares_on_digits_and_writes_a_report(became, monkeypatch, tmp_path):
    """The trainings are replaced by made-up records: `make demo` itself takes a minute."""

    def train(study, out, **options):
        assert study.benchmarks == ["split-digits"]
        assert {"ewc", "gpm", "gpm-2x", "gpm+became"} <= {method.name for method in study.methods}
        assert options["engine"] == "processes"
        record = made_up("gpm", 0)
        (out / record.key).mkdir(parents=True)
        (out / record.key / "record.json").write_text(record.to_json())

    monkeypatch.setattr("became_avalanche.cli._run_study", train)
    code, out, _ = became("demo")
    assert code == 0
    assert "runs/demo/report.html" in out
    assert (tmp_path / "runs" / "demo" / "report.html").exists()

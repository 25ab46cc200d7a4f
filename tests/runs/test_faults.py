"""Accidents that could lose work. After each of them, everything that was finished is still there."""

import ctypes
import errno
import json
import os
import re
import subprocess
from contextlib import contextmanager
from dataclasses import replace

import pytest
from avalanche.training.plugins import SupervisedPlugin
from click.testing import CliRunner

from became_avalanche import GPMPlugin, Session, Store, find_benchmark
from became_avalanche.cli import became
from became_avalanche.results.record import read_records
from became_avalanche.runs import catalogue
from became_avalanche.runs.run import run
from became_avalanche.runs.store import StoreError
from became_avalanche.runs.study import status_of

from .conftest import contents, forked, how_it_ended, numbers, tiny

pytestmark = pytest.mark.usefixtures("unrendered")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "runs"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The record of a run that nothing disturbed."""
    return run(tiny("gpm", n_tasks=2, max_epochs=1), Store(tmp_path_factory.mktemp("whole")))


def compare(root, methods="finetune,gpm", **options):
    """``became compare`` in this process, with runs that take half a second."""
    settings = {"tasks": 2, "epochs": 1, "seeds": 1, **options}
    arguments = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return CliRunner().invoke(became, ["compare", "--methods", methods, "--out", str(root), *arguments])


def runs(root):
    """Method and status of all records."""
    return {(record.label, record.seed): record.status for record in read_records(root)}


def assert_kept(before, root):
    """Check that every file of every run is unchanged. Tables and figures may be new."""
    after = contents(root)
    assert before
    for name, content in before.items():
        if "/" in name:
            assert after[name] == content, name


def test_repeating_a_finished_command_trains_nothing(root, monkeypatch):
    first = compare(root)
    before = contents(root)
    monkeypatch.setattr(Session, "step", None)
    second = compare(root)
    assert (first.exit_code, second.exit_code) == (0, 0)
    assert second.stdout == first.stdout
    assert_kept(before, root)
    assert set(contents(root)) == set(before)


def test_other_methods_seeds_and_settings_are_runs_beside(root):
    assert compare(root, seeds=2).exit_code == 0
    before = contents(root)
    for change in (
        {"methods": "finetune,gpm,gpm+became"},
        {"methods": "gpm"},
        {"seeds": 1},
        {"epochs": 2},
        {"tasks": 1},
        {"benchmark": "permuted-digits"},
    ):
        assert compare(root, **change).exit_code == 0, change
        assert_kept(before, root)
        before = contents(root)
    assert len(read_records(root)) == 4 + 1 + 2 + 2 + 2


def test_a_changed_default_is_another_run_beside(root, monkeypatch):
    methods = "gpm,gpm+became"
    assert compare(root, methods).exit_code == 0
    before, old = contents(root), {record.key: record for record in read_records(root)}
    change_default(monkeypatch, GPMPlugin, "threshold", 0.5)
    result = compare(root, methods)
    assert result.exit_code == 0, result.output
    assert_kept(before, root)
    new = {record.key: record for record in read_records(root) if record.key not in old}
    assert set(new) == {f"{key}~2" for key in old}
    for key, record in new.items():
        assert record.spec["method"]["options"]["threshold"] == 0.5
        assert record.accuracy != old[key.removesuffix("~2")].accuracy
    merged = next(record for record in new.values() if record.method == "gpm+became")
    assert merged.references.baseline in new
    assert "gpm+became over gpm: " in result.output
    monkeypatch.undo()
    monkeypatch.setattr(Session, "step", None)
    assert compare(root, methods).exit_code == 0  # the old default finds the old runs


def change_default(monkeypatch, plugin, option, value):
    """Give an option of a plugin another default, as a later version of the package may."""
    init = plugin.__init__
    names = init.__code__.co_varnames[1 : init.__code__.co_argcount]
    defaults = list(init.__defaults__)
    defaults[names.index(option) - (len(names) - len(defaults))] = value
    monkeypatch.setattr(init, "__defaults__", tuple(defaults))


def test_results_of_version_0_1_are_left_alone(root):
    root.mkdir()
    old = json.dumps({"settings": {"benchmark": "split-digits"}, "runs": [{"method": "gpm", "accuracy": [[0.9]]}]})
    (root / "results.json").write_text(old)
    assert compare(root).exit_code == 0
    assert (root / "results.json").read_text() == old


# ------------------------------------------------------------------------------------------------ other processes


def test_a_run_that_another_study_trains_is_left_to_it(root):
    taken = find_benchmark("split-digits").spec("finetune", 0, n_tasks=2, max_epochs=1)
    folder = Store(root).open(taken)
    with folder.locked():
        result = compare(root)
        assert not (folder.path / "record.json").exists()
    assert result.exit_code == 1
    assert (
        f"finetune, seed 0: not finished: {folder.path} is being trained by process {os.getpid()} on " in result.stderr
    )
    assert runs(root) == {("gpm", 0): "done"}
    assert compare(root).exit_code == 0
    assert runs(root) == {("gpm", 0): "done", ("finetune", 0): "done"}


def test_two_studies_at_the_same_time_train_each_run_once(root):
    children = [forked(lambda: compare(root, "finetune,gpm,gpm-2x", seeds=2)) for _ in range(2)]
    assert [how_it_ended(pid) for pid in children] == [0, 0]
    assert set(runs(root).values()) == {"done"}
    assert len(runs(root)) == 6
    for record in read_records(root):
        log = (root / record.key / "log.txt").read_text()
        assert len(re.findall("started", log)) == len(re.findall("done", log)) == 1


# -------------------------------------------------------------------------------------------------- one bad run


def test_a_diverging_run_does_not_stop_the_others(root, monkeypatch):
    benchmark = find_benchmark("split-digits")
    explosive = replace(benchmark, recipes={"gpm": replace(benchmark.recipe, learning_rate=1e9)})
    monkeypatch.setitem(catalogue.BENCHMARKS, "split-digits", explosive)
    result = compare(root, "finetune,gpm,owm")
    assert runs(root) == {("finetune", 0): "done", ("gpm", 0): "diverged", ("owm", 0): "done"}
    assert "gpm, seed 0: diverged: " in result.stderr
    assert "gpm: 1 of 1 run diverged" in result.stdout
    assert result.exit_code == 0
    monkeypatch.setattr(Session, "step", None)
    assert compare(root, "finetune,gpm,owm").stdout == result.stdout  # it is finished: once more would be the same


class Failing(SupervisedPlugin):
    """A plugin with a fault."""

    repaired = False

    def before_training_exp(self, strategy, **kwargs):
        if not self.repaired and strategy.experience.current_experience == 1:
            raise ZeroDivisionError("a fault in a plugin")


def test_a_failing_run_does_not_stop_the_others_and_is_tried_again(root, monkeypatch):
    name = f"{__name__}:Failing"
    methods = f"finetune,{name},gpm"
    result = compare(root, methods)
    assert result.exit_code == 1
    assert runs(root) == {("finetune", 0): "done", (name, 0): "failed", ("gpm", 0): "done"}
    (failed,) = [record for record in read_records(root) if record.status == "failed"]
    assert "in before_training_exp" in failed.error
    assert f"{name}, seed 0: failed: ZeroDivisionError: a fault in a plugin" in result.stderr
    assert "ZeroDivisionError" in (root / failed.key / "log.txt").read_text()
    done = {name: content for name, content in contents(root).items() if not name.startswith(failed.key)}

    monkeypatch.setattr(Failing, "repaired", True)
    assert compare(root, methods).exit_code == 0
    assert set(runs(root).values()) == {"done"}
    assert_kept(done, root)
    (repaired,) = [record for record in read_records(root) if record.key == failed.key]
    assert repaired.resumed == [1]  # the task that was finished is not trained again
    plain = next(record for record in read_records(root) if record.label == "finetune")
    assert repaired.accuracy == plain.accuracy


# ------------------------------------------------------------------------------------------------- file systems


@contextmanager
def failing_writes(code, after):
    """A file system on which writing fails after a number of files."""
    fsync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > after:
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", full)
        yield


@pytest.mark.parametrize("after", range(5))
def test_a_disk_that_fills_up_keeps_what_is_finished(after, store, whole):
    spec = tiny("gpm", n_tasks=2, max_epochs=1)
    finished = tiny("finetune", n_tasks=2, max_epochs=1)
    run(finished, store)
    before = contents(store.root)
    with failing_writes(errno.ENOSPC, 2 * after), pytest.raises(StoreError, match="No space left on device"):
        run(spec, store)
    assert_kept(before, store.root)
    assert not list(store.root.rglob("*.tmp"))
    assert numbers(run(spec, store)) == numbers(whole)


def test_a_study_on_a_full_disk_says_so_and_ends(root):
    assert compare(root, "finetune").exit_code == 0
    before = contents(root)
    with failing_writes(errno.ENOSPC, 2):
        result = compare(root, "finetune,gpm,gpm-2x")
    assert result.exit_code != 0
    assert "No space left on device" in result.stderr
    assert_kept(before, root)
    assert compare(root, "finetune,gpm,gpm-2x").exit_code == 0


def in_own_mounts(tmp_path, options, work):
    """``work`` in a child process that sees a temporary file system at ``tmp_path``; the mount ends with the child."""
    if os.geteuid() != 0:
        pytest.skip("only root may mount a file system")

    def child():
        new_mount_namespace = 0x20000
        if ctypes.CDLL(None, use_errno=True).unshare(new_mount_namespace) != 0:
            os._exit(77)
        for command in (["--make-rprivate", "/"], ["-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path)]):
            if subprocess.run(["mount", *command], check=False).returncode != 0:
                os._exit(77)
        work()

    code = how_it_ended(forked(child))
    if code == 77:
        pytest.skip("this system does not let root mount a file system in a separate namespace")
    assert code == 0


def test_a_real_full_disk(tmp_path, whole):
    spec = tiny("gpm", n_tasks=2, max_epochs=1)
    finished = tiny("finetune", n_tasks=2, max_epochs=1)
    disk = tmp_path / "disk"
    disk.mkdir()

    def work():
        store = Store(disk / "runs")
        run(finished, store)
        before = contents(store.root)
        free = os.statvfs(disk)
        with open(disk / "ballast", "wb") as ballast:
            ballast.write(bytes(free.f_bavail * free.f_frsize - 40_000))  # a specification fits, a checkpoint does not
        with pytest.raises(StoreError, match="No space left on device"):
            run(spec, store)
        with pytest.raises(StoreError, match="No space left on device"):
            run(spec, store)
        assert_kept(before, store.root)
        (disk / "ballast").unlink()
        assert numbers(run(spec, store)) == numbers(whole)

    in_own_mounts(disk, "size=8m", work)


def test_a_read_only_folder(tmp_path):
    finished, other = (tiny(method, n_tasks=2, max_epochs=1) for method in ("finetune", "gpm"))
    disk = tmp_path / "disk"
    disk.mkdir()

    def work():
        store = Store(disk / "runs")
        run(finished, store)
        before = contents(store.root)
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        with pytest.raises(StoreError, match=r"cannot write to .*: Read-only file system; choose another folder"):
            store.make_writable()
        for spec in (finished, other):
            with pytest.raises(StoreError, match=r"cannot write to .*: Read-only file system"):
                run(spec, store)
        assert [status.state for status in status_of([finished, other], store)] == ["done", "missing"]
        assert contents(store.root) == before

    in_own_mounts(disk, "size=8m", work)


def test_a_read_only_folder_on_every_system(store):
    finished, other = (tiny(method, n_tasks=2, max_epochs=1) for method in ("finetune", "gpm"))
    run(finished, store)
    before = contents(store.root)
    with failing_writes(errno.EROFS, 0), pytest.raises(StoreError, match="Read-only file system"):
        run(other, store)
    assert_kept(before, store.root)

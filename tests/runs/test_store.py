"""The folder of a run: its lock, its files when they are damaged, and what is kept of them."""

import errno
import fcntl
import json
import os
import re
import shutil
import signal
import socket
import time
from pathlib import Path
from threading import Thread

import pytest

from became_avalanche import Session, Store
from became_avalanche.files import sealed_json
from became_avalanche.results.record import RecordError
from became_avalanche.runs.catalogue import find_benchmark
from became_avalanche.runs.method import Method
from became_avalanche.runs.run import run
from became_avalanche.runs.spec import Network, SpecError, read_spec
from became_avalanche.runs.store import RunFolder, StoreError
from became_avalanche.runs.study import status_of
from became_avalanche.strategy.statefile import write_state

from .conftest import contents, final_state, forked, how_it_ended, kill_at, kill_self, numbers, same, tiny

SPEC = tiny("gpm", max_epochs=1)


# ------------------------------------------------------------------------------------------------------------- lock


@pytest.fixture
def folder(store):
    return store.open(SPEC)


def test_the_lock_says_who_holds_it(folder):
    me = f"process {os.getpid()} on {socket.gethostname()}"
    assert folder.holder() is None
    with folder.locked():
        assert json.loads((folder.path / "lock").read_text()) == {"pid": os.getpid(), "host": socket.gethostname()}
        assert folder.holder() == me
        with pytest.raises(StoreError, match=f"{SPEC.key()} is being trained by {me}"), folder.locked(patience=0):
            pass
        assert folder.holder() == me
    assert folder.holder() is None
    with folder.locked(patience=0):
        pass


def test_a_locked_run_is_left_alone_and_status_says_who_trains_it(store, folder):
    with folder.locked():
        before = contents(store.root)
        with pytest.raises(StoreError, match="is being trained by process"):
            run(SPEC, store, patience=0)
        assert contents(store.root) == before
        (status,) = status_of([SPEC], store)
    assert status.state == "running"
    assert status.note == f"0 of 3 tasks, by process {os.getpid()} on {socket.gethostname()}"


def test_a_killed_process_leaves_no_lock_and_no_half_written_file(store, folder):
    def child():
        with folder.locked():
            (folder.path / f".checkpoint-001.safetensors.{os.getpid()}.tmp").write_bytes(b"half")
            kill_self()

    assert how_it_ended(forked(child)) == -signal.SIGKILL
    assert json.loads((folder.path / "lock").read_text())["host"] == socket.gethostname()  # it had no time to clear it
    assert folder.holder() is None
    assert run(SPEC, store).status == "done"
    assert not list(store.root.rglob(".*"))


def test_a_glance_at_the_lock_does_not_stop_a_run(folder):
    """``holder`` takes a shared lock for an instant. Here it takes it for longer."""
    (folder.path / "lock").touch()
    with open(folder.path / "lock") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        with pytest.raises(StoreError), folder.locked(patience=0):
            pass

        def glance():
            time.sleep(0.3)
            fcntl.flock(reader, fcntl.LOCK_UN)

        thread = Thread(target=glance)
        thread.start()
        with folder.locked():
            pass
        thread.join()


def test_a_file_system_without_locks_is_refused(folder, monkeypatch):
    def refuse(*args):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(StoreError, match=r"cannot lock .*: No locks available"), folder.locked():
        pass


# ------------------------------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run that was killed before its last checkpoint, with two checkpoints."""
    root = tmp_path_factory.mktemp("interrupted")

    def child():
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, RunFolder, "save_checkpoint", 3)
            run(SPEC, Store(root))

    assert how_it_ended(forked(child)) == -signal.SIGKILL
    return root


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The undisturbed run."""
    store = Store(tmp_path_factory.mktemp("whole"))
    run(SPEC, store)
    return store


@pytest.fixture
def resumable(interrupted, tmp_path):
    """A copy of the interrupted run."""
    shutil.copytree(interrupted, tmp_path / "runs", dirs_exist_ok=True)
    return Store(tmp_path / "runs")


def truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def empty(path):
    path.write_bytes(b"")


def foreign(path):
    path.write_bytes(b"not one of our files")


def of_another_kind(path):
    write_state(path, {"key": SPEC.key()}, kind="endpoints")


def of_another_run(path):
    write_state(path, {"key": "another"}, kind="checkpoint")


def newer(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("became_avalanche.strategy.statefile.SCHEMA", 99)
        write_state(path, {"key": SPEC.key()}, kind="checkpoint")


def of_another_version(path):
    """A valid file of this run whose state the plugins cannot load."""
    folder = RunFolder(path.parent)
    state = folder.read_checkpoint(path)
    state["strategy"]["plugins"][0][1]["surprise"] = 1
    write_state(path, state, kind="checkpoint")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncated, "truncated or corrupt"),
        (flipped, "corrupt"),
        (empty, "not a state file"),
        (foreign, "not a state file"),
        (of_another_kind, "a state of the kind 'endpoints', not 'checkpoint'"),
        (of_another_run, "belongs to another run, another"),
        (newer, "upgrade the package"),
        (of_another_version, "cannot be loaded: .*surprise"),
    ],
)
def test_a_damaged_checkpoint_costs_one_task_and_is_kept(resumable, whole, damage, message):
    folder = resumable.folder(SPEC)
    newest = folder.checkpoints()[0]
    damage(newest)
    damaged, events = newest.read_bytes(), []
    record = run(SPEC, resumable, report=events.append)
    assert (record.status, record.resumed) == ("done", [1])
    assert numbers(record) == numbers(whole.find(SPEC))
    assert same(final_state(resumable, SPEC), final_state(whole, SPEC))
    assert damaged in contents(folder.path).values()
    (note,) = [event.text for event in events if event.kind == "note"]
    assert str(newest) in note
    assert re.search(message, note)
    assert note in (folder.path / "log.txt").read_text()


def test_without_a_sound_checkpoint_it_starts_again(resumable, whole):
    folder = resumable.folder(SPEC)
    kept = []
    for path in folder.checkpoints():
        truncated(path)
        kept.append(path.read_bytes())
    record = run(SPEC, resumable)
    assert (record.status, record.resumed) == ("done", [])
    assert numbers(record) == numbers(whole.find(SPEC))
    assert all(content in contents(folder.path).values() for content in kept)


def test_a_damaged_checkpoint_of_a_later_task_does_not_push_out_sound_ones(resumable, whole):
    folder = resumable.folder(SPEC)
    later = folder.path / "checkpoint-009.safetensors"
    foreign(later)
    record = run(SPEC, resumable)
    assert (record.status, record.resumed) == ("done", [2])
    assert sorted(path.name for path in folder.checkpoints()) == [
        "checkpoint-003.safetensors",
        "checkpoint-009.safetensors",
    ]
    assert later.read_bytes() == b"not one of our files"


def test_two_damaged_checkpoints_of_one_task_are_both_kept(resumable):
    folder = resumable.folder(SPEC)
    newest = folder.checkpoints()[0]
    for text in (b"first", b"second"):
        newest.write_bytes(text)
        folder.save_checkpoint(2, {"key": SPEC.key()})
    assert {b"first", b"second"} < set(contents(folder.path).values())


def test_the_two_newest_checkpoints_are_kept_and_one_at_the_end(interrupted, whole):
    names = [path.name for path in Store(interrupted).folder(SPEC).checkpoints()]
    assert names == ["checkpoint-002.safetensors", "checkpoint-001.safetensors"]
    assert [path.name for path in whole.folder(SPEC).checkpoints()] == ["checkpoint-003.safetensors"]


# ---------------------------------------------------------------------------------------- records and specifications


def newer_json(path):
    path.write_text(sealed_json({**_bare(path), "schema_version": 99}))


def foreign_json(path):
    path.write_text('{"name": "someone else\'s file"}')


def changed_number(path):
    """A seed that a person has changed by hand."""
    path.write_text(path.read_text().replace('"seed": 0', '"seed": 1'))


def _bare(path):
    return {name: value for name, value in json.loads(path.read_text()).items() if name != "sha256"}


DAMAGES = {
    truncated: "corrupt",
    flipped: "corrupt",
    empty: "corrupt",
    foreign: "corrupt",
    foreign_json: "it has no schema_version",
    newer_json: "has schema version 99, .* upgrade the package",
    changed_number: "its content does not match its checksum",
}


@pytest.mark.parametrize("name", ["record.json", "spec.json"])
@pytest.mark.parametrize("state", ["finished", "interrupted"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_or_specification_is_refused_and_kept(damage, state, name, whole, resumable, tmp_path):
    store = resumable
    if state == "finished":
        shutil.copytree(whole.root, tmp_path / "finished")
        store = Store(tmp_path / "finished")
    path = store.folder(SPEC).path / name
    damage(path)
    before = contents(store.root)
    with pytest.raises((RecordError, SpecError), match=DAMAGES[damage]) as error:
        run(SPEC, store)
    assert str(path) in str(error.value)
    (status,) = status_of([SPEC], store)
    assert (status.state, status.note) == ("unreadable", str(error.value))
    assert contents(store.root) == before


def test_no_changed_byte_changes_a_record_unnoticed(whole, tmp_path):
    """The seventeenth digit of a number may change without changing the number."""
    folder = RunFolder(tmp_path / SPEC.key())
    folder.path.mkdir()
    sound = whole.folder(SPEC).record_path.read_bytes()
    noticed = 0
    for place in range(0, len(sound), max(1, len(sound) // 300)):
        content = bytearray(sound)
        content[place] ^= 1
        folder.record_path.write_bytes(content)
        try:
            assert folder.record() == whole.find(SPEC), content[max(0, place - 20) : place + 20]
        except RecordError:
            noticed += 1
    assert noticed > 250


def test_the_record_of_another_run_is_refused(store, whole):
    folder = store.open(SPEC)
    other = whole.find(SPEC).model_copy(update={"key": "another"})
    folder.record_path.write_text(other.to_json())
    before = contents(store.root)
    with pytest.raises(RecordError, match="belongs to another run, another"):
        run(SPEC, store)
    assert contents(store.root) == before


def test_a_record_without_specification_tells_which_run_it_is(whole, tmp_path, monkeypatch):
    shutil.copytree(whole.root, tmp_path / "runs")
    store = Store(tmp_path / "runs")
    (store.folder(SPEC).path / "spec.json").unlink()
    monkeypatch.setattr(Session, "step", None)
    assert numbers(run(SPEC, store)) == numbers(whole.find(SPEC))
    record = whole.find(SPEC)
    settings = {**record.spec, "eval_batch_size": 63}
    store.folder(SPEC).record_path.write_text(record.model_copy(update={"spec": settings}).to_json())
    assert store.folder(SPEC).path.name == f"{SPEC.key()}~2"


@pytest.mark.parametrize(("method", "name"), [("finetune+became", "~2"), ("finetune+constant", ""), ("gpm+became", "")])
def test_runs_that_left_the_new_head_out_of_the_merge_are_other_runs(tmp_path, method, name):
    """Their specification lacks the option. It matters without projection, and to rules with one λ of Eq. 20."""
    store, spec = Store(tmp_path), find_benchmark("split-digits").spec(method)
    values = json.loads(spec.to_json())
    del values["method"]["merge"]["options"]["new_head"], values["sha256"]
    store.open(spec)
    (tmp_path / spec.key() / "spec.json").write_text(sealed_json(values))
    assert store.folder(spec).path.name == spec.key() + name
    old = spec.with_method(Method.parse(method, merge={"options": {"new_head": "apart"}}))
    (tmp_path / spec.key()).rename(tmp_path / old.key())
    assert store.folder(old).path.name == old.key()


@pytest.mark.parametrize("fisher", ["batched", {"name": "batched", "n_samples": 100}])
@pytest.mark.parametrize(("network", "name"), [("alexnet", "~2"), ("mlp", "")])
def test_runs_that_estimated_fisher_information_in_eval_mode_are_other_runs(tmp_path, network, name, fisher):
    """Specifications of version 1 do not say so. Without dropout and batch normalisation both modes are the same."""
    method = Method.parse("gpm+became", merge={"options": {"fisher": fisher}})
    store, spec = Store(tmp_path), find_benchmark("split-digits").spec(method)
    spec = spec.model_copy(update={"network": Network(name=network)})
    path = store.open(spec).path / "spec.json"
    path.write_text(spec.to_json())
    assert store.folder(spec).path.name == spec.key()
    path.write_text(sealed_json({**_bare(path), "schema_version": 1}))
    assert store.folder(spec).path.name == spec.key() + name


def test_the_specification_of_a_folder_can_be_read(whole):
    assert read_spec(whole.folder(SPEC).path / "spec.json") == SPEC.completed()


def test_a_finished_record_is_never_overwritten(whole):
    record = whole.find(SPEC)
    before = contents(whole.root)
    with pytest.raises(StoreError, match="belongs to a finished run and is not overwritten"):
        whole.folder(SPEC).save_record(record)
    assert contents(whole.root) == before


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = Store(Path(tmp_path / "file" / "runs"))
    with pytest.raises(StoreError, match=r"cannot write to .*; choose another folder"):
        store.make_writable()
    with pytest.raises(StoreError, match="cannot write to"):
        run(SPEC, store)


def test_a_run_is_found_under_any_label(store):
    spec = tiny("gpm")
    store.open(spec).keep_spec(spec)
    labelled = spec.model_copy(update={"method": spec.method.model_copy(update={"label": "mine"})})
    assert store.folder(labelled).path == store.folder(spec).path

"""A run that is killed at any instant ends with bitwise the numbers and weights of the undisturbed run."""

import os
import random
import signal
import time

import pytest

from became_avalanche import Session, Store
from became_avalanche.runs.run import Local, run
from became_avalanche.runs.store import RunFolder
from became_avalanche.runs.study import status_of
from became_avalanche.strategy.statefile import read_state

from .conftest import final_state, forked, how_it_ended, kill_at, numbers, same, tiny

METHODS = ("gpm+became", "trgp+became", "nscl+became", "connector")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The store with the undisturbed run of a method, and the seconds that it took."""
    made = {}

    def of(spec):
        if spec.key() not in made:
            store, start = Store(tmp_path_factory.mktemp("undisturbed")), time.perf_counter()
            run(spec, store)
            made[spec.key()] = store, time.perf_counter() - start
        return made[spec.key()]

    return of


def kill_in_training(monkeypatch, call):
    import torch

    kill_at(monkeypatch, torch.optim.SGD, "step", 15 * call)


def kill_in_fisher(monkeypatch, call):
    from became_avalanche.merging import fisher

    kill_at(monkeypatch, fisher._Counted, "__iter__", call)


def kill_in_merge(monkeypatch, call):
    from became_avalanche.plugins import connector

    kill_at(monkeypatch, connector, "interpolate", call)


def kill_in_checkpoint(monkeypatch, call):
    """While the bytes of a file are on their way to the disk. The first file is the specification."""
    kill_at(monkeypatch, os, "fsync", 1 + call)


def kill_before_rename(monkeypatch, call):
    kill_at(monkeypatch, os, "replace", 1 + call)


def kill_after_rename(monkeypatch, call):
    kill_at(monkeypatch, os, "replace", 1 + call, after=True)


def killed(spec, store, moment, call):
    """Train in a child process that is killed; returns how it ended."""

    def child():
        with pytest.MonkeyPatch.context() as patch:
            moment(patch, call)
            run(spec, store)

    return how_it_ended(forked(child))


def killed_after(spec, store, seconds):
    pid = forked(lambda: run(spec, store))
    time.sleep(seconds)
    os.kill(pid, signal.SIGKILL)
    return how_it_ended(pid)


def assert_same_as(undisturbed, spec, store):
    """Bring the run to its end and compare it with the undisturbed one."""
    record = run(spec, store)
    whole, _ = undisturbed(spec)
    assert record.status == "done"
    assert numbers(record) == numbers(whole.find(spec))
    assert same(final_state(store, spec), final_state(whole, spec))
    assert not list(store.root.rglob("*.tmp"))
    return record


@pytest.mark.parametrize("method", METHODS)
def test_killed_in_training_in_a_merge_and_while_writing(method, store, undisturbed):
    spec = tiny(method)
    in_merge = kill_in_merge if method == "connector" else kill_in_fisher
    for moment, call in ((kill_in_training, 2), (in_merge, 1), (kill_in_checkpoint, 2)):
        assert killed(spec, store, moment, call) == -signal.SIGKILL
    assert_same_as(undisturbed, spec, store)


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_killed_at_twenty_moments(method, tmp_path, undisturbed):
    """Each run is killed at a random time and in a random function, and ends undisturbed at last."""
    spec = tiny(method)
    _, seconds = undisturbed(spec)
    chosen, kills = random.Random(method), 0
    in_merge = kill_in_merge if method == "connector" else kill_in_fisher
    moments = (kill_in_training, in_merge, kill_in_checkpoint, kill_before_rename, kill_after_rename)
    for n in range(40):
        store = Store(tmp_path / f"{n}")
        codes = [
            killed_after(spec, store, chosen.uniform(0, seconds)),
            killed(spec, store, moments[n % len(moments)], call=chosen.randint(1, 3)),
        ]
        assert set(codes) <= {-signal.SIGKILL, 0}  # 0 if the run has ended before the moment came
        kills += codes.count(-signal.SIGKILL)
        assert_same_as(undisturbed, spec, store)
        if kills >= 20:
            return
    pytest.fail(f"only {kills} kills came before the end of a run")


def test_resume_continues_after_the_last_finished_task(store, undisturbed):
    spec = tiny("gpm+became")
    assert killed(spec, store, kill_in_fisher, 2) == -signal.SIGKILL  # the first estimate in the second task
    (status,) = status_of([spec], store)
    assert (status.state, status.note) == ("interrupted", "1 of 3 tasks, resumes after task 1")
    events = []
    record = run(spec, store, report=events.append)
    assert record.resumed == [1]
    assert [event.task for event in events if event.kind == "stage"] == [2, 2, 3, 3]
    assert_same_as(undisturbed, spec, store)


def test_killed_after_the_last_checkpoint_trains_nothing_again(store, undisturbed, monkeypatch):
    spec = tiny("gpm")
    assert killed(spec, store, kill_after_rename, 5) == -signal.SIGKILL  # 3 checkpoints and 2 records
    undisturbed(spec)
    monkeypatch.setattr(Session, "step", None)
    assert assert_same_as(undisturbed, spec, store).resumed == [3]


def test_a_run_with_endpoints_keeps_them_all(store, tmp_path):
    spec, local = tiny("gpm+became"), Local(keep="endpoints")
    whole = Store(tmp_path / "whole")
    run(spec, whole, local)

    def child():
        with pytest.MonkeyPatch.context() as patch:
            kill_at(patch, RunFolder, "save_checkpoint", 3)
            run(spec, store, local)

    assert how_it_ended(forked(child)) == -signal.SIGKILL
    run(spec, store, local)
    names = sorted(path.name for path in whole.folder(spec).path.glob("endpoints-*"))
    assert names == ["endpoints-002.safetensors", "endpoints-003.safetensors"]
    for name in names:
        one, other = (read_state(where.folder(spec).path / name, kind="endpoints") for where in (store, whole))
        assert same(one, other)


@pytest.mark.filterwarnings("ignore:__array_wrap__ must accept:DeprecationWarning")  # Avalanche's SI with NumPy 2
@pytest.mark.parametrize("method", ["ewc", "si", "lwf", "finetune+became", "gpm-2x"])
def test_other_methods_resume_bitwise(method, store, undisturbed):
    spec = tiny(method)
    assert killed(spec, store, kill_before_rename, 4) == -signal.SIGKILL  # the record of the second task
    assert assert_same_as(undisturbed, spec, store).resumed == [2]


@pytest.mark.parametrize("method", ["agem", "er"])
def test_methods_with_a_buffer_start_again_and_status_says_so(method, store, undisturbed):
    spec = tiny(method)
    assert killed(spec, store, kill_before_rename, 2) == -signal.SIGKILL  # the record of the second task
    (status,) = status_of([spec], store)
    assert (status.state, status.note) == ("interrupted", "1 of 3 tasks, restarts from the first task")
    record = run(spec, store)
    whole, _ = undisturbed(spec)
    assert (record.status, record.resumed) == ("done", [])
    assert numbers(record) == numbers(whole.find(spec))

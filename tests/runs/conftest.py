"""Small runs, and processes that are killed in the middle of them."""

import os
import signal
import sys
import traceback
import warnings

import pytest
import torch

from became_avalanche import Store, find_benchmark


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "runs")


def tiny(method="gpm+became", seed=0, **fields):
    """A run that takes a second: three tasks of two digits."""
    return find_benchmark("split-digits").spec(method, seed, **{"n_tasks": 3, "max_epochs": 2, **fields})


def forked(work):
    """Start ``work`` in a forked child process, and return its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch has threads, but the child uses only one
        pid = os.fork()
    if pid == 0:
        code = 1
        try:
            torch.set_num_threads(1)
            work()
            code = 0
        except BaseException:
            traceback.print_exc(file=sys.__stderr__)
        finally:
            os._exit(code)
    return pid


def how_it_ended(pid):
    """Wait for a child, and return its exit code, or minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def kill_at(monkeypatch, owner, name, call, after=False):
    """Kill this process at a call of a function: before the call, or after it if ``after``.

    :param call: which call, counted from 1.
    """
    original, calls = getattr(owner, name), []

    def killing(*args, **kwargs):
        calls.append(name)
        if len(calls) == call and not after:
            kill_self()
        result = original(*args, **kwargs)
        if len(calls) == call:
            kill_self()
        return result

    monkeypatch.setattr(owner, name, killing)


def numbers(record):
    """The content of a record without times, memory sizes and resumptions."""
    content = record.model_dump(exclude={"peak_memory_bytes", "resumed", "environment"})
    for task in content["tasks"]:
        del task["seconds"]
        for stage in task["stages"]:
            del stage["seconds"]
    for merge in content["merges"]:
        del merge["seconds"]
    return content


def final_state(store, spec):
    """The state after the last task."""
    folder = store.folder(spec)
    return folder.read_checkpoint(folder.checkpoints()[0])["strategy"]


def same(one, other):
    """Whether two nested structures are bitwise equal, except for times."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.stride() == other.stride() and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one if key != "seconds")
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other or one != one


def contents(folder):
    """The bytes of every file in a folder, except locks and logs, which every process writes."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in ("lock", "log.txt"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}

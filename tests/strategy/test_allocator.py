import platform
import subprocess
import sys

import pytest

from became_avalanche import keep_freed_memory
from became_avalanche.strategy import allocator

SCRIPT = """
import resource
from became_avalanche import keep_freed_memory
def faults(warm_up):
    for _ in range(warm_up):  # until the heap is large enough
        b"1" * 40_000_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        b"1" * 40_000_000
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
given_back = faults(1)
assert keep_freed_memory()
print(given_back, faults(15))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_used_again():
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True)
    given_back, kept = map(int, run.stdout.split())
    assert kept < 100
    assert given_back > 1000


def test_nothing_happens_elsewhere(monkeypatch):
    def refuse(name):
        raise OSError("no such library")

    monkeypatch.setattr(allocator.ctypes, "CDLL", refuse)
    assert not keep_freed_memory()
    monkeypatch.undo()
    monkeypatch.setattr(allocator.sys, "platform", "darwin")
    assert not keep_freed_memory()

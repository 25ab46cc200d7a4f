import platform
import subprocess
import sys

import pytest

from became_avalanche import keep_freed_memory
from became_avalanche.strategy import allocator

SCRIPT = """
import resource, sys, torch
from became_avalanche import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(15):  # until the heap is large enough
    torch.ones(10_000_000)
before = faults()
for _ in range(10):
    torch.ones(10_000_000)
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_freed_memory_is_used_again():
    kept, given_back = (
        int(subprocess.run([sys.executable, "-c", SCRIPT, way], capture_output=True, check=True).stdout)
        for way in ("keep", "give back")
    )
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

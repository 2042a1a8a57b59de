"""Memory that is freed stays with the process, if the C library can be told so."""

import subprocess
import sys

import pytest

from polyscale import _memory

_STEPS = """
import resource, sys
import torch
from polyscale._memory import keep_freed_memory
if sys.argv[1] == "kept":
    assert keep_freed_memory()
def step():
    torch.ones(2**24)  # 64 MiB: 16,384 pages
for _ in range(20):  # until the blocks beside each other are one
    step()
faults = []
for _ in range(5):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(faults)[2])  # the system may take pages away once
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts page faults of glibc")
def test_a_freed_tensor_is_used_again_without_page_faults():
    def faults(how: str) -> int:
        command = [sys.executable, "-c", _STEPS, how]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return int(done.stdout)

    assert faults("kept") < 250
    assert faults("returned") > 15_000


def test_another_c_library_is_left_alone(monkeypatch):
    def none(name):
        raise OSError("no C library")

    monkeypatch.setattr(_memory.ctypes, "CDLL", none)
    monkeypatch.setattr(_memory, "_kept", False)
    assert not _memory.keep_freed_memory()
    assert not _memory.keeps_freed_memory()

"""Building the native kernel: once, safely, and never in the way."""

import pwd
import shlex
import subprocess
import sys

import pytest
import torch

import polyscale as ps
from polyscale.ops.hkt.native.library import LIBRARY
from polyscale.ops.native import compiler as compilers
from polyscale.ops.native import library as libraries
from tests.ops.hkt.cases import random_case


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """A process that has built nothing yet, with a cache of its own."""
    monkeypatch.setenv("POLYSCALE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(libraries, "_LOADED", {})
    return monkeypatch


def compiler(tmp_path, script, name="compiler"):
    """A program that stands in for the compiler and notes every call."""
    program = tmp_path / name
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path / "calls"}\n{script}\n')
    program.chmod(0o755)
    return str(program)


def calls(tmp_path):
    noted = tmp_path / "calls"
    return noted.read_text().splitlines() if noted.exists() else []


def native():
    (found,) = [
        found
        for found in ps.implementations()
        if (found.operation, found.name) == ("hkt_attention", "native")
    ]
    return found


def assert_left_to_sdpa(reason):
    case = random_case(9, 2, dtype=torch.float32)
    assert torch.equal(ps.hkt_attention(*case), ps.hkt_attention(*case, impl="sdpa"))
    with pytest.raises(ValueError, match=f"native.*{reason}"):
        ps.hkt_attention(*case, impl="native")
    assert not native().available
    assert reason in native().reason


def test_without_a_compiler_auto_is_sdpa_and_native_says_why(fresh):
    fresh.delenv("CXX", raising=False)
    fresh.setenv("PATH", "")
    assert not native().available  # also before anything was tried
    assert_left_to_sdpa("compiler found")


def test_a_compiler_that_does_not_exist_is_named(fresh):
    fresh.setenv("CXX", "/nowhere/g++")
    assert_left_to_sdpa("/nowhere/g")


def test_a_compiler_that_fails_is_asked_once_and_quoted(fresh, tmp_path):
    fresh.setenv("CXX", compiler(tmp_path, 'echo "fatal error: out of ideas" >&2; exit 1'))
    assert native().available  # a compiler is there; more is known after the first use
    assert_left_to_sdpa("out of ideas")
    made = len(calls(tmp_path))
    assert made > 0
    assert_left_to_sdpa("out of ideas")
    assert len(calls(tmp_path)) == made
    assert not list((tmp_path / "cache").glob("*.so"))


def test_a_cache_that_cannot_be_written_is_a_reason_too(fresh, tmp_path):
    (tmp_path / "file").write_text("")
    fresh.setenv("POLYSCALE_CACHE", str(tmp_path / "file" / "below"))
    fresh.setenv("CXX", compiler(tmp_path, "exit 0"))
    assert_left_to_sdpa("file")


def test_looking_at_what_is_available_builds_nothing(fresh, tmp_path):
    fresh.setenv("CXX", compiler(tmp_path, "exit 0"))
    assert native().available
    assert "builds it on first use" in native().reason
    assert calls(tmp_path) == []


def test_without_a_home_directory_auto_is_sdpa_and_native_says_why(fresh, tmp_path):
    """As in a container that runs under a number without an entry."""

    def unknown(user):
        raise KeyError(user)

    for name in ("POLYSCALE_CACHE", "XDG_CACHE_HOME", "HOME"):
        fresh.delenv(name, raising=False)
    fresh.setattr(pwd, "getpwuid", unknown)
    fresh.setenv("CXX", compiler(tmp_path, "exit 0"))
    assert not native().available  # also before anything was tried
    assert_left_to_sdpa("this user has none: set HOME or POLYSCALE_CACHE")


def test_a_cache_where_others_can_write_is_a_reason_too(fresh, tmp_path):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(0o777)
    fresh.setenv("CXX", compiler(tmp_path, "exit 0"))
    assert not native().available
    assert_left_to_sdpa("can be written by other users")
    assert calls(tmp_path) == []


def test_a_compiler_that_hangs_is_a_reason_too(fresh, tmp_path):
    fresh.setenv("CXX", compiler(tmp_path, "sleep 60"))
    fresh.setattr(compilers, "TIME_LIMIT", 0.2)
    assert_left_to_sdpa("did not finish within 0.2 s")


REAL = compilers.find_compiler()
needs_a_compiler = pytest.mark.skipif(REAL is None, reason=f"{compilers.missing_compiler()}")

# Without optimisation: what is tested is the building.
QUICK = f'exec {shlex.join(REAL or ())} "$@" -O0'


@needs_a_compiler
def test_two_processes_that_start_together_build_once_and_a_broken_library_is_replaced(
    fresh, tmp_path
):
    fresh.setenv("CXX", compiler(tmp_path, QUICK))
    script = (
        "from polyscale.ops.hkt.native.library import LIBRARY; "
        "print(LIBRARY.load().hkt_arguments_size())"
    )
    together = [
        subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    printed = [process.communicate(timeout=300) for process in together]
    assert [process.returncode for process in together] == [0, 0], printed
    assert printed[0][0] == printed[1][0]
    messages = [errors.count("building the native library") for _, errors in printed]
    assert sorted(messages) == [0, 1]
    (library,) = (tmp_path / "cache").glob("*.so")
    assert sum("-shared" in call for call in calls(tmp_path)) == 1

    library.write_bytes(b"not a library")
    assert LIBRARY.why_not_built() is None
    case = random_case(9, 2, dtype=torch.float32)
    exact = ps.hkt_attention(*case, impl="reference")
    assert torch.allclose(ps.hkt_attention(*case, impl="native"), exact, atol=1e-5)
    assert sum("-shared" in call for call in calls(tmp_path)) == 2


def test_the_name_changes_with_the_compiler(fresh, tmp_path):
    one = compiler(tmp_path, "echo version 1", "one")
    two = compiler(tmp_path, "echo version 2", "two")
    names = {LIBRARY.file_name((one,)), LIBRARY.file_name((two,))}
    assert len(names | {LIBRARY.file_name((two, "-m64"))}) == 3

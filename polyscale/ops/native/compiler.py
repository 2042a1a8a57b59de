"""The C++ compiler: which one, and running it within a time limit."""

import os
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress

# Seconds for all commands that run together. A build takes about ten seconds, a minute on a slow
# machine; one that takes ten minutes hangs.
TIME_LIMIT = 600.0

Command = tuple[str, ...]


class BuildError(RuntimeError):
    """Why there is no native library."""


def find_compiler() -> Command | None:
    """`$CXX` with its options if it is set, otherwise the first of g++, clang++ and c++ found.

    >>> os.environ["CXX"] = "g++ -m64"  # doctest: +SKIP
    >>> find_compiler()  # doctest: +SKIP
    ('/usr/bin/g++', '-m64')
    """
    if os.name == "nt":
        return None
    chosen = os.environ.get("CXX")
    candidates = [[chosen], _split(chosen)] if chosen else [["g++"], ["clang++"], ["c++"]]
    for program, *options in filter(None, candidates):
        found = shutil.which(program)
        if found:
            return (found, *options)
    return None


def _split(command: str) -> list[str]:
    """The words of a shell command; none if its quotes do not balance."""
    try:
        return shlex.split(command)
    except ValueError:
        return []


def missing_compiler() -> str:
    """Why `find_compiler` found none."""
    if os.name == "nt":
        return "native needs a POSIX system"
    chosen = os.environ.get("CXX")
    if chosen:
        return f"$CXX is {chosen!r}, which does not begin with a program"
    return "no C++ compiler found (looked for $CXX, g++, clang++, c++)"


def run_together(commands: Sequence[Command]) -> list[str]:
    """Run commands side by side and return what each printed.

    `BuildError` quotes the first error, or says that the time limit has passed. No command is left
    running, even if this process is interrupted.
    """
    deadline = time.monotonic() + TIME_LIMIT
    running: list[subprocess.Popen] = []
    printed, complaints = [], []
    try:
        for command in commands:
            running.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                    errors="replace",
                    # A separate process group, as a compiler starts other programs.
                    start_new_session=True,
                )
            )
        while running:
            output, errors = running[0].communicate(timeout=max(0.0, deadline - time.monotonic()))
            job = running.pop(0)
            printed.append(output)
            if job.returncode != 0:
                lines = [line for line in errors.splitlines() if "error" in line.lower()]
                complaints.append((lines or errors.splitlines() or ["no message"])[0])
    except subprocess.TimeoutExpired:
        program = commands[0][0]
        raise BuildError(
            f"{program} did not finish within {TIME_LIMIT:g} s and was stopped; "
            "check it, or set CXX to another compiler"
        ) from None
    finally:
        for job in running:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(job.pid, signal.SIGKILL)
            job.communicate()
    if complaints:
        raise BuildError(f"building failed: {complaints[0]}")
    return printed

"""Locks on folders that several processes write into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock

LOCK_NAME = ".lock"


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder; waits for as long as another process holds it.

    What is read and written under the lock is then never older than what another process wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / LOCK_NAME):
        yield

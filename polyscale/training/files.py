"""Files that are either whole or not there."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock

from polyscale._files import follow_umask

LOCK_NAME = ".lock"
_UNFINISHED = ".unfinished-report-"
_ABANDONED = 3600.0  # seconds after which an unfinished report is taken to be of a killed process


def write_text(path: Path, text: str) -> None:
    """Write a file at once: a crash or a full disk leaves the previous one as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        follow_umask(Path(partial))
        os.replace(partial, path)
    except BaseException:
        Path(partial).unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write JSON at once; NaN is refused, because JSON readers do."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_together(files: Mapping[Path, str]) -> None:
    """Write files that belong together: all are finished before the first takes its place."""
    folder = next(iter(files)).parent
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_UNFINISHED}*"):
        with suppress(FileNotFoundError):  # another process may be about to finish it
            if time.time() - left.stat().st_mtime > _ABANDONED:
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_UNFINISHED) as unfinished:
        finished = {path: Path(unfinished) / str(number) for number, path in enumerate(files)}
        for path, place in finished.items():
            write_text(place, files[path])
        for path, place in finished.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(place, path)


@contextmanager
def sole_use(folder: Path) -> Iterator[None]:
    """Wait until no other process writes into a folder, and keep others out.

    What is read and written inside is then never older than what another process wrote.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / LOCK_NAME):
        yield


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when all is written and disappears if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        yield partial
        for file in partial.rglob("*"):
            if file.is_file():
                follow_umask(file)
                with file.open("rb") as opened:
                    os.fsync(opened.fileno())
        if path.exists():
            shutil.rmtree(path)
        os.rename(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise

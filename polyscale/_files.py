"""Files that are written whole or not at all; the standard library alone."""

from __future__ import annotations

import glob
import json
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_UNFINISHED = ".unfinished"
_UNFINISHED_REPORT = ".unfinished-report-"
_ABANDONED = 3600.0  # seconds after which an unfinished file is taken to be a killed process's


def follow_umask(file: Path) -> None:
    """Give a file the mode of any other new one: temporary files and safetensors have 0600."""
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a file in one step: a crash or a full disk leaves the previous one as it was.

    The folder must exist. What a killed process left unfinished there is removed.
    """
    _remove_abandoned(path.parent, f".{glob.escape(path.name)}.*{_UNFINISHED}")
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{_UNFINISHED}")
    try:
        with partial.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Replace a text file in one step, in UTF-8; folders that are missing are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, text.encode())


def write_json(path: Path, content: Any) -> None:
    """Replace a JSON file in one step; NaN is refused, because JSON readers refuse it."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def write_together(files: Mapping[Path, str]) -> None:
    """Replace files that belong together: all are complete before the first is replaced."""
    folder = next(iter(files)).parent
    folder.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(folder, f"{_UNFINISHED_REPORT}*")
    with tempfile.TemporaryDirectory(dir=folder, prefix=_UNFINISHED_REPORT) as unfinished:
        finished = {path: Path(unfinished) / str(number) for number, path in enumerate(files)}
        for path, place in finished.items():
            write_text(place, files[path])
        for path, place in finished.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(place, path)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill: it gets its name when everything is written, and is removed on an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a killed process
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


def _remove_abandoned(folder: Path, pattern: str) -> None:
    for left in folder.glob(pattern):
        with suppress(FileNotFoundError):  # another process may be removing or renaming it
            if time.time() - left.stat().st_mtime > _ABANDONED:
                if left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink()

"""Where this library keeps what it makes once: built kernels and generated data."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

CACHE_VARIABLE = "POLYSCALE_CACHE"
_ADVICE = f"set {CACHE_VARIABLE} to a folder of your own"


def cache_folder() -> Path:
    """`$POLYSCALE_CACHE`, or the platform's place for such; an OSError says why there is none."""
    chosen = os.environ.get(CACHE_VARIABLE)
    try:
        if chosen:
            return Path(chosen).expanduser()
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Caches" / "polyscale"
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyscale"
    except RuntimeError as error:  # HOME is not set, and the user has no entry
        raise OSError(
            "the cache folder needs a home directory, and this user has none: "
            f"set HOME or {CACHE_VARIABLE}"
        ) from error


def make_folder(folder: Path) -> None:
    """Make the folder and those above it that are missing, for this user alone."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o700, exist_ok=True)  # whatever the umask allows others


def why_not_private(path: Path, status: os.stat_result) -> str | None:
    """Why others could have put something there; None if only this user can write to it."""
    user = os.geteuid()
    if status.st_uid != user:
        return f"{path} belongs to user id {status.st_uid}, not to yours ({user}): {_ADVICE}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(status.st_mode)
        return (
            f"{path} can be written by other users (mode {mode:03o}): "
            f"chmod go-w {path}, or {_ADVICE}"
        )
    return None

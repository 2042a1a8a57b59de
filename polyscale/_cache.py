"""Where this library keeps what it makes once: built kernels and generated data."""

from __future__ import annotations

import os
import sys
from pathlib import Path

CACHE_VARIABLE = "POLYSCALE_CACHE"


def cache_folder() -> Path:
    """`$POLYSCALE_CACHE`, or the platform's place for such."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "polyscale"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "polyscale"

"""What written files have in common; the standard library alone."""

from __future__ import annotations

import os
from pathlib import Path


def follow_umask(file: Path) -> None:
    """Give a file the mode of any other new one: temporary files and safetensors have 0600."""
    mask = os.umask(0)
    os.umask(mask)
    file.chmod(0o666 & ~mask)

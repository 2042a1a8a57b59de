"""Images of users: opened with Pillow, which runs no code of theirs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

from polyscale._extras import require

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")


def open_image(content: bytes, name: str = "image") -> Any:
    """An image of Pillow, decoded; a ValueError if it cannot be."""
    pillow = require("PIL.Image", "train", "reading images")
    # A damaged file can raise almost any error: each format has a parser of its own.
    try:
        image = pillow.open(io.BytesIO(content), formats=_FORMATS)
        image.load()
    except Exception as error:
        reason = " ".join(str(error).split()).replace(repr(io.BytesIO), "").split(" <_io")[0]
        raise ValueError(f"{name} must be an image that can be read, got: {reason}") from error
    return image


def read_image(path: Path) -> bytes:
    """The bytes of an image file that can be decoded."""
    content = path.read_bytes()
    open_image(content, str(path))
    return content

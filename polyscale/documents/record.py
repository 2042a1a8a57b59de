"""Records to trees: dicts of texts, numbers, images and what nests them."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from polyscale.documents.building import NUMBER, DocumentBuilder, Reading
from polyscale.documents.document import Document
from polyscale.documents.text import Text

PIXELS = "pixels"


def read_record(
    record: Mapping[str, Any],
    reading: Reading | None = None,
    *,
    image_size: int = 32,
    patch_size: int = 8,
) -> Document:
    """Read a dict of fields: texts, numbers, images (PIL or arrays [H, W, C]), lists and dicts.

    >>> read_record({"title": "Old house", "price": 3.5, "tags": ["brick"]}).values
    ['Old', 'house', 3.5, 'brick']
    """
    if not isinstance(record, Mapping) or not record:
        raise TypeError(f"record must be a dict with at least one field, got {record!r}")
    builder = DocumentBuilder("record", reading or Reading())
    # A stack of what is still to be read, not recursion; None closes a node.
    waiting: list[tuple[str | None, Any] | None] = _fields(record, "record")[::-1]
    while waiting:
        item = waiting.pop()
        if item is None:
            builder.close()
            continue
        key, value = item
        kind = "field" if key is not None else "item"
        if isinstance(value, Mapping):
            builder.open(kind, domain="keyed", key=key)
            waiting += [None, *_fields(value, repr(key))[::-1]]
        elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            builder.open(kind, key=key)
            waiting += [None, *[(None, one) for one in reversed(value)]]
        else:
            builder.open(kind, key=key)
            _value(builder, value, key, image_size, patch_size)
            builder.close()
    return builder.finish()


def _fields(record: Mapping[str, Any], where: str) -> list[Any]:
    for name in record:
        if not isinstance(name, str):
            raise TypeError(f"the names of the fields of {where} must be str, got {name!r}")
    return list(record.items())


def _value(
    builder: DocumentBuilder, value: Any, key: str | None, image_size: int, patch_size: int
) -> None:
    if value is None:
        return
    if isinstance(value, (str, bool)):
        text = Text()
        text.add(str(value), -1, -1)
        builder.prose(text)
    elif isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0:
        builder.leaf("number", float(value), -1, -1, NUMBER)
    elif hasattr(value, "convert") or getattr(value, "ndim", 0) in (2, 3):
        for line in image_patches(value, image_size, patch_size):
            builder.open("line")
            for patch in line:
                builder.leaf("patch", patch, -1, -1, PIXELS)
            builder.close()
    else:
        raise TypeError(
            f"field {key!r} must be a text, a number, an image, or a list or dict of them, "
            f"got {type(value).__name__}"
        )


def image_patches(image: Any, image_size: int, patch_size: int) -> Tensor:
    """Return the patches of an image as [rows, columns, 3 * patch_size ** 2], from -1 to 1."""
    if hasattr(image, "convert"):
        image = image.convert("RGB")
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        pixels = pixels.reshape(image.height, image.width, 3)
    else:
        pixels = torch.as_tensor(image)
        pixels = pixels[..., None] if pixels.dim() == 2 else pixels
        pixels = pixels.expand(*pixels.shape[:2], 3) if pixels.shape[2] == 1 else pixels
    if pixels.shape[2] != 3 or not pixels.numel():
        raise ValueError(f"an image must have shape [H, W], [H, W, 1 or 3], got {image.shape}")
    scale = 255 if pixels.dtype == torch.uint8 else 1
    planes = pixels.float().div(scale).mul(2).sub(1).permute(2, 0, 1)[None]  # [1, 3, H, W]
    planes = torch.nn.functional.interpolate(
        planes, (image_size, image_size), mode="bilinear", antialias=True
    )
    side = image_size // patch_size
    patches = planes.reshape(3, side, patch_size, side, patch_size)
    return patches.permute(1, 3, 0, 2, 4).reshape(side, side, -1)

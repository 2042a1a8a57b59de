"""Checks of the options that tasks take."""

from __future__ import annotations

from typing import Any


def whole(name: str, value: Any, least: int) -> int:
    """`value`, if it is a whole number of at least `least`.

    >>> whole("length", 16, 1)
    16
    """
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} takes a whole number, got {value!r}")
    if value < least:
        raise ValueError(f"{name} takes at least {least}, got {value}")
    return value

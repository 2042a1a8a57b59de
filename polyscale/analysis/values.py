"""From tensors to the plain values that JSON can hold."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

DIGITS = 6


class MapRows(list[list[float]]):
    """Rows of a map, rounded already: too many numbers to walk through again."""


def as_json(value: Any, digits: int = DIGITS) -> Any:
    """Tensors, tuples and numbers as lists and rounded numbers; None for nan and infinity.

    >>> import torch
    >>> as_json({"a": torch.tensor([1.23456789, float("inf")]), "b": (True, 2)})
    {'a': [1.23457, None], 'b': [True, 2]}
    """
    if isinstance(value, MapRows):
        return value
    if isinstance(value, Tensor):
        return as_json(value.detach().cpu().tolist(), digits)
    if isinstance(value, dict):
        return {str(name): as_json(entry, digits) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(entry, digits) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    raise TypeError(f"value must be made of numbers, text, lists and dicts, got {type(value)}")

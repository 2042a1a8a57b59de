"""From tensors to plain numbers that JSON can hold, and matrices small enough to be looked at."""

import math
from typing import Any

import torch
from torch import Tensor

DIGITS = 6
MAP_DIGITS = 4
CELLS = (128, 96, 64, 48, 32, 16)  # sides of a map
MAP_BUDGET = 600_000  # numbers in all maps of one analysis


class Rows(list[list[float]]):
    """Rows of a map that are plain already: there are too many to look at each again."""


def plain(value: Any, digits: int = DIGITS) -> Any:
    """Tensors, tuples and numbers as lists and numbers of a few digits; None for nan and infinity.

    >>> plain({"a": torch.tensor([1.23456789, float("inf")]), "b": (True, 2)})
    {'a': [1.23457, None], 'b': [True, 2]}
    """
    if isinstance(value, Rows):
        return value
    if isinstance(value, Tensor):
        return plain(value.detach().cpu().tolist(), digits)
    if isinstance(value, dict):
        return {str(name): plain(entry, digits) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry, digits) for entry in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else None
    if value is None or isinstance(value, (str, bool, int)):
        return value
    raise TypeError(f"value must be made of numbers, text, lists and dicts, got {type(value)}")


def pooled(matrix: Tensor, cells: int) -> Tensor:
    """A matrix `[n, n]` averaged to at most `cells` x `cells`; cell i covers n / cells entries.

    >>> pooled(torch.arange(16.0).view(4, 4), 2).tolist()
    [[2.5, 4.5], [10.5, 12.5]]
    """
    if matrix.shape[-1] <= cells:
        return matrix
    return torch.nn.functional.adaptive_avg_pool2d(matrix[None], cells)[0]


def map_entry(matrix: Tensor, cells: int) -> Rows:
    """A finite matrix as rows of numbers of a few digits, at most `cells` of them."""
    values = pooled(matrix.double(), cells)
    if not bool(values.isfinite().all()):
        raise ValueError("matrix must be finite to be shown, got inf or nan")
    places = MAP_DIGITS - 1 - values.abs().clamp(min=1e-30).log10().floor()
    # A whole number over a power of ten is the float that prints with few digits.
    power = 10.0 ** places.abs()
    up = places >= 0
    whole = torch.where(up, values * power, values / power).round()
    return Rows(torch.where(up, whole / power, whole * power).tolist())


def map_cells(sizes: list[int]) -> int:
    """The largest side that lets square maps of these sizes stay within the budget; 0 if none."""
    for cells in CELLS:
        if sum(min(size, cells) ** 2 for size in sizes) <= MAP_BUDGET:
            return cells
    return 0

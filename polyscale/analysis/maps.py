"""Matrices averaged to a size that can be shown, within one budget for the whole analysis."""

from __future__ import annotations

import torch
from torch import Tensor

from polyscale.analysis.entries import Entry
from polyscale.analysis.values import MapRows
from polyscale.theory.symmetry import split

MAP_DIGITS = 4
CELLS = (128, 96, 64, 48, 32, 16)  # sides of a map
MAP_BUDGET = 600_000  # numbers in all maps of one analysis


def pooled(matrix: Tensor, cells: int) -> Tensor:
    """A matrix `[n, n]` averaged to at most `cells` x `cells`; cell i covers n / cells entries.

    >>> pooled(torch.arange(16.0).view(4, 4), 2).tolist()
    [[2.5, 4.5], [10.5, 12.5]]
    """
    if matrix.shape[-1] <= cells:
        return matrix
    return torch.nn.functional.adaptive_avg_pool2d(matrix[None], cells)[0]


def map_entry(matrix: Tensor, cells: int) -> MapRows:
    """A finite matrix as rows of numbers of a few digits, at most `cells` of them."""
    values = pooled(matrix.double(), cells)
    if not bool(values.isfinite().all()):
        raise ValueError("matrix must be finite to be shown, got inf or nan")
    places = MAP_DIGITS - 1 - values.abs().clamp(min=1e-30).log10().floor()
    # A whole number over a power of ten is the float that prints with few digits.
    power = 10.0 ** places.abs()
    up = places >= 0
    whole = torch.where(up, values * power, values / power).round()
    return MapRows(torch.where(up, whole / power, whole * power).tolist())


def map_cells(sizes: list[int]) -> int:
    """The largest side that lets square maps of these sizes stay within the budget; 0 if none."""
    for cells in CELLS:
        if sum(min(size, cells) ** 2 for size in sizes) <= MAP_BUDGET:
            return cells
    return 0


class MapCollection:
    """Maps of one analysis, all averaged to the side at which they fit the budget together."""

    def __init__(self, layers: int, attention_sizes: list[int], part_sizes: list[int]) -> None:
        """Take the sizes of one layer's attention matrices and score matrices, [] for none."""
        self.notes: list[str] = []
        self.attention: list[Entry] = []
        self.parts: list[Entry] = []
        self.layers = list(range(layers)) if attention_sizes else []
        self.with_parts = bool(part_sizes)
        if not attention_sizes:
            self.cells = 0
            return
        self.cells = map_cells((attention_sizes + 2 * part_sizes) * layers)
        if not self.cells:
            self.notes.append(
                "Maps of the symmetric and antisymmetric parts are left out: they are too many."
            )
            self.with_parts, self.cells = False, map_cells(attention_sizes * layers)
        if not self.cells:
            self.layers = sorted({0, layers // 2, layers - 1})
            self.notes.append(f"Attention maps are shown only for the layers {self.layers}.")
            self.cells = map_cells(attention_sizes * len(self.layers)) or CELLS[-1]
        if max(attention_sizes) > self.cells:
            self.notes.append(f"Maps are averaged to {self.cells} x {self.cells} cells.")

    def add(self, layer: int, level: int | str, attention: Tensor, scores: Tensor | None) -> None:
        """Add attention matrices `[H, T, T]`, and the two parts of scores `[H, n, n]`."""
        if layer not in self.layers:
            return
        for head, matrix in enumerate(attention):
            place = {"layer": layer, "head": head, "level": level}
            shown = {"map": map_entry(matrix, self.cells)}
            self.attention.append({**place, **shown, "pooled_from": self._pooled_from(matrix)})
            if scores is None or not self.with_parts:
                continue
            symmetric, antisymmetric = split(scores[head])
            both = {
                "symmetric": map_entry(symmetric, self.cells),
                "antisymmetric": map_entry(antisymmetric, self.cells),
            }
            self.parts.append({**place, **both, "pooled_from": self._pooled_from(symmetric)})

    def _pooled_from(self, matrix: Tensor) -> int | None:
        return len(matrix) if len(matrix) > self.cells else None

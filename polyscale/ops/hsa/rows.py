"""Moving rows between layouts without scatter-adds: every row has one place in each layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class _TakeRows(torch.autograd.Function):
    """`rows[index]`, some rows zero; the gradient is a gather too, by the inverse map."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        index: Tensor,
        blank: Tensor | None,
        inverse: Tensor,
        inverse_blank: Tensor | None,
    ) -> Tensor:
        ctx.maps = (inverse, inverse_blank, index, blank)
        taken = rows.index_select(0, index)
        if blank is not None:
            taken.index_fill_(0, blank, 0.0)
        return taken

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return take_rows(gradients[0], *ctx.maps), None, None, None, None


def take_rows(
    rows: Tensor,
    index: Tensor,
    blank: Tensor | None,
    inverse: Tensor,
    inverse_blank: Tensor | None,
) -> Tensor:
    """Return `rows[index]` with the rows `blank` zero; `inverse` leads back."""
    return _TakeRows.apply(rows, index, blank, inverse, inverse_blank)


@dataclass(frozen=True)
class RowMap:
    """A one-to-one map of the rows of a source layout to those of a target layout.

    The target may hold padding (`padding`: its places) and the source rows that the target lacks
    (`missing`). Padding repeats a real row, and no gradient flows through it.
    """

    index: Tensor  # [target rows] -> source row
    inverse: Tensor  # [source rows] -> target row
    padding: Tensor | None
    missing: Tensor | None
    identity: bool

    def forward(self, rows: Tensor) -> Tensor:
        """Source to target; padding repeats a real row."""
        if self.identity:
            return rows
        return take_rows(rows, self.index, None, self.inverse, self.missing)

    def backward(self, rows: Tensor) -> Tensor:
        """Target to source; rows that the target lacks are zero."""
        if self.identity:
            return rows
        return take_rows(rows, self.inverse, self.missing, self.index, self.padding)


def row_map(
    source: Sequence[Tensor],
    target: Sequence[Tensor],
    filled: Sequence[Tensor],
    low: int,
    high: int,
    copies: int,
) -> RowMap:
    """Map between two layouts of the nodes `low : high`, each repeated `copies` times.

    A layout is a list of segments of node numbers, -1 for a place without a node; with copies, all
    copies of the first segment come first, then all copies of the second. `filled` is `target`
    with a node in the place of every -1.
    """
    from_source = _places(source, low, high)
    from_target = _places(target, low, high)
    index = _flat([from_source[:, nodes - low] for nodes in filled], copies)
    inverse = _flat([from_target[:, (nodes - low).clamp(min=0)] for nodes in source], copies)
    padding = _blanks([nodes < 0 for nodes in target], copies)
    missing = _blanks(
        [(nodes < 0) | (from_target[0, (nodes - low).clamp(min=0)] < 0) for nodes in source], copies
    )
    if missing is not None:
        inverse[missing] = 0
    identity = (
        padding is None
        and missing is None
        and index.numel() == inverse.numel()
        and torch.equal(index, torch.arange(index.numel(), device=index.device))
    )
    return RowMap(index, inverse, padding, missing, identity)


def _places(segments: Sequence[Tensor], low: int, high: int) -> Tensor:
    """Return for each node where its segment starts, that segment's size, and its place in it."""
    places = segments[0].new_full((3, high - low), -1)
    start = 0
    for nodes in segments:
        real = nodes >= 0
        offset = torch.arange(nodes.numel(), device=nodes.device)[real]
        at = nodes[real] - low
        places[0, at] = start
        places[1, at] = nodes.numel()
        places[2, at] = offset
        start += nodes.numel()
    return places


def _flat(parts: Sequence[Tensor], copies: int) -> Tensor:
    """Return the row numbers [copies * places] of (start, size, offset) triples [3, places]."""
    copy = torch.arange(copies, device=parts[0].device)[:, None]
    return torch.cat([(copies * s + copy * z + o).flatten() for s, z, o in parts])


def _blanks(parts: Sequence[Tensor], copies: int) -> Tensor | None:
    flags = torch.cat([part.expand(copies, -1).flatten() for part in parts])
    places = flags.nonzero().squeeze(-1)
    return places if places.numel() else None

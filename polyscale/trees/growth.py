"""The hierarchy of a text that is being generated: when families close, and the tree so far.

Both come from one rule, how many levels close right before each token, so that the parallel form
and step-by-step decoding see the same structure.
"""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from polyscale.trees.tree import SignalTree


def closes_by_windows(position: Tensor, windows: Sequence[int]) -> Tensor:
    """How many levels of windows close right before the tokens at these positions."""
    closes = torch.zeros_like(position)
    size = 1
    for window in windows:
        size *= window
        closes += ((position % size == 0) & (position > 0)).to(closes.dtype)
    return closes


def closes_by_tokens(previous: Tensor, boundaries: Sequence[Sequence[int]]) -> Tensor:
    """How many levels close after the previous tokens (-1 where there is none)."""
    closes = torch.zeros_like(previous)
    for level, ids in enumerate(boundaries, start=1):
        ends = torch.isin(previous, torch.tensor(list(ids), device=previous.device))
        closes = torch.where(ends, level, closes)
    return closes


def tower(windows: Sequence[int], longest: int) -> list[int]:
    """The windows, the last one repeated until one node holds `longest` tokens."""
    levels, size = list(windows), 1
    for window in windows:
        size *= window
    while size < longest:
        levels.append(windows[-1])
        size *= windows[-1]
    return levels


@lru_cache(maxsize=64)
def window_tree(length: int, windows: tuple[int, ...], device: torch.device) -> SignalTree:
    """The tree of `length` tokens under a tower of windows; the same for all rows."""
    return SignalTree.from_windows(length, tower(windows, length)).to(device)


def token_trees(closes: Tensor, lengths: Tensor, levels: int) -> SignalTree:
    """A tree for each row of `closes` `[B, T]`; batched, with B * T rows, padding outside."""
    trees = []
    for row, length in zip(closes.cpu(), lengths.tolist(), strict=True):
        trees.append(_token_tree(row[: max(1, length)], len(row), levels))
    return SignalTree.batch(trees).to(closes.device)


def _token_tree(closes: Tensor, num_rows: int, levels: int) -> SignalTree:
    length = len(closes)
    heights = [(closes >= height).cumsum(0) for height in range(1, levels + 1)]
    # Nodes: the root, then every height from the top down, then the tokens.
    parents, above, begin = [torch.tensor([-1])], torch.zeros(length, dtype=torch.int64), 1
    for number in reversed(heights):
        first = torch.ones(length, dtype=torch.bool)
        first[1:] = number[1:] != number[:-1]
        parents.append(above[first])
        above = begin + number
        begin += int(number[-1]) + 1
    parents.append(above)
    rows = torch.full((begin + length,), -1)
    rows[begin:] = torch.arange(length)
    return SignalTree.from_parents(torch.cat(parents), rows=rows, num_rows=num_rows)


def segment_forest(closes: Tensor, segment: Tensor, lengths: Tensor) -> SignalTree:
    """A forest over new tokens of growing hierarchies, with B * T rows.

    A tree for each run of tokens with one `segment` `[B, T]`: how many levels, from the bottom,
    have opened among the tokens by then. Its root has the nodes of that height as children. Tokens
    from `lengths` `[B]` on are outside.
    """
    rows = closes.tolist(), segment.tolist(), lengths.tolist()
    forest = _segment_forest(tuple(map(tuple, rows[0])), tuple(map(tuple, rows[1])), tuple(rows[2]))
    return forest.to(closes.device)


# All layers of a model ask for the same one.
@lru_cache(maxsize=16)
def _segment_forest(
    closes: tuple[tuple[int, ...], ...],
    segment: tuple[tuple[int, ...], ...],
    lengths: tuple[int, ...],
) -> SignalTree:
    trees = []
    for row_closes, heights, length in zip(closes, segment, lengths, strict=True):
        last = max(1, length)  # a row without tokens gets a tree all the same
        starts = [0, *(at for at in range(1, last) if heights[at] > heights[at - 1])]
        for start, stop in zip(starts, [*starts[1:], last], strict=True):
            end = stop if stop < last else len(row_closes)  # the last tree has the padding
            # The first token opens the first node of every level.
            own = torch.tensor([0, *row_closes[start + 1 : stop]])
            trees.append(_token_tree(own, end - start, heights[start]))
    return SignalTree.batch(trees)

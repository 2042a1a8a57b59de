"""Where each token of a batch hangs: rows are sorted so that one tree serves the whole batch.

Sinks come first, then the other real tokens in their order; padding is left out. A text gets the
same tree then, wherever its padding is, and window trees depend on two numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from polyscale.inject.settings import SENTENCES, HSASettings
from polyscale.trees import SignalTree
from polyscale.trees.assembly import assemble


@dataclass(frozen=True)
class Layout:
    """Columns of a batch [B, N] as the R rows of a tree: S sinks, then all other tokens."""

    tree: SignalTree  # of R rows for every batch entry, or a forest of B * R rows
    index: Tensor | None  # [B, R] column of each row, None if rows are columns
    slot: Tensor | None  # [B, N] row of each column
    real: Tensor | None  # [B, N]
    hidden: Tensor | None  # [B, R] rows without a token, None if there are none
    sinks: int  # S

    @property
    def forest(self) -> bool:
        """Whether every batch entry has a tree of its own."""
        return self.tree.num_trees > 1

    def to_rows(self, columns: Tensor) -> Tensor:
        """Return `[B, H, N, D]` in the order of the tree's rows, `[B, H, R, D]`."""
        if self.index is None:
            return columns
        return _take(columns, self.index)

    def to_columns(self, rows: Tensor) -> Tensor:
        """Undo `to_rows`; padding is zero."""
        if self.slot is not None:
            rows = _take(rows, self.slot)
        if self.real is not None:
            rows = rows.masked_fill(~self.real[:, None, :, None], 0.0)
        return rows


@dataclass
class Tokens:
    """The token ids of one forward pass, and what its layers have made of them."""

    ids: Tensor  # [B, N]
    made: dict[Any, Layout] = field(default_factory=dict)


def _take(source: Tensor, index: Tensor) -> Tensor:
    """Return `source[b, :, index[b]]`: [B, H, *, D] and [B, R] to [B, H, R, D]."""
    if index.shape[0] == 1:
        return source.index_select(2, index[0])
    wide = index[:, None, :, None].expand(-1, source.shape[1], -1, source.shape[3])
    return source.gather(2, wide)


def find_layout(
    settings: HSASettings, real: Tensor | None, query: Tensor, causal: bool, tokens: Tokens | None
) -> Layout:
    """Return the layout of tokens [B, N] of which `real` are no padding."""
    batch, _, length, _ = query.shape
    hierarchy = settings.hierarchy
    if isinstance(hierarchy, SignalTree):
        return given_layout(hierarchy, real, batch, length, query.device)
    if causal:
        check_prefix(settings)
    if settings.needs_tokens:
        check_tokens(tokens, batch, length)
        assert tokens is not None
        known = tokens.made.get((settings, causal))
        if known is not None and _same(known.real, real):
            return known
    ids = None if tokens is None else tokens.ids
    layout = _make(settings, real, batch, length, query.device, ids, causal)
    if settings.needs_tokens and tokens is not None:
        tokens.made[settings, causal] = layout
    return layout


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def check_prefix(settings: HSASettings) -> None:
    """Refuse sinks of a causal layer that are not its first tokens."""
    if settings.sink_ids or sorted(settings.sinks) != list(range(len(settings.sinks))):
        got = f"sink_ids {settings.sink_ids}" if settings.sink_ids else f"{settings.sinks}"
        raise ValueError(
            f"sinks must be the first tokens in a causal layer, such as (0,) or (0, 1), got {got}: "
            "a leaf under the root amid the text would split the windows around it"
        )


def check_tokens(tokens: Tokens | None, batch: int, length: int) -> None:
    """Refuse to guess the structure of tokens that cannot be seen."""
    if tokens is None:
        raise ValueError(
            'input_ids: hierarchy="sentences" and sink_ids read the token ids, but none reached '
            "the layer: pass input_ids (not inputs_embeds) to the injected model, not to a part "
            "of it; a model whose layers do not pass keyword arguments on cannot be served"
        )
    if tokens.ids.shape != (batch, length):
        raise ValueError(
            f"input_ids must have the shape of the attention, {[batch, length]}, got "
            f"{list(tokens.ids.shape)}; sentences and sink_ids need exactly these tokens"
        )


def given_layout(
    tree: SignalTree, real: Tensor | None, batch: int, length: int, device: torch.device
) -> Layout:
    """Return the layout of a tree given by the user: its rows are the columns."""
    shared = tree.num_trees == 1 and tree.num_rows == length
    forest = tree.num_trees == batch and tree.tree_rows == tuple(
        range(0, batch * length + 1, length)
    )
    if not shared and not forest:
        raise ValueError(
            f"hierarchy must be one tree of {length} rows, or {batch} trees of {length} rows, "
            f"for a batch of {[batch, length]}, got {tree.num_trees} trees and "
            f"{tree.num_rows} rows"
        )
    hidden = None if real is None else ~real
    return Layout(tree.to(device), None, None, real, hidden, 0)


def _make(
    settings: HSASettings,
    real: Tensor | None,
    batch: int,
    length: int,
    device: torch.device,
    ids: Tensor | None,
    causal: bool,
) -> Layout:
    shown = real  # [B, N], or [1, N] if all texts are alike
    if shown is None:
        texts = batch if settings.needs_tokens else 1
        shown = torch.ones(texts, length, dtype=torch.bool, device=device)
    is_sink = find_sinks(settings, shown, ids)
    plain = settings.hierarchy != SENTENCES
    if plain and real is None and not bool(is_sink.any()):
        tree = window_tree(0, length, settings.hierarchy, device)
        return Layout(tree, None, None, None, None, 0)
    others = shown & ~is_sink
    sinks, rest = int(is_sink.sum(1).max()), int(others.sum(1).max())
    rows = max(1, sinks + rest)
    # Row of each column; padding goes to a place beyond the rows.
    slot = torch.where(is_sink, is_sink.cumsum(1) - 1, sinks + others.cumsum(1) - 1)
    slot = torch.where(shown, slot, rows)  # [B or 1, N]
    column = torch.arange(length, device=device).expand_as(slot)
    index = torch.zeros(len(slot), rows + 1, dtype=torch.int64, device=device)
    index = index.scatter(1, slot, column)[:, :rows]
    filled = torch.zeros(len(slot), rows + 1, dtype=torch.bool, device=device)
    filled = filled.scatter(1, slot, shown)[:, :rows]  # [B or 1, R]
    slot = slot.clamp(max=rows - 1)
    hidden = None if bool(filled.all()) else ~filled.expand(batch, -1)
    if plain:
        tree = window_tree(sinks, rest, settings.hierarchy, device)
        # Beside sinks it counts how many levels a text has, where one query stands for several.
        assert isinstance(settings.hierarchy, tuple)
        tied = settings.tie == "blocks" or settings.sink_queries == "tied"
        if sinks and tied and not causal:
            counts = tuple(others.sum(1).tolist())
            depths = {depth(count, settings.hierarchy) for count in counts if count > 1}
            if len(depths) > 1:
                tree = window_forest(sinks, counts, rows, settings.hierarchy, device)
        return Layout(tree, index, slot, real, hidden, sinks)
    assert ids is not None
    lined = ids.gather(1, index.expand(batch, -1))  # [B, R]
    ends = torch.tensor(settings.sentence_ends, device=device)
    tree = sentence_forest(torch.isin(lined, ends), filled.expand(batch, -1), sinks)
    return Layout(tree, index, slot, real, hidden, sinks)


def find_sinks(settings: HSASettings, shown: Tensor, ids: Tensor | None) -> Tensor:
    """Return which of the real tokens `shown` [B or 1, N] are sinks."""
    rank = shown.cumsum(1) - 1  # among the real tokens
    lengths = shown.sum(1, keepdim=True)
    found = torch.zeros_like(shown)
    for place in settings.sinks:
        found = found | (rank == (place if place >= 0 else lengths + place))
    if settings.sink_ids:
        assert ids is not None
        found = found | torch.isin(ids, torch.tensor(settings.sink_ids, device=ids.device))
    return found & shown


@lru_cache(maxsize=256)
def window_tree(
    sinks: int, rest: int, windows: tuple[int, ...], device: torch.device
) -> SignalTree:
    """Return a tree of windows over the last `rest` rows, the first `sinks` rows under its root."""
    return _window_tree(sinks, rest, windows, max(1, sinks + rest)).to(device)


@lru_cache(maxsize=64)
def window_forest(
    sinks: int, counts: tuple[int, ...], rows: int, windows: tuple[int, ...], device: torch.device
) -> SignalTree:
    """Return a tree of `rows` rows for each text, as `window_tree` has it for that text alone.

    Rows after the sinks and a text's `counts` others are padding, right under its root.
    """
    trees = [_window_tree(sinks, count, windows, rows) for count in counts]
    return SignalTree.batch(trees).to(device)


def depth(count: int, windows: tuple[int, ...]) -> int:
    """Return how many levels a tree of windows has over so many tokens.

    >>> [depth(count, (2, 4)) for count in (1, 2, 3, 8, 9)]
    [0, 1, 2, 2, 3]
    """
    levels = 0
    for window in windows:
        if count > 1:
            count, levels = -(-count // window), levels + 1
    return levels + (count > 1)


def _window_tree(sinks: int, rest: int, windows: tuple[int, ...], rows: int) -> SignalTree:
    """Return a tree of windows over `rest` of the rows; those before and after are root's."""
    loose = rows - rest
    if rest == 0 or (loose and rest == 1):
        return SignalTree.from_windows(rows)
    tree = SignalTree.from_windows(rest, windows)
    if not loose:
        return tree
    # Numbers: the root, the loose leaves, all other nodes.
    above, below = tree.parent[1:], tree.leaf_row[1:]
    parent = torch.cat(
        [
            torch.tensor([-1]),
            torch.zeros(loose, dtype=torch.int64),
            torch.where(above > 0, above + loose, 0),
        ]
    )
    row = torch.cat(
        [
            torch.tensor([-1]),
            torch.arange(sinks),
            torch.arange(sinks + rest, rows),
            torch.where(below >= 0, below + sinks, -1),
        ]
    )
    return SignalTree.from_parents(parent, rows=row)


def sentence_forest(ends: Tensor, filled: Tensor, sinks: int) -> SignalTree:
    """Return a tree for each row of `ends` [B, R]: the sinks and the sentences under its root.

    `ends` says after which tokens a sentence ends, `filled` [B, R] which rows have a token.
    """
    batch, rows = filled.shape
    device = filled.device
    # A tree needs a leaf: a text of padding alone gets one, which nobody reads.
    filled = filled.clone()
    filled[:, 0] |= ~filled.any(1)
    is_sink = torch.arange(rows, device=device) < sinks
    token = filled & ~is_sink  # [B, R]
    opens = torch.ones_like(token)
    opens[:, 1:] = ends[:, :-1] | is_sink[:-1]
    opens = opens & token
    top = opens | (filled & is_sink)  # the children of the roots, one for each True
    number = batch + top.flatten().cumsum(0).view(batch, rows) - 1
    sentence = torch.where(opens, number, -1).cummax(1).values  # [B, R]
    row = torch.arange(batch * rows, device=device).view(batch, rows)
    text = torch.arange(batch, device=device)[:, None].expand(batch, rows)
    parent = torch.cat([torch.full((batch,), -1, device=device), text[top], sentence[token]])
    leaf_row = torch.cat(
        [
            torch.full((batch,), -1, device=device),
            torch.where(is_sink, row, -1)[top],
            row[token],
        ]
    )
    leaf = leaf_row >= 0
    return assemble(
        parent,
        leaf_row,
        domain=torch.where(leaf, -1, 0),
        position=torch.zeros(parent.numel(), 2, dtype=torch.int64, device=device),
        key=torch.full_like(parent, -1),
        modality=torch.where(leaf, 0, -1),
        tree_rows=tuple(range(0, batch * rows + 1, rows)),
    )

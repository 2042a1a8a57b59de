"""Grouping the families of each depth so that one batched step serves all of them.

Families of one depth are put into buckets of equal padded size, wasting at most 2x. Everything that
depends on the tree alone is computed once and kept as long as the tree lives.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyscale.ops.hsa.rows import RowMap, row_map

if TYPE_CHECKING:
    from polyscale.trees import SignalTree

WASTE = 2.0  # padded entries over real ones, at most
LARGE_WASTE = 1.25  # ... once a bucket is so large that a launch is cheaper than padding
LARGE = 1 << 14
KEPT_PLANS = 8


@dataclass(frozen=True, eq=False)
class Bucket:
    """F families of one depth with at most b children and at most n leaves each."""

    parents: Tensor  # [F] nodes
    nodes: Tensor  # [F, b] children; padding repeats the first child
    real: Tensor  # [F, b] false for padding
    is_leaf: Tensor  # [F, b] the child is a leaf
    counts: Tensor  # [F, b] leaves under the child, 0 for padding
    leaves: Tensor  # [F, n] leaf nodes from left to right; padding repeats the first (columns)
    real_leaves: Tensor  # [F, n]
    own: Tensor  # [F, n] which child the leaf is under
    uniform: bool  # no padding and all children alike: the same leaf count, all leaves or none
    has_inner: bool
    inner_diagonal: Tensor  # [F or 1, b, b] the inside of an inner child in a family's matrix
    tables: dict[tuple[torch.dtype, bool, bool], Tensor] = field(default_factory=dict)

    @property
    def families(self) -> int:
        return self.nodes.shape[0]

    @property
    def size(self) -> int:
        return self.nodes.shape[1]

    @property
    def span(self) -> int:
        return self.leaves.shape[1]

    def segment(self) -> Tensor:
        """Return the children as a layout segment: -1 for padding."""
        return self.nodes.masked_fill(~self.real, -1).flatten()

    def leaf_segment(self) -> Tensor:
        """Return the leaves as a layout segment: -1 for padding."""
        return self.leaves.masked_fill(~self.real_leaves, -1).flatten()


@dataclass(frozen=True)
class Level:
    """The families whose parents are at one depth; their children's layout."""

    buckets: tuple[Bucket, ...]
    leaf_nodes: Tensor  # leaves among the children
    low: int  # the children are the nodes low : high
    high: int

    @property
    def only_leaves(self) -> bool:
        return self.leaf_nodes.numel() == self.high - self.low


@dataclass(frozen=True)
class FamilyPlan:
    """The row maps of a tree for `copies` copies of its rows (batch times heads)."""

    levels: tuple[Level, ...]
    rows: RowMap  # data rows -> pieces
    piece_sizes: tuple[int, ...]
    slots: tuple[RowMap | None, ...]  # per level: children as stored -> children by bucket
    spans: tuple[RowMap | None, ...]  # per level: data rows -> leaves by bucket (columns)
    root_leaves: Tensor
    copies: int

    def stored_sizes(self, depth: int) -> list[int]:
        """Return the rows of each segment in which the nodes of a depth are stored."""
        if depth == len(self.levels):
            return []
        return [bucket.families * self.copies for bucket in self.levels[depth].buckets]


class TreePlans:
    """Everything about a tree that attention needs, for any number of copies."""

    def __init__(self, tree: SignalTree) -> None:
        self.plans: dict[tuple[int, bool], FamilyPlan] = {}
        self.levels: dict[bool, tuple[Level, ...]] = {}
        rows = tree.leaf_row[tree.leaf_order]
        self.rows_in_order = bool((rows[1:] > rows[:-1]).all())

    # What is made on a first call under inference mode has to serve training later.
    @torch.inference_mode(False)
    def plan(self, tree: SignalTree, copies: int, columns: bool) -> FamilyPlan:
        """Return the plan for so many copies of the tree's rows, made on first use."""
        if columns not in self.levels:
            self.levels[columns] = tuple(
                _level(tree, depth, columns) for depth in range(tree.max_depth)
            )
        wanted = (copies, columns)
        if wanted not in self.plans:
            if len(self.plans) >= KEPT_PLANS:
                self.plans.pop(next(iter(self.plans)))
            self.plans[wanted] = _family_plan(tree, self.levels[columns], copies, columns)
        return self.plans[wanted]


_kept: dict[int, TreePlans] = {}


def plans_of(tree: SignalTree) -> TreePlans:
    """Return the plans of this very tree object, made on first use and dropped with the tree."""
    if id(tree) not in _kept:
        _kept[id(tree)] = TreePlans(tree)
        weakref.finalize(tree, _kept.pop, id(tree), None).atexit = False
    return _kept[id(tree)]


def _level(tree: SignalTree, depth: int, columns: bool) -> Level:
    begin, low, high = tree.depth_offsets[depth : depth + 3]
    parents = torch.arange(begin, low, device=tree.device)
    parents = parents[tree.child_count[begin:low] > 0]
    sizes = tree.child_count[parents]
    spans = tree.leaf_count[parents] if columns else sizes
    buckets = tuple(_bucket(tree, parents[chosen], columns) for chosen in group(sizes, spans))
    children = torch.arange(low, high, device=tree.device)
    return Level(buckets, children[tree.child_count[low:high] == 0], low, high)


def group(sizes: Tensor, spans: Tensor) -> list[Tensor]:
    """Split families into buckets whose padded b x n matrices waste at most `WASTE`."""
    pairs, member, count = torch.stack([sizes, spans], 1).unique(
        dim=0, return_inverse=True, return_counts=True
    )
    # Neighbours in this order differ little in size, then little in span.
    shapes, numbers = pairs.tolist(), count.tolist()
    order = sorted(
        range(len(shapes)), key=lambda at: ((shapes[at][0] ** 2).bit_length(), shapes[at][1])
    )
    label = [0] * len(order)
    families = size = span = real = bucket = 0
    for at in order:
        (b, n), number = shapes[at], numbers[at]
        padded = (families + number) * max(size, b) * max(span, n)
        limit = WASTE if padded <= LARGE else LARGE_WASTE
        if families and padded > limit * (real + number * b * n):
            bucket += 1
            families = size = span = real = 0
        label[at] = bucket
        families, size, span = families + number, max(size, b), max(span, n)
        real += number * b * n
    labels = torch.tensor(label, device=sizes.device)[member]
    return [(labels == at).nonzero().squeeze(-1) for at in range(bucket + 1)]


def _bucket(tree: SignalTree, parents: Tensor, columns: bool) -> Bucket:
    sizes = tree.child_count[parents][:, None]  # [F, 1]
    step = torch.arange(int(sizes.max()), device=tree.device)
    real = step < sizes  # [F, b]
    nodes = tree.first_child[parents][:, None] + step * real
    counts = tree.leaf_count[nodes] * real
    is_leaf = tree.child_count[nodes] == 0
    spans = tree.leaf_count[parents][:, None]  # [F, 1]
    if not columns:
        spans = torch.zeros_like(spans)
    step = torch.arange(int(spans.max()), device=tree.device)
    real_leaves = step < spans  # [F, n]
    rank = tree.leaf_begin[parents][:, None] + step * real_leaves
    # A leaf is under the last child that begins at or before it.
    begins = tree.leaf_begin[nodes].masked_fill(~real, tree.num_leaves)
    own = torch.searchsorted(begins.contiguous(), rank.contiguous(), right=True) - 1
    alike = bool(real.all()) and bool((counts == counts[0, 0]).all())
    uniform = alike and bool((is_leaf == is_leaf[0, 0]).all())
    inner = (real & ~is_leaf)[: 1 if uniform else None]  # [F or 1, b]
    return Bucket(
        parents=parents,
        nodes=nodes,
        real=real,
        is_leaf=is_leaf,
        counts=counts,
        leaves=tree.leaf_order[rank],
        real_leaves=real_leaves,
        own=own,
        uniform=uniform,
        has_inner=bool((~is_leaf).any()),
        inner_diagonal=inner[:, :, None] & torch.eye(len(inner[0]), device=inner.device).bool(),
    )


def _family_plan(
    tree: SignalTree, levels: tuple[Level, ...], copies: int, columns: bool
) -> FamilyPlan:
    """Lay out the rows.

    The deepest level has only leaves, which go straight from the data to their places in buckets;
    leaves of other depths get a segment per depth. Together these are the pieces. The inner nodes
    of a depth are stored bucket by bucket of their own families, after the leaves of that depth.
    """
    roots = torch.arange(tree.num_trees, device=tree.device)
    root_leaves = roots[tree.child_count[roots] == 0]
    pieces = [root_leaves] if root_leaves.numel() else []
    filled = list(pieces)
    slots: list[RowMap | None] = []
    for depth, level in enumerate(levels):
        targets = [bucket.segment() for bucket in level.buckets]
        fills = [bucket.nodes.flatten() for bucket in level.buckets]
        if level.only_leaves:
            pieces, filled = pieces + targets, filled + fills
            slots.append(None)
            continue
        stored = [bucket.parents for bucket in levels[depth + 1].buckets]
        if level.leaf_nodes.numel():
            pieces, filled = [*pieces, level.leaf_nodes], [*filled, level.leaf_nodes]
            stored = [level.leaf_nodes, *stored]
        slots.append(row_map(stored, targets, fills, level.low, level.high, copies))
    spans = [
        row_map(
            [tree.row_node],
            [bucket.leaf_segment() for bucket in level.buckets],
            [bucket.leaves.flatten() for bucket in level.buckets],
            0,
            tree.num_nodes,
            copies,
        )
        for level in levels
        if columns
    ]
    return FamilyPlan(
        levels=levels,
        rows=row_map([tree.row_node], pieces, filled, 0, tree.num_nodes, copies),
        piece_sizes=tuple(piece.numel() * copies for piece in pieces),
        slots=tuple(slots),
        spans=tuple(spans),
        root_leaves=root_leaves,
        copies=copies,
    )

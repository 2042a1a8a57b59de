"""What a family step needs besides the rows: plan of the tree, biases and masks of the scores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyscale.ops.hsa.families import Bucket, FamilyPlan

if TYPE_CHECKING:
    from polyscale.trees import SignalTree


@dataclass(frozen=True)
class AttentionContext:
    """Scores of a tree's families; X = B * H copies of the tree's rows, one after the other."""

    tree: SignalTree
    plan: FamilyPlan
    batch: int  # B, 1 if packed
    heads: int  # H
    scale: float
    causal: bool
    include_self: bool
    counts: Tensor | None  # [B, M] leaves left under each node by the mask, None without a mask
    position_query: tuple[Tensor, ...] | None  # per depth: [H or 1, nodes, P]
    position_key: tuple[Tensor, ...] | None
    alpha: Tensor | None  # [depths] of entmax, None for softmax
    known_shares: dict[Bucket, Tensor] = field(default_factory=dict)

    @property
    def may_be_empty(self) -> bool:
        """Whether a row can have nothing to attend to inside a family."""
        return not self.include_self or self.counts is not None

    def by_family(self, bucket: Bucket, tensor: Tensor) -> Tensor:
        """View [X * F, ...] as [B, H, F, ...]."""
        return tensor.view(self.batch, self.heads, bucket.families, *tensor.shape[1:])

    def counts_in(self, bucket: Bucket) -> Tensor:
        """Return the leaves under each child: [F or 1, b], or [B, 1, F, b] with a mask."""
        if self.counts is None:
            return bucket.counts[:1] if bucket.uniform else bucket.counts
        counts = self.counts[:, bucket.nodes] * bucket.real  # [B, F, b]
        return counts[:, None]

    def shares(self, bucket: Bucket, dtype: torch.dtype) -> Tensor | None:
        """Return each child's share of its parent's leaves, None if they are all equal."""
        if self.counts is None and bucket.uniform:
            return None
        if bucket not in self.known_shares:
            counts = self.counts_in(bucket).to(dtype)
            self.known_shares[bucket] = counts / counts.sum(-1, keepdim=True).clamp(min=1)
        return self.known_shares[bucket]

    def bias(
        self, bucket: Bucket, depth: int, dtype: torch.dtype, with_counts: bool = True
    ) -> Tensor:
        """Return what is added to the scores of a family: [..., F or 1, b, b].

        The logarithm of the column's leaf count and the position term; on the diagonal 0 for a
        leaf that sees itself; minus infinity for what a row does not see. The inside of an inner
        child is not seen through its mean key, so its diagonal is minus infinity as well.
        """
        table = self._table(bucket, dtype, with_counts)
        if self.position_query is None or self.position_key is None:
            return table
        low = self.plan.levels[depth].low
        places = (bucket.nodes - low).flatten()
        left = self.position_query[depth + 1].index_select(1, places)
        right = self.position_key[depth + 1].index_select(1, places)
        shape = (-1, bucket.families, bucket.size, left.shape[-1])
        terms = left.reshape(shape) @ right.reshape(shape).transpose(-1, -2)  # [H, F, b, b]
        diagonal = torch.eye(bucket.size, dtype=torch.bool, device=terms.device)
        return table + terms.masked_fill(diagonal, 0.0)

    @torch.inference_mode(False)
    def _table(self, bucket: Bucket, dtype: torch.dtype, with_counts: bool) -> Tensor:
        known = (dtype, self.include_self, self.causal)
        if self.counts is None and with_counts and known in bucket.tables:
            return bucket.tables[known]
        counts = self.counts_in(bucket).to(dtype)  # [..., b]
        weight = counts.log() if with_counts else counts.log().clamp(max=0.0)
        size = bucket.size
        table = weight.unsqueeze(-2).repeat_interleave(size, -2)  # [..., b, b]
        diagonal = torch.eye(size, dtype=torch.bool, device=table.device)
        hidden = diagonal.expand_as(table)
        if self.include_self:
            is_leaf = bucket.is_leaf[:1] if bucket.uniform else bucket.is_leaf
            hidden = hidden & ~is_leaf[:, None, :]
        if self.causal:
            later = torch.ones(size, size, dtype=torch.bool, device=table.device).triu(1)
            hidden = hidden | later
        table = table.masked_fill(hidden, -torch.inf)
        if self.counts is None and with_counts:
            bucket.tables[known] = table
        return table

    def pieces(self, rows: Tensor) -> list[Tensor]:
        """Return the data rows [X * N, D] as pieces: leaves in the order the levels need them."""
        return list(self.plan.rows.forward(rows).split(self.plan.piece_sizes))

    def from_pieces(self, pieces: Sequence[Tensor]) -> Tensor:
        """Return pieces as data rows [X * N, D]; rows outside the tree are zero."""
        return self.plan.rows.backward(pieces[0] if len(pieces) == 1 else torch.cat(list(pieces)))

    def to_slots(self, depth: int, stored: Tensor) -> list[Tensor]:
        """Return the stored children of a level [rows, ...] as [X * F, b, ...] per bucket."""
        row_map = self.plan.slots[depth]
        assert row_map is not None
        buckets = self.plan.levels[depth].buckets
        sizes = [self.plan.copies * bucket.families * bucket.size for bucket in buckets]
        return [
            part.view(-1, bucket.size, *part.shape[1:])
            for part, bucket in zip(row_map.forward(stored).split(sizes), buckets, strict=True)
        ]

    def from_slots(self, depth: int, slots: Sequence[Tensor]) -> Tensor:
        """Undo `to_slots`."""
        row_map = self.plan.slots[depth]
        assert row_map is not None
        flat = [part.flatten(0, 1) for part in slots]
        return row_map.backward(flat[0] if len(flat) == 1 else torch.cat(flat))

    def pool(self, bucket: Bucket, slots: Tensor, shares: Tensor | None) -> Tensor:
        """Return the mean over the leaves of each family: [X * F, b, D] -> [X * F, D]."""
        if shares is None:
            return slots.mean(1)
        shares = shares.expand(self.batch, self.heads, bucket.families, bucket.size)
        return torch.bmm(shares.reshape(-1, 1, bucket.size), slots).squeeze(1)

    def child_slots(self, depth: int, pieces: list[Tensor], above: list[Tensor]) -> list[Tensor]:
        """Return a level's children by bucket; takes its leaves off the end of `pieces`.

        `above` are the pooled inner children, bucket by bucket of their own families.
        """
        level = self.plan.levels[depth]
        if level.only_leaves:
            own, pieces[:] = pieces[-len(level.buckets) :], pieces[: -len(level.buckets)]
            return [
                part.view(-1, bucket.size, *part.shape[1:])
                for part, bucket in zip(own, level.buckets, strict=True)
            ]
        stored = [pieces.pop(), *above] if level.leaf_nodes.numel() else above
        return self.to_slots(depth, stored[0] if len(stored) == 1 else torch.cat(stored))


def pooled_slots(context: AttentionContext, rows: Tensor) -> list[list[Tensor]]:
    """Return, per level and bucket, the means of the children [X * F, b, D], from the data rows."""
    pieces = context.pieces(rows)
    found: list[list[Tensor]] = []
    means: list[Tensor] = []
    for depth in reversed(range(len(context.plan.levels))):
        slots = context.child_slots(depth, pieces, means)
        found.append(slots)
        if depth:
            buckets = context.plan.levels[depth].buckets
            means = [
                context.pool(bucket, part, context.shares(bucket, rows.dtype))
                for bucket, part in zip(buckets, slots, strict=True)
            ]
    return found[::-1]

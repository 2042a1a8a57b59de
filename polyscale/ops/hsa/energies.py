"""Energies of nodes and of rows, from the fast path's steps."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from polyscale.ops.hsa.blocks import bottom_up
from polyscale.ops.hsa.columns import from_spans, row_insides
from polyscale.ops.hsa.context import AttentionContext


def _leaf_energy(context: AttentionContext, query: Tensor, key: Tensor) -> Tensor:
    """Return the energy of every data row on its own: [X, N]."""
    copies = context.plan.copies
    energy = -context.scale * (query * key).sum(-1).view(copies, -1)
    if not context.include_self:
        return torch.full_like(energy, torch.inf)
    if context.counts is not None:
        leaf = context.counts[:, context.tree.row_node.clamp(min=0)]  # [B, N]
        energy = energy.masked_fill(leaf.repeat_interleave(context.heads, 0) == 0, torch.inf)
    return energy.masked_fill(context.tree.row_node < 0, torch.inf)


def _by_node(
    context: AttentionContext, leaf_energy: Tensor, inner: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Return energies in the order of the nodes: [X, M], from (nodes, [X, nodes]) parts."""
    leaves = context.tree.leaf_order
    parts = [leaf_energy[:, context.tree.leaf_row[leaves]], *(values for _, values in inner)]
    nodes = torch.cat([leaves, *(numbers for numbers, _ in inner)])
    return torch.cat(parts, 1)[:, nodes.argsort()]


def _by_row(context: AttentionContext, per_tree: Tensor) -> Tensor:
    """Return a value per tree [X, trees] at every row that takes part: [X, N], else infinity."""
    tree = context.tree
    sizes = [high - low for low, high in pairwise(tree.tree_rows)]
    repeats = torch.tensor(sizes, device=per_tree.device)
    by_row = per_tree.repeat_interleave(repeats, 1)
    by_row = by_row.masked_fill(tree.row_node < 0, torch.inf)
    if context.counts is not None:
        left = context.counts[:, tree.row_node.clamp(min=0)].repeat_interleave(context.heads, 0)
        by_row = by_row.masked_fill(left == 0, torch.inf)
    return by_row


def blocks_energy(context: AttentionContext, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return phi of every node [X, M] and that of every row's root [X, N]."""
    copies = context.plan.copies
    _, insides = bottom_up(context, query, key, need_root=True)
    inner = [
        (bucket.parents, -part.view(copies, -1))
        for level, parts in zip(context.plan.levels, insides, strict=True)
        for bucket, part in zip(level.buckets, parts, strict=True)
    ]
    phi = _by_node(context, _leaf_energy(context, query, key), inner)
    return phi, _by_row(context, phi[:, : context.tree.num_trees])


def columns_energy(context: AttentionContext, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Return phi of every node [X, M] and minus log Z of every row [X, N]."""
    copies = context.plan.copies
    rows = _leaf_energy(context, query, key)
    _, values = row_insides(context, query, key)
    inner = []
    for level, parts in zip(context.plan.levels, values, strict=True):
        for bucket, part in zip(level.buckets, parts, strict=True):
            real = bucket.real_leaves
            if context.counts is not None:
                left = context.counts[:, bucket.leaves].repeat_interleave(context.heads, 0)
                real = real & (left > 0)  # [X, F, n]
            energy = -part.view(copies, bucket.families, -1)
            number = real.sum(-1)
            mean = torch.where(real, energy, 0.0).sum(-1) / number.clamp(min=1)
            inner.append((bucket.parents, mean.masked_fill(number == 0, torch.inf)))
    phi = _by_node(context, rows, inner)
    if not values:
        return phi, rows
    reached = -from_spans(context, 0, [part.unsqueeze(-1) for part in values[0]]).view(copies, -1)
    alone = torch.zeros(context.tree.num_rows, dtype=torch.bool, device=query.device)
    alone[context.tree.leaf_row[context.plan.root_leaves]] = True
    energy = torch.where(alone, rows, reached)
    shut = torch.isinf(_by_row(context, torch.zeros_like(phi[:, : context.tree.num_trees])))
    return phi, energy.masked_fill(shut, torch.inf)

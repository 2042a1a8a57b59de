"""Other shapes over the same leaves: one family, or families become leaves."""

from dataclasses import replace

import torch
from torch import Tensor

from polyscale.trees.assembly import assemble
from polyscale.trees.checks import DOMAINS
from polyscale.trees.editing import tree_of_node
from polyscale.trees.structure import index_in_family, renumber
from polyscale.trees.tree import SignalTree

SEQUENCE = DOMAINS.index("sequence")


def flatten(tree: SignalTree) -> SignalTree:
    """See `SignalTree.flatten`."""
    roots = torch.arange(tree.num_trees, device=tree.device)
    leaves = tree.leaf_order[tree.depth[tree.leaf_order] > 0]  # a tree of one node stays
    nodes = torch.cat([roots, leaves])
    parent = torch.cat([torch.full_like(roots, -1), tree_of_node(tree)[leaves]])
    position = torch.stack([index_in_family(parent), torch.zeros_like(parent)], dim=1)
    position[: tree.num_trees] = 0
    return assemble(
        parent,
        tree.leaf_row[nodes],
        domain=torch.where(tree.leaf_row[nodes] >= 0, -1, SEQUENCE),
        position=position,
        key=torch.full_like(parent, -1),
        modality=tree.modality[nodes],
        modality_names=tree.modality_names,
        tree_rows=tree.tree_rows,
        source_offsets=tree.source_offsets,
    )


def has_only_leaves(tree: SignalTree) -> Tensor:
    """Return which inner nodes have no inner node for a child: [M]."""
    has_inner_child = torch.zeros_like(tree.parent, dtype=torch.bool)
    inner = (tree.child_count > 0) & (tree.parent >= 0)
    has_inner_child[tree.parent[inner]] = True
    return (tree.child_count > 0) & ~has_inner_child


def nodes_left(tree: SignalTree) -> Tensor:
    """Return the nodes that `pool_leaves` leaves, in the order of the smaller tree's nodes."""
    merged = (tree.parent >= 0) & has_only_leaves(tree)[tree.parent.clamp(min=0)]  # [M]
    return (~merged).nonzero().flatten()


def pool_leaves(tree: SignalTree) -> tuple[SignalTree, Tensor]:
    """See `SignalTree.pool_leaves`."""
    nodes = nodes_left(tree)
    becomes_leaf = has_only_leaves(tree)  # [M]
    leftmost = tree.leaf_order[tree.leaf_begin]  # [M]
    is_leaf = becomes_leaf | (tree.child_count == 0)
    parent = renumber(tree.parent, nodes)
    leaves = torch.bincount(tree_of_node(tree)[nodes[is_leaf[nodes]]], minlength=tree.num_trees)
    smaller = assemble(
        parent,
        domain=torch.where(is_leaf, -1, tree.domain)[nodes],
        position=tree.position[nodes],
        key=tree.key[nodes],
        modality=torch.where(is_leaf, tree.modality[leftmost], -1)[nodes],
        key_names=tree.key_names,
        modality_names=tree.modality_names,
        tree_rows=(0, *leaves.cumsum(0).tolist()),
    )
    new_row = torch.full_like(tree.parent, -1)  # [M]
    new_row[nodes] = smaller.leaf_row
    node = tree.row_node.clamp(min=0)  # [N]
    above = tree.parent[node]
    merged = (above >= 0) & becomes_leaf[above.clamp(min=0)]
    row_of_row = new_row[torch.where(merged, above, node)]
    row_of_row = torch.where(tree.row_node >= 0, row_of_row, -1)
    if tree.source_offsets is not None:
        offsets = _merged_offsets(tree.source_offsets, row_of_row, smaller.num_rows)
        smaller = replace(smaller, source_offsets=offsets)
    return smaller, row_of_row


def _merged_offsets(offsets: Tensor, row_of_row: Tensor, num_rows: int) -> Tensor:
    """From the first character to the last one of the rows that become one: [num_rows, 2]."""
    placed = (row_of_row >= 0) & (offsets[:, 0] >= 0)
    target = row_of_row[placed]
    begin = torch.full((num_rows,), -1, device=offsets.device)
    end = begin.clone()
    begin.scatter_reduce_(0, target, offsets[placed, 0], "amin", include_self=False)
    end.scatter_reduce_(0, target, offsets[placed, 1], "amax", include_self=False)
    return torch.stack([begin, end], dim=1)

"""Trees from trees: batch, unbatch, prune, collapse."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polyscale.trees.assembly import assemble
from polyscale.trees.checks import first
from polyscale.trees.structure import breadth_first_order, leaps, renumber
from polyscale.trees.tree import SignalTree


def merge_names(parts: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """Return all names, each once, in the order in which they first appear."""
    return tuple(dict.fromkeys(name for names in parts for name in names))


def reindex(index: Tensor, names: tuple[str, ...], merged: tuple[str, ...]) -> Tensor:
    """Translate an index into `names` to an index into `merged`; -1 stays."""
    if merged[: len(names)] == names:
        return index
    numbers = [merged.index(name) for name in names]
    table = torch.tensor([*numbers, -1], device=index.device)  # index -1 finds the last entry
    return table[index]


def batch(trees: Sequence[SignalTree]) -> SignalTree:
    """See `SignalTree.batch`."""
    if isinstance(trees, SignalTree):
        raise TypeError("trees must be a list of SignalTrees, got one; pass [tree]")
    trees = list(trees)
    if not trees:
        raise ValueError("trees must hold at least one SignalTree, got none")
    for place, tree in enumerate(trees):
        if not isinstance(tree, SignalTree):
            raise TypeError(
                f"trees must be SignalTrees, got {type(tree).__name__} as number {place}"
            )
        if tree.device != trees[0].device:
            raise ValueError(
                f"trees: tree {place} is on {tree.device}, the first on {trees[0].device}"
            )
    key_names = merge_names([tree.key_names for tree in trees])
    modality_names = merge_names([tree.modality_names for tree in trees])
    tree_rows = [0]
    for tree in trees:
        start = tree_rows[-1]
        tree_rows.extend(start + end for end in tree.tree_rows[1:])
    parent = _shifted([tree.parent for tree in trees], [tree.num_nodes for tree in trees])
    leaf_row = _shifted([tree.leaf_row for tree in trees], [tree.num_rows for tree in trees])
    # Each tree is breadth-first, so sorting by depth makes the forest breadth-first.
    order = torch.argsort(torch.cat([tree.depth for tree in trees]), stable=True)
    return assemble(
        renumber(parent, order),
        leaf_row[order],
        domain=torch.cat([tree.domain for tree in trees])[order],
        position=torch.cat([tree.position for tree in trees])[order],
        key=torch.cat([reindex(tree.key, tree.key_names, key_names) for tree in trees])[order],
        modality=torch.cat(
            [reindex(tree.modality, tree.modality_names, modality_names) for tree in trees]
        )[order],
        key_names=key_names,
        modality_names=modality_names,
        tree_rows=tuple(tree_rows),
        source_offsets=_joined_offsets(trees),
    )


def _joined_offsets(trees: Sequence[SignalTree]) -> Tensor | None:
    """The offsets of all rows, -1 for those of trees without a source."""
    if all(tree.source_offsets is None for tree in trees):
        return None
    return torch.cat(
        [
            tree.row_node.new_full((tree.num_rows, 2), -1)
            if tree.source_offsets is None
            else tree.source_offsets
            for tree in trees
        ]
    )


def _shifted(parts: list[Tensor], sizes: list[int]) -> Tensor:
    """Join indices, each part offset by the sizes of the parts before it; -1 stays."""
    device = parts[0].device
    begin = torch.tensor([0, *sizes[:-1]], device=device).cumsum(0)
    lengths = torch.tensor([len(part) for part in parts], device=device)
    joined = torch.cat(parts)
    return torch.where(joined >= 0, joined + begin.repeat_interleave(lengths), -1)


def tree_of_node(tree: SignalTree) -> Tensor:
    """Return the number of the tree that each node belongs to."""
    root_begin = tree.leaf_begin[: tree.num_trees].contiguous()
    return torch.searchsorted(root_begin, tree.leaf_begin, right=True) - 1


def unbatch(forest: SignalTree) -> list[SignalTree]:
    """See `SignalTree.unbatch`."""
    owner = tree_of_node(forest)
    by_tree = torch.argsort(owner, stable=True)  # breadth-first within each tree
    sizes = torch.bincount(owner, minlength=forest.num_trees).tolist()
    parent = renumber(forest.parent, by_tree)
    result = []
    begin = 0
    for number, size in enumerate(sizes):
        nodes = by_tree[begin : begin + size]
        row_begin, row_end = forest.tree_rows[number : number + 2]
        above, row = parent[begin : begin + size], forest.leaf_row[nodes]
        result.append(
            assemble(
                torch.where(above >= 0, above - begin, -1),
                torch.where(row >= 0, row - row_begin, -1),
                domain=forest.domain[nodes],
                position=forest.position[nodes],
                key=forest.key[nodes],
                modality=forest.modality[nodes],
                key_names=forest.key_names,
                modality_names=forest.modality_names,
                tree_rows=(0, row_end - row_begin),
                source_offsets=None
                if forest.source_offsets is None
                else forest.source_offsets[row_begin:row_end],
            )
        )
        begin += size
    return result


def prune(tree: SignalTree, keep: Tensor) -> SignalTree:
    """See `SignalTree.prune`."""
    if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.shape != (tree.num_rows,):
        got = (
            f"{keep.dtype} {list(keep.shape)}" if isinstance(keep, Tensor) else type(keep).__name__
        )
        raise ValueError(
            f"keep must be a bool tensor [{tree.num_rows}], True for rows that stay, got {got}; "
            "of an attention mask, pass attention_mask.bool()"
        )
    kept = keep.to(tree.device)[tree.leaf_row[tree.leaf_order]]  # [num_leaves]
    before = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
    remaining = before[tree.leaf_begin + tree.leaf_count] - before[tree.leaf_begin]  # [M]
    empty = first(remaining[: tree.num_trees] == 0)
    if empty is not None:
        raise ValueError(f"keep: tree {empty} (node {empty}) loses all its leaves; 0 leaves remain")
    nodes = (remaining > 0).nonzero().flatten()
    return _of_nodes(tree, nodes, renumber(tree.parent, nodes), nodes)


def collapse(tree: SignalTree) -> SignalTree:
    """See `SignalTree.collapse`."""
    single = tree.child_count == 1  # [M], the nodes that are removed
    above = tree.parent.clamp(min=0)
    link = torch.where((tree.parent >= 0) & single[above], tree.parent, -1)
    top = torch.arange(tree.num_nodes, device=tree.device)
    for nodes, ancestors in leaps(link):
        top[nodes] = top[ancestors]
    # A node that stays takes the place of the highest of the one-child nodes right above it.
    parent = tree.parent[top]
    stay = (~single).nonzero().flatten()
    parent = renumber(parent, stay)
    order = breadth_first_order(parent, top[stay])
    return _of_nodes(tree, stay[order], renumber(parent, order), top[stay[order]])


def _of_nodes(tree: SignalTree, nodes: Tensor, parent: Tensor, places: Tensor) -> SignalTree:
    return assemble(
        parent,
        tree.leaf_row[nodes],
        domain=tree.domain[nodes],
        position=tree.position[places],
        key=tree.key[places],
        modality=tree.modality[nodes],
        key_names=tree.key_names,
        modality_names=tree.modality_names,
        tree_rows=tree.tree_rows,
        source_offsets=tree.source_offsets,
    )


def same(one: SignalTree, other: SignalTree) -> bool:
    """Compare two trees of one size by the names of keys and modalities, not their numbers."""
    key_names = merge_names([one.key_names, other.key_names])
    modality_names = merge_names([one.modality_names, other.modality_names])

    def parts(tree: SignalTree) -> list[Tensor]:
        return [
            tree.parent,
            tree.leaf_row,
            tree.domain,
            tree.position,
            reindex(tree.key, tree.key_names, key_names),
            reindex(tree.modality, tree.modality_names, modality_names),
        ]

    return all(
        torch.equal(a, b.to(a.device)) for a, b in zip(parts(one), parts(other), strict=True)
    )

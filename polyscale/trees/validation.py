"""Check every tensor of a tree against every other, for trees from files or changed in place."""

import torch
from torch import Tensor

from polyscale.trees.checks import check_labels, check_parents, check_rows, first
from polyscale.trees.structure import derive
from polyscale.trees.tree import SignalTree

PER_NODE = (
    "parent",
    "depth",
    "first_child",
    "child_count",
    "leaf_count",
    "leaf_begin",
    "leaf_row",
    "domain",
    "key",
    "modality",
)


def validate(tree: SignalTree) -> None:
    """See `SignalTree.validate`."""
    _check_tensors(tree)
    check_parents(tree.parent, tree.num_trees)
    _check_numbering(tree)
    derived = derive(tree.parent)
    for name in ("child_count", "first_child", "leaf_count", "depth", "leaf_begin"):
        _same(name, "node", getattr(tree, name), derived[name])
    leaves = derived["leaf_order"]
    if tree.leaf_order.shape != leaves.shape:
        raise ValueError(
            f"leaf_order must have {leaves.numel()} leaves, as parent has, got {tree.num_leaves}"
        )
    _same("leaf_order", "leaf", tree.leaf_order, leaves)
    counted = derived["depth_offsets"]
    if tree.depth_offsets != counted:
        raise ValueError(
            f"depth_offsets must be {_shown(counted)}, got {_shown(tree.depth_offsets)}"
        )
    check_rows(tree.parent, tree.leaf_row, tree.num_rows)
    row_node = torch.full_like(tree.row_node, -1)
    row_node[tree.leaf_row[leaves]] = leaves
    _same("row_node", "row", tree.row_node, row_node)
    _check_tree_rows(tree)
    check_labels(
        tree.parent,
        tree.domain,
        tree.position,
        tree.key,
        tree.modality,
        tree.key_names,
        tree.modality_names,
    )


def _check_tensors(tree: SignalTree) -> None:
    nodes = tree.parent.numel() if isinstance(tree.parent, Tensor) else 0
    for name in (*PER_NODE, "position", "leaf_order", "row_node"):
        tensor = getattr(tree, name)
        if not isinstance(tensor, Tensor) or tensor.dtype != torch.int64:
            got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be an int64 tensor, got {got}")
        if tensor.device != tree.parent.device:
            raise ValueError(f"{name}: is on {tensor.device}, parent on {tree.parent.device}")
        if name in PER_NODE and tensor.shape != (nodes,):
            raise ValueError(f"{name} must have shape [{nodes}], got {list(tensor.shape)}")
        if tensor.dim() != 1 and name != "position":
            raise ValueError(f"{name} must have one dimension, got shape {list(tensor.shape)}")
    if tree.position.shape != (nodes, 2):
        raise ValueError(f"position must have shape [{nodes}, 2], got {list(tree.position.shape)}")
    _check_offsets(tree)
    for name in ("tree_rows", "depth_offsets"):
        value = getattr(tree, name)
        if not isinstance(value, tuple) or len(value) < 2 or {type(v) for v in value} != {int}:
            raise TypeError(f"{name} must be a tuple of two or more int, got {_shown(value)}")


def _check_offsets(tree: SignalTree) -> None:
    offsets = tree.source_offsets
    if offsets is None:
        return
    if not isinstance(offsets, Tensor) or offsets.dtype != torch.int64:
        got = offsets.dtype if isinstance(offsets, Tensor) else type(offsets).__name__
        raise TypeError(f"source_offsets must be None or an int64 tensor, got {got}")
    if offsets.shape != (tree.num_rows, 2):
        raise ValueError(
            f"source_offsets must have shape [{tree.num_rows}, 2], got {list(offsets.shape)}"
        )
    if offsets.device != tree.parent.device:
        raise ValueError(f"source_offsets: is on {offsets.device}, parent on {tree.parent.device}")
    row = first((offsets[:, 0] > offsets[:, 1]) | (offsets < -1).any(1))
    if row is not None:
        raise ValueError(
            f"source_offsets of row {row} must be its first character and the end, or [-1, -1], "
            f"got {offsets[row].tolist()}"
        )


def _check_numbering(tree: SignalTree) -> None:
    parent = tree.parent
    node = first(parent[: tree.num_trees] != -1)
    if node is not None:
        raise ValueError(
            f"parent: node {node} has parent {int(parent[node])}; the first {tree.num_trees} "
            "nodes of a tree are its roots"
        )
    node = first(parent[1:] < parent[:-1])
    if node is not None:
        raise ValueError(
            f"parent: node {node + 1} has parent {int(parent[node + 1])} and comes after the "
            f"children of {int(parent[node])}; nodes are breadth-first (from_parents renumbers)"
        )


def _check_tree_rows(tree: SignalTree) -> None:
    bounds = torch.tensor(tree.tree_rows, device=tree.device)
    if tree.tree_rows[0] != 0 or tree.tree_rows[-1] != tree.num_rows:
        raise ValueError(
            f"tree_rows must go from 0 to {tree.num_rows}, got {_shown(tree.tree_rows)}"
        )
    number = first(bounds[1:] <= bounds[:-1])
    if number is not None:
        raise ValueError(f"tree_rows: tree {number} has no rows in {_shown(tree.tree_rows)}")
    # Leaves from left to right are those of tree 0, then of tree 1, ...
    owner = torch.repeat_interleave(
        torch.arange(tree.num_trees, device=tree.device), tree.leaf_count[: tree.num_trees]
    )
    row = tree.leaf_row[tree.leaf_order]
    place = first((row < bounds[owner]) | (row >= bounds[owner + 1]))
    if place is not None:
        number = int(owner[place])
        raise ValueError(
            f"leaf_row: node {int(tree.leaf_order[place])} of tree {number} carries row "
            f"{int(row[place])}, outside the rows {tree.tree_rows[number]}.."
            f"{tree.tree_rows[number + 1] - 1} of that tree"
        )


def _same(name: str, thing: str, got: Tensor, counted: Tensor) -> None:
    place = first(got != counted)
    if place is not None:
        raise ValueError(
            f"{name}: {thing} {place} has {int(got[place])}, but the tree gives "
            f"{int(counted[place])}"
        )


def _shown(values: object) -> str:
    if isinstance(values, tuple) and len(values) > 8:
        return f"({', '.join(map(repr, values[:6]))}, ..., {values[-1]!r})"
    return repr(values)

"""SignalTree: a signal hierarchy as flat tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from polyscale.trees import checks
from polyscale.trees.structure import breadth_first_order, derive, index_in_family, renumber


@dataclass(frozen=True, eq=False, repr=False)
class SignalTree:
    """A tree, or a forest of `num_trees` trees, over the rows of a data tensor.

    Nodes are numbered breadth-first: by depth, siblings side by side, families in the order of
    their parents; the roots come first. Build one with a `from_...` method. All tensors are int64
    on one device, M is the number of nodes and N the number of data rows.

    >>> tree = SignalTree.from_parents([-1, 0, 0, 1, 1])
    >>> tree.parent.tolist(), tree.leaf_count.tolist()
    ([-1, 0, 0, 1, 1], [3, 2, 1, 1, 1])
    """

    DOMAINS: ClassVar[tuple[str, ...]] = checks.DOMAINS

    parent: Tensor  # [M], -1 for a root
    depth: Tensor  # [M], 0 for a root
    first_child: Tensor  # [M], 0 for a leaf
    child_count: Tensor  # [M], 0 for a leaf
    leaf_count: Tensor  # [M], leaves under the node, 1 for a leaf
    leaf_begin: Tensor  # [M], rank in leaf_order of the first leaf under the node
    leaf_order: Tensor  # [num_leaves], leaf nodes from left to right
    leaf_row: Tensor  # [M], data row of a leaf, -1 for an inner node
    row_node: Tensor  # [N], leaf node of a data row, -1 for a row outside the tree
    domain: Tensor  # [M], index into DOMAINS, -1 for a leaf
    position: Tensor  # [M, 2], coordinates in the parent's domain
    key: Tensor  # [M], index into key_names, -1 unless the parent is keyed
    modality: Tensor  # [M], index into modality_names, -1 for an inner node
    key_names: tuple[str, ...]
    modality_names: tuple[str, ...]
    depth_offsets: tuple[int, ...]  # nodes of depth d are depth_offsets[d] : depth_offsets[d + 1]
    tree_rows: tuple[int, ...]  # rows of tree t are tree_rows[t] : tree_rows[t + 1]

    @property
    def num_nodes(self) -> int:
        return self.parent.numel()

    @property
    def num_rows(self) -> int:
        return self.row_node.numel()

    @property
    def num_leaves(self) -> int:
        return self.leaf_order.numel()

    @property
    def num_trees(self) -> int:
        return len(self.tree_rows) - 1

    @property
    def num_inner(self) -> int:
        return self.num_nodes - self.num_leaves

    @property
    def max_depth(self) -> int:
        """Depth of the deepest leaf; 0 for a single leaf."""
        return len(self.depth_offsets) - 2

    @property
    def device(self) -> torch.device:
        return self.parent.device

    @classmethod
    def from_parents(
        cls,
        parent: Any,
        *,
        rows: Any = None,
        num_rows: int | None = None,
        domains: str | Sequence[str | None] | Tensor | None = None,
        positions: Any = None,
        keys: Sequence[str | None] | Tensor | None = None,
        key_names: Sequence[str] | None = None,
        modalities: str | Sequence[str | None] | Tensor | None = None,
        modality_names: Sequence[str] | None = None,
    ) -> SignalTree:
        """Build one tree from the parent of each node, nodes in any order, -1 for the root.

        Siblings keep the order of their numbers. Everything else is given per node as well:
        `rows` (-1 for inner nodes) defaults to numbering the leaves from left to right, that is
        depth-first, whatever their numbers; `num_rows` to the largest row + 1. `domains`
        ("sequence" unless given) and `modalities` are one name for all, names (None where there
        is none) or a tensor of indices into DOMAINS / `modality_names`; `keys` names the
        children of keyed nodes. `positions` [M] or [M, 2] defaults to the index in the family,
        0 in a set, and must be given for the children of a grid2d.

        >>> SignalTree.from_parents([2, 2, -1], rows=[1, 0, -1]).leaf_row.tolist()
        [-1, 1, 0]
        """
        parent = checks.whole_numbers(parent, "parent")
        checks.check_parents(parent)
        order = breadth_first_order(parent)
        is_leaf = torch.ones_like(parent, dtype=torch.bool)
        is_leaf[parent[parent >= 0]] = False
        if rows is not None:
            leaf_row = checks.per_node(rows, "rows", parent)
            if num_rows is None:
                num_rows = int(leaf_row.max()) + 1
            checks.check_rows(parent, leaf_row, num_rows)
        elif num_rows is not None and num_rows < int(is_leaf.sum()):
            raise ValueError(f"num_rows: got {num_rows} for {int(is_leaf.sum())} leaves")

        domain = checks.encode(
            "sequence" if domains is None else domains, "domains", cls.DOMAINS, parent, ~is_leaf
        )[0]
        key, key_names = checks.encode(keys, "keys", key_names, parent, None)
        modality, modality_names = checks.encode(
            "default" if modalities is None else modalities,
            "modalities",
            modality_names,
            parent,
            is_leaf,
        )
        position = _positions(positions, parent, domain, order)
        checks.check_labels(parent, domain, position, key, modality, key_names, modality_names)

        return assemble(
            renumber(parent, order),
            None if rows is None else leaf_row[order],
            domain=domain[order],
            position=position[order],
            key=key[order],
            modality=modality[order],
            key_names=key_names,
            modality_names=modality_names,
            tree_rows=None if num_rows is None else (0, num_rows),
        )


def assemble(
    parent: Tensor,
    leaf_row: Tensor | None = None,
    *,
    domain: Tensor,
    position: Tensor,
    key: Tensor,
    modality: Tensor,
    key_names: tuple[str, ...] = (),
    modality_names: tuple[str, ...] = ("default",),
    tree_rows: tuple[int, ...] | None = None,
) -> SignalTree:
    """Complete a tree whose nodes are breadth-first; `leaf_row` None is left to right."""
    derived = derive(parent)
    if leaf_row is None:
        leaf_row = torch.where(derived["child_count"] == 0, derived["leaf_begin"], -1)
    leaves = derived["leaf_order"]
    if tree_rows is None:
        tree_rows = (0, leaves.numel())
    row_node = parent.new_full((tree_rows[-1],), -1)  # [N]
    row_node[leaf_row[leaves]] = leaves
    return SignalTree(
        parent=parent,
        leaf_row=leaf_row,
        row_node=row_node,
        domain=domain,
        position=position,
        key=key,
        modality=modality,
        key_names=key_names,
        modality_names=modality_names,
        depth_offsets=offsets(torch.bincount(derived["depth"])),
        tree_rows=tree_rows,
        **derived,
    )


def offsets(counts: Tensor) -> tuple[int, ...]:
    """Return where each of the parts of these sizes begins, and where the last one ends."""
    return (0, *counts.cumsum(0).tolist())


def _positions(positions: Any, parent: Tensor, domain: Tensor, order: Tensor) -> Tensor:
    above = torch.where(parent >= 0, domain[parent.clamp(min=0)], -1)  # [M]
    if positions is not None:
        given = checks.whole_numbers(positions, "positions", parent.device)
        if given.shape == parent.shape:
            return torch.stack([given, torch.zeros_like(given)], dim=1)
        if given.shape != (parent.numel(), 2):
            raise ValueError(
                f"positions: got shape {list(given.shape)}, takes [{parent.numel()}] or "
                f"[{parent.numel()}, 2]"
            )
        return given
    node = checks.first(above == checks.GRID2D)
    if node is not None:
        raise ValueError(f"positions: node {node} is in a grid2d, so its row and column are needed")
    position = parent.new_zeros(parent.numel(), 2)
    position[order, 0] = index_in_family(renumber(parent, order))
    position[(above == checks.SET) | (above == -1)] = 0
    return position

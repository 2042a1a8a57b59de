"""A tree from its parents and labels: everything else follows."""

import torch
from torch import Tensor

from polyscale.trees.structure import derive
from polyscale.trees.tree import SignalTree


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
    source_offsets: Tensor | None = None,
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
        tree_rows=tree_rows,
        source_offsets=source_offsets,
        **derived,
    )

"""Trees from parent arrays in any order."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyscale.checks import check_integer
from polyscale.trees import checks
from polyscale.trees.assembly import assemble
from polyscale.trees.structure import breadth_first_order, index_in_family, renumber
from polyscale.trees.tree import SignalTree


def from_parents(
    parents: Any,
    *,
    rows: Any,
    num_rows: int | None,
    domains: str | Sequence[str | None] | Tensor | None,
    positions: Any,
    keys: Sequence[str | None] | Tensor | None,
    key_names: Sequence[str] | None,
    modalities: str | Sequence[str | None] | Tensor | None,
    modality_names: Sequence[str] | None,
) -> SignalTree:
    """See `SignalTree.from_parents`."""
    parent = checks.integers(parents, "parent")
    checks.check_parents(parent)
    order = breadth_first_order(parent)
    is_leaf = torch.ones_like(parent, dtype=torch.bool)
    is_leaf[parent[parent >= 0]] = False
    if num_rows is not None:
        num_rows = check_integer("num_rows", num_rows, least=1)
    if rows is not None:
        leaf_row = checks.per_node(rows, "rows", parent)
        if num_rows is None:
            num_rows = int(leaf_row.max()) + 1
        checks.check_rows(parent, leaf_row, num_rows)
    elif num_rows is not None and num_rows < int(is_leaf.sum()):
        raise ValueError(
            f"num_rows must be at least the {int(is_leaf.sum())} leaves, got {num_rows}"
        )

    domain = checks.encode(
        "sequence" if domains is None else domains, "domains", checks.DOMAINS, parent, ~is_leaf
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


def _positions(positions: Any, parent: Tensor, domain: Tensor, order: Tensor) -> Tensor:
    above = torch.where(parent >= 0, domain[parent.clamp(min=0)], -1)  # [M]
    if positions is not None:
        given = checks.integers(positions, "positions", parent.device)
        if given.shape == parent.shape:
            return torch.stack([given, torch.zeros_like(given)], dim=1)
        if given.shape != (parent.numel(), 2):
            raise ValueError(
                f"positions must have shape [{parent.numel()}] or [{parent.numel()}, 2], "
                f"got {list(given.shape)}"
            )
        return given
    node = checks.first(above == checks.GRID2D)
    if node is not None:
        raise ValueError(f"positions: node {node} is in a grid2d, so its row and column are needed")
    position = parent.new_zeros(parent.numel(), 2)
    position[order, 0] = index_in_family(renumber(parent, order))
    position[(above == checks.SET) | (above == -1)] = 0
    return position

"""What a tree must satisfy; every error names the node."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from polyscale.trees.structure import leaps

DOMAINS = ("sequence", "grid2d", "set", "keyed", "graph")
GRID2D = DOMAINS.index("grid2d")
SET = DOMAINS.index("set")
KEYED = DOMAINS.index("keyed")


def first(mask: Tensor) -> int | None:
    """Return the first true index of a 1-D mask, None if there is none."""
    found = mask.nonzero()
    return int(found[0]) if found.numel() else None


def integers(values: Any, argument: str, device: torch.device | None = None) -> Tensor:
    """Return `values` as an int64 tensor; fractions and bools are refused."""
    if isinstance(values, Tensor):
        tensor = values
    else:
        try:
            tensor = torch.as_tensor(values)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{argument} must be integers, got {type(values).__name__} ({error})"
            ) from error
    is_whole = not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)
    if tensor.numel() and not is_whole:
        raise TypeError(f"{argument} must be integers, got dtype {tensor.dtype}")
    return tensor.to(device=device, dtype=torch.int64)


def per_node(values: Any, argument: str, parent: Tensor) -> Tensor:
    """Return `values` as an int64 tensor with one number for each node."""
    tensor = integers(values, argument, parent.device)
    if tensor.shape != parent.shape:
        raise ValueError(
            f"{argument} must have one number for each of the {parent.numel()} nodes, "
            f"got shape {list(tensor.shape)}"
        )
    return tensor


def check_parents(parent: Tensor, num_trees: int = 1) -> None:
    """Refuse anything that is not `num_trees` trees."""
    if parent.dim() != 1:
        raise ValueError(f"parent must have one dimension [nodes], got shape {list(parent.shape)}")
    nodes = parent.numel()
    if nodes == 0:
        raise ValueError("parent must have at least one node, got none")
    node = first((parent < -1) | (parent >= nodes))
    if node is not None:
        raise ValueError(
            f"parent of node {node} must be -1 (a root) or a node from 0 to {nodes - 1}, "
            f"got {int(parent[node])}"
        )
    roots = (parent == -1).nonzero().flatten().tolist()
    if len(roots) > num_trees:
        wanted = "one tree has one" if num_trees == 1 else f"{num_trees} trees have {num_trees}"
        raise ValueError(
            f"parent: nodes {', '.join(map(str, roots[:5]))}{', ...' if len(roots) > 5 else ''} "
            f"are {len(roots)} roots; {wanted} (SignalTree.batch joins several trees)"
        )
    for _ in leaps(parent):  # raises on a cycle
        pass
    if len(roots) < num_trees:
        raise ValueError(f"parent must have {num_trees} roots, one for each tree, got {len(roots)}")


def check_rows(parent: Tensor, leaf_row: Tensor, num_rows: int) -> None:
    """Refuse leaves without a row, inner nodes with one, and rows carried twice."""
    is_leaf = torch.ones_like(parent, dtype=torch.bool)
    is_leaf[parent[parent >= 0]] = False
    node = first(is_leaf & (leaf_row == -1))
    if node is not None:
        raise ValueError(f"rows: node {node} has no children and carries no row")
    node = first(~is_leaf & (leaf_row != -1))
    if node is not None:
        raise ValueError(
            f"rows: node {node} has children and cannot carry row {int(leaf_row[node])}; "
            "the row of an inner node is -1"
        )
    node = first(is_leaf & ((leaf_row < 0) | (leaf_row >= num_rows)))
    if node is not None:
        raise ValueError(
            f"rows of node {node} must be from 0 to {num_rows - 1}, got {int(leaf_row[node])}"
        )
    leaves = is_leaf.nonzero().flatten()
    by_row = leaves[torch.argsort(leaf_row[leaves], stable=True)]
    place = first(leaf_row[by_row][1:] == leaf_row[by_row][:-1])
    if place is not None:
        one, other = int(by_row[place]), int(by_row[place + 1])
        raise ValueError(
            f"rows: duplicate leaves: nodes {one} and {other} both carry row {int(leaf_row[one])}"
        )


def check_labels(
    parent: Tensor,
    domain: Tensor,
    position: Tensor,
    key: Tensor,
    modality: Tensor,
    key_names: tuple[str, ...],
    modality_names: tuple[str, ...],
) -> None:
    """Refuse domains, positions, keys and modalities that do not fit the tree."""
    is_leaf = torch.ones_like(parent, dtype=torch.bool)
    is_leaf[parent[parent >= 0]] = False

    def refuse(node: int | None, argument: str, got: Tensor, expected: str) -> None:
        if node is not None:
            raise ValueError(
                f"{argument} of node {node} must be {expected}, got {got[node].tolist()}"
            )

    refuse(first(is_leaf & (domain != -1)), "domain", domain, "-1, because it is a leaf")
    refuse(
        first(~is_leaf & ((domain < 0) | (domain >= len(DOMAINS)))),
        "domain",
        domain,
        f"0..{len(DOMAINS) - 1} ({', '.join(DOMAINS)}), because it has children",
    )
    above = torch.where(parent >= 0, domain[parent.clamp(min=0)], -1)
    refuse(first((position < 0).any(1)), "position", position, "coordinates >= 0")
    refuse(
        first(((above == SET) | (above == -1)) & (position != 0).any(1)),
        "position",
        position,
        "[0, 0], because it is a root or a member of a set",
    )
    refuse(
        first((above == KEYED) & ((key < 0) | (key >= len(key_names)))),
        "key",
        key,
        f"0..{len(key_names) - 1} (an index into key_names), because its parent is keyed",
    )
    refuse(first((above != KEYED) & (key != -1)), "key", key, "-1: its parent is not keyed")
    refuse(
        first(is_leaf & ((modality < 0) | (modality >= len(modality_names)))),
        "modality",
        modality,
        f"0..{len(modality_names) - 1} (an index into modality_names)",
    )
    refuse(first(~is_leaf & (modality != -1)), "modality", modality, "-1, because it has children")
    for argument, names in (("key_names", key_names), ("modality_names", modality_names)):
        if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
            raise TypeError(f"{argument} must be a tuple of str, got {names!r}")
        if len(set(names)) != len(names):
            raise ValueError(f"{argument} must be unique, got {names!r}")


def encode(
    values: Any,
    argument: str,
    names: Sequence[str] | None,
    parent: Tensor,
    where: Tensor | None,
) -> tuple[Tensor, tuple[str, ...]]:
    """Return an index into names for each node (-1 for none), and the names.

    `values` is one name for all nodes in `where`, a name or None for each node, or indices.
    """
    known = None if names is None else tuple(names)
    if values is None:
        return torch.full_like(parent, -1), known or ()
    if isinstance(values, str):
        known = known or (values,)
        index = _index_of(values, known, argument, "every node")
        return torch.where(cast(Tensor, where), index, -1), known
    if not isinstance(values, Tensor) and all(v is None or isinstance(v, str) for v in values):
        if len(values) != parent.numel():
            raise ValueError(
                f"{argument} must have a name for each of {parent.numel()} nodes, got {len(values)}"
            )
        if known is None:
            known = tuple(dict.fromkeys(v for v in values if v is not None))
        numbers = {name: index for index, name in enumerate(known)}
        unknown = [n for n, v in enumerate(values) if v is not None and v not in numbers]
        if unknown:
            _index_of(values[unknown[0]], known, argument, f"node {unknown[0]}")
        return (
            torch.tensor([-1 if v is None else numbers[v] for v in values], device=parent.device),
            known,
        )
    if known is None:
        raise ValueError(f"{argument} must be names, got indices without the names they index")
    return per_node(values, argument, parent), known


def _index_of(name: str, names: tuple[str, ...], argument: str, node: str) -> int:
    if name not in names:
        raise ValueError(f"{argument} of {node} must be one of {', '.join(names)}, got {name!r}")
    return names.index(name)

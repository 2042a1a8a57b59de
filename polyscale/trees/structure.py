"""Arithmetic on parent arrays: no recursion and no loop over nodes, so depth costs only its log."""

from collections.abc import Iterator

import torch
from torch import Tensor


def leaps(parent: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `(nodes, ancestors)` for ancestors 1, 2, 4, ... steps up; refuse cycles."""
    jump = parent
    nodes = (parent >= 0).nonzero().flatten()
    for _ in range(parent.numel().bit_length() + 1):
        if not nodes.numel():
            return
        targets = jump[nodes]
        yield nodes, targets
        following = torch.full_like(parent, -1)
        following[nodes] = jump[targets]
        jump = following
        nodes = nodes[jump[nodes] >= 0]
    if nodes.numel():
        # More steps up than there are nodes: where they lead is on a cycle.
        raise ValueError(_describe_cycle(parent, int(jump[nodes].min())))


def _describe_cycle(parent: Tensor, start: int) -> str:
    path = [start]
    while len(path) < 8:
        path.append(int(parent[path[-1]]))
        if path[-1] == start:
            break
    shown = " -> ".join(str(node) for node in path)
    return (
        f"parent: node {start} is its own ancestor "
        f"(cycle {shown}{'' if path[-1] == start else ' -> ...'}); a tree takes no cycles"
    )


def ancestor_sum(parent: Tensor, weight: Tensor) -> Tensor:
    """Sum `weight` over each node and all its ancestors."""
    total = weight.clone()  # [M]
    for nodes, ancestors in leaps(parent):
        total[nodes] += total[ancestors]
    return total


def descendant_sum(parent: Tensor, weight: Tensor) -> Tensor:
    """Sum `weight` over each node and all its descendants."""
    total = weight.clone()  # [M]
    for nodes, ancestors in leaps(parent):
        # The right side is read before any of it is added to.
        total = total.index_add(0, ancestors, total[nodes])
    return total


def earlier_sibling_sum(parent: Tensor, weight: Tensor) -> Tensor:
    """Sum `weight` over earlier siblings; `parent` is sorted, and roots count as siblings."""
    before = weight.cumsum(0) - weight  # [M]
    _, family, size = torch.unique_consecutive(parent, return_inverse=True, return_counts=True)
    first = size.cumsum(0) - size  # [families]
    return before - before[first][family]


def breadth_first_order(parent: Tensor, sibling_rank: Tensor | None = None) -> Tensor:
    """Return the nodes by depth, then left to right; siblings by rank, else by their number."""
    if sibling_rank is None:
        by_family = torch.argsort(parent, stable=True)
    else:
        by_rank = torch.argsort(sibling_rank, stable=True)
        by_family = by_rank[torch.argsort(parent[by_rank], stable=True)]
    ones = torch.ones_like(parent)
    size = descendant_sum(parent, ones)
    before = torch.empty_like(parent)
    before[by_family] = earlier_sibling_sum(parent[by_family], size[by_family])
    preorder = ancestor_sum(parent, before + 1)
    depth = ancestor_sum(parent, ones) - 1
    return torch.argsort(depth * (parent.numel() + 1) + preorder)


def renumber(parent: Tensor, order: Tensor) -> Tensor:
    """Return the parents of the nodes `order`, in that order and in its numbering.

    A node whose parent is not in `order` becomes a root.
    """
    number = torch.full_like(parent, -1)
    number[order] = torch.arange(order.numel(), device=parent.device)
    old = parent[order]
    return torch.where(old >= 0, number[old.clamp(min=0)], -1)


def index_in_family(parent: Tensor) -> Tensor:
    """Count the earlier siblings of each node; `parent` is sorted."""
    return earlier_sibling_sum(parent, torch.ones_like(parent))


def derive(parent: Tensor) -> dict[str, Tensor]:
    """Return all that follows from the parents of a breadth-first forest."""
    ones = torch.ones_like(parent)
    inner = parent[parent >= 0]
    child_count = torch.bincount(inner, minlength=parent.numel())
    num_roots = parent.numel() - inner.numel()
    is_leaf = child_count == 0
    first_child = torch.where(is_leaf, 0, num_roots + child_count.cumsum(0) - child_count)
    leaf_count = descendant_sum(parent, is_leaf.long())
    leaf_begin = ancestor_sum(parent, earlier_sibling_sum(parent, leaf_count))
    leaves = is_leaf.nonzero().flatten()
    leaf_order = torch.empty_like(leaves)
    leaf_order[leaf_begin[leaves]] = leaves
    return {
        "depth": ancestor_sum(parent, ones) - 1,
        "first_child": first_child,
        "child_count": child_count,
        "leaf_count": leaf_count,
        "leaf_begin": leaf_begin,
        "leaf_order": leaf_order,
    }

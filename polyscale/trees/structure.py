"""Arithmetic on parent arrays, without recursion or loops over nodes.

The number of steps grows with the logarithm of the depth.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

# Up to this many levels, a step for each is quicker than leaps over all nodes.
FEW_LEVELS = 64


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
        f"(cycle {shown}{'' if path[-1] == start else ' -> ...'}); a tree has no cycles"
    )


def ancestor_sum(parent: Tensor, weight: Tensor, levels: Sequence[int] = ()) -> Tensor:
    """Sum `weight` over each node and all its ancestors; `levels` if nodes are breadth-first."""
    total = weight.clone()  # [M]
    if 0 < len(levels) <= FEW_LEVELS:
        for begin, end in pairwise(levels[1:]):
            total[begin:end] += total[parent[begin:end]]
        return total
    for nodes, ancestors in leaps(parent):
        total[nodes] += total[ancestors]
    return total


def descendant_sum(parent: Tensor, weight: Tensor, levels: Sequence[int] = ()) -> Tensor:
    """Sum `weight` over each node and all below it; `levels` if nodes are breadth-first."""
    total = weight.clone()  # [M]
    if 0 < len(levels) <= FEW_LEVELS:
        for begin, end in reversed(list(pairwise(levels[1:]))):
            total.index_add_(0, parent[begin:end], total[begin:end].clone())
        return total
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
    """Return the nodes by depth, then left to right; siblings by rank, if given, or number."""
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


def derive(parent: Tensor) -> dict[str, Any]:
    """Return all that follows from the parents of a breadth-first forest."""
    below = parent[parent >= 0]
    roots = parent.numel() - below.numel()
    child_count = torch.bincount(below, minlength=parent.numel())
    is_leaf = child_count == 0
    family_end = roots + child_count.cumsum(0)  # [M]
    levels = [0, roots]
    while levels[-1] < parent.numel():
        levels.append(int(family_end[levels[-1] - 1]))
    first_child = family_end - child_count
    leaf_count = descendant_sum(parent, is_leaf.long(), levels)
    earlier = leaf_count.cumsum(0) - leaf_count
    first_sibling = torch.cat([parent.new_zeros(roots), first_child[below]])
    leaf_begin = ancestor_sum(parent, earlier - earlier[first_sibling], levels)
    leaves = is_leaf.nonzero().flatten()
    leaf_order = torch.empty_like(leaves)
    leaf_order[leaf_begin[leaves]] = leaves
    return {
        "depth": torch.repeat_interleave(torch.tensor(levels, device=parent.device).diff()),
        "first_child": first_child.masked_fill(is_leaf, 0),
        "child_count": child_count,
        "leaf_count": leaf_count,
        "leaf_begin": leaf_begin,
        "leaf_order": leaf_order,
        "depth_offsets": tuple(levels),
    }

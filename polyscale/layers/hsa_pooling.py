"""Pooling over a tree: leaves into their parents, or a whole tree into one vector."""

from itertools import pairwise

import torch
from torch import Tensor

from polyscale.ops.numerics import accumulation_dtype
from polyscale.trees import SignalTree


def pool_into_parents(x: Tensor, tree: SignalTree) -> tuple[Tensor, SignalTree]:
    """Merge the families that hold leaves alone: the mean of their rows, and the smaller tree.

    Leaves beside inner nodes stay as they are; rows outside the tree are dropped. `x` is packed,
    `[N, C]`.

    >>> tree = SignalTree.from_nested([[0, 1], [2, 3, 4], 5])
    >>> pooled, smaller = pool_into_parents(torch.arange(6.0)[:, None], tree)
    >>> pooled.flatten().tolist(), smaller.num_rows
    ([0.5, 3.0, 5.0], 3)
    """
    _check_rows(x, tree)
    smaller, row_of_row = tree.pool_leaves()
    return _means(x, row_of_row, smaller.num_rows), smaller


def global_mean(x: Tensor, tree: SignalTree) -> Tensor:
    """Return the mean over the leaves of each tree, `[num_trees, C]`, of packed rows `[N, C]`.

    >>> tree = SignalTree.batch([SignalTree.from_windows(2), SignalTree.from_windows(3)])
    >>> global_mean(torch.arange(5.0)[:, None], tree).flatten().tolist()
    [0.5, 3.0]
    """
    _check_rows(x, tree)
    return _means(x, _tree_of_row(tree), tree.num_trees)


def tree_mean(x: Tensor, tree: SignalTree) -> Tensor:
    """Return the mean of means of each tree, `[num_trees, C]`, of packed rows `[N, C]`.

    Bottom up, every node is the mean of its children: a field of three words counts as much as one
    of sixty-four patches.

    >>> tree = SignalTree.from_nested([[0, 1, 2], 3])
    >>> tree_mean(torch.tensor([1.0, 2.0, 3.0, 10.0])[:, None], tree).item()
    6.0
    """
    _check_rows(x, tree)
    share = torch.ones(tree.num_nodes, dtype=accumulation_dtype(x.dtype), device=x.device)
    for begin, end in pairwise(tree.depth_offsets[1:]):  # nodes are sorted by their depth
        parent = tree.parent[begin:end]
        share[begin:end] = share[parent] / tree.child_count[parent]
    target = _tree_of_row(tree)
    inside = (target >= 0).nonzero().flatten()
    rows = x[inside].to(share.dtype) * share[tree.row_node[inside]][:, None]
    total = rows.new_zeros(tree.num_trees, x.shape[1])
    return total.index_add(0, target[inside], rows).to(x.dtype)


def _tree_of_row(tree: SignalTree) -> Tensor:
    """Return the number of each row's tree, `[N]`, -1 for rows outside."""
    rows = torch.tensor(tree.tree_rows, device=tree.device).diff()
    number = torch.repeat_interleave(rows, output_size=tree.num_rows)
    return torch.where(tree.row_node >= 0, number, -1)


def _means(x: Tensor, target: Tensor, count: int) -> Tensor:
    """Return the mean of the rows that have the same target, -1 for none: `[count, C]`."""
    # Rows outside the tree are never read, so NaN there cannot spread.
    inside = (target >= 0).nonzero().flatten()
    target = target[inside]
    rows = x[inside].to(accumulation_dtype(x.dtype))
    total = rows.new_zeros(count, x.shape[1]).index_add(0, target, rows)
    return (total / torch.bincount(target, minlength=count)[:, None]).to(x.dtype)


def _check_rows(x: Tensor, tree: SignalTree) -> None:
    if not isinstance(tree, SignalTree):
        raise TypeError(f"tree must be a SignalTree, got {type(tree).__name__}")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x must be a floating tensor [N, C], got {got}")
    if x.dim() != 2 or x.shape[0] != tree.num_rows:
        raise ValueError(
            f"x must have shape [N, C] with the tree's N = {tree.num_rows} rows, "
            f"got {list(x.shape)}"
        )
    if x.device != tree.device:
        raise ValueError(
            f"x must be on the device of the tree, {tree.device}, got {x.device}; use tree.to()"
        )

"""Pooling over a tree: leaves into their parents, or all leaves of a tree into one vector."""

import torch
from torch import Tensor

from polyscale.ops.hkt.reference import accumulation_dtype
from polyscale.trees import SignalTree


def pool_into_parents(x: Tensor, tree: SignalTree) -> tuple[Tensor, SignalTree]:
    """Merge the families that hold leaves alone: the mean of their rows, and the smaller tree.

    Leaves beside inner nodes stay as they are; rows outside the tree go. `x` is packed, `[N, C]`.

    >>> tree = SignalTree.from_nested([[0, 1], [2, 3, 4], 5])
    >>> pooled, smaller = pool_into_parents(torch.arange(6.0)[:, None], tree)
    >>> pooled.flatten().tolist(), smaller.num_rows
    ([0.5, 3.0, 5.0], 3)
    """
    _check(x, tree)
    smaller, row_of_row = tree.pool_leaves()
    return _means(x, row_of_row, smaller.num_rows), smaller


def global_mean(x: Tensor, tree: SignalTree) -> Tensor:
    """Return the mean over the leaves of each tree, `[num_trees, C]`, of packed rows `[N, C]`.

    >>> tree = SignalTree.batch([SignalTree.from_windows(2), SignalTree.from_windows(3)])
    >>> global_mean(torch.arange(5.0)[:, None], tree).flatten().tolist()
    [0.5, 3.0]
    """
    _check(x, tree)
    rows = torch.tensor(tree.tree_rows, device=tree.device).diff()
    number = torch.repeat_interleave(rows, output_size=tree.num_rows)  # [N]
    return _means(x, torch.where(tree.row_node >= 0, number, -1), tree.num_trees)


def _means(x: Tensor, target: Tensor, count: int) -> Tensor:
    """Return the mean of the rows that have the same target, -1 for none: `[count, C]`."""
    # Rows outside are never read, so that whatever they hold cannot spread.
    kept = (target >= 0).nonzero().flatten()
    target = target[kept]
    rows = x[kept].to(accumulation_dtype(x.dtype))
    total = rows.new_zeros(count, x.shape[1]).index_add(0, target, rows)
    return (total / torch.bincount(target, minlength=count)[:, None]).to(x.dtype)


def _check(x: Tensor, tree: SignalTree) -> None:
    if not isinstance(tree, SignalTree):
        raise TypeError(f"tree: got {type(tree).__name__}, takes a SignalTree")
    if not isinstance(x, Tensor) or not x.is_floating_point():
        got = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"x: got {got}, takes a floating tensor [N, C]")
    if x.dim() != 2 or x.shape[0] != tree.num_rows:
        raise ValueError(
            f"x: got shape {list(x.shape)}, takes [N, C] with the tree's N = {tree.num_rows} rows"
        )
    if x.device != tree.device:
        raise ValueError(f"x: is on {x.device}, the tree on {tree.device}; move it with tree.to()")

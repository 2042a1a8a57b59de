"""FLOPs of attention over a tree and of softmax attention, by formula.

A multiplication and an addition count as two. Projections, exponentials and sums of weights are not
counted; masked scores are, as they are computed in both kinds of attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from polyscale.trees import SignalTree


@dataclass(frozen=True)
class AttentionFlops:
    """Operations of one attention layer on one text; a multiplication and an addition are two."""

    scores: int  # queries times keys
    mixing: int  # weights times values
    pooling: int  # means of queries, keys and values: one addition per entry

    @property
    def total(self) -> int:
        """All three together."""
        return self.scores + self.mixing + self.pooling


def softmax_flops(length: int, heads: int, dim: int) -> AttentionFlops:
    """The operations of softmax attention with heads of width `dim`.

    >>> softmax_flops(512, 12, 64).total
    805306368
    """
    product = 2 * heads * length * length * dim
    return AttentionFlops(product, product, 0)


def hsa_flops(
    tree: SignalTree, heads: int, dim: int, tie: str, extra_pairs: int = 0
) -> AttentionFlops:
    """The operations of HSA over a tree or a forest.

    Args:
        tree: one tree, or a forest.
        heads: how many heads.
        dim: the width of a head.
        tie: "blocks" or "columns".
        extra_pairs: pairs of a query and a key that are computed beside those of the tree.

    Example:
        >>> tree = SignalTree.from_windows(512, (16, 16))
        >>> hsa_flops(tree, 12, 64, "columns").total / softmax_flops(512, 12, 64).total < 0.08
        True
    """
    inner = tree.child_count > 0
    children = tree.child_count[inner]
    # The queries of a family are its children, or all leaves below it.
    queries = children if tie == "blocks" else tree.leaf_count[inner]
    pairs = int((queries * children).sum()) + extra_pairs
    # The mean of a root is not needed.
    pooled = int(children.sum()) - int(tree.child_count[: tree.num_trees].sum())
    product = 2 * heads * pairs * dim
    parts = 3 if tie == "blocks" else 2
    return AttentionFlops(product, product, parts * heads * pooled * dim)

"""The distance from a softmax to the closest matrix that ties what a tree ties.

Dense and in float64, for analysis. One family of the tree may be opened.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyscale.trees import SignalTree


class TiedSoftmax:
    """Energies of one tree for scores `[..., N, N]`, kept so that one family can be changed.

    The score of sibling B on sibling C is the mean of the scores of their leaf pairs, so dense
    scores are all that is needed, whatever they are made of.
    """

    def __init__(self, scores: Tensor, tree: SignalTree, tie: str) -> None:
        if tie not in ("blocks", "columns"):
            raise ValueError(f"tie must be 'blocks' or 'columns', got {tie!r}")
        if tree.num_trees != 1:
            raise ValueError(f"tree must be one tree, got {tree.num_trees}: see unbatch")
        if scores.shape[-2:] != (tree.num_rows, tree.num_rows):
            raise ValueError(
                f"scores must have shape [..., N, N] with N = {tree.num_rows}, "
                f"got {list(scores.shape)}"
            )
        rows = tree.leaf_row[tree.leaf_order]
        self.scores = scores.double()[..., rows, :][..., rows]  # leaves from left to right
        self.tree, self.tie = tree, tie
        self.parent = tree.parent.tolist()
        self.begin, self.count = tree.leaf_begin.tolist(), tree.leaf_count.tolist()
        self.first, self.size = tree.first_child.tolist(), tree.child_count.tolist()
        self.log_partition = torch.logsumexp(self.scores, -1)  # [..., leaves]
        # Of each node, per row: the log of what its rows see inside it.
        self.inside: dict[int, Tensor] = {}
        for node in reversed(range(tree.num_nodes)):
            self.inside[node] = self._inside(node, self.children(node), self.inside)

    def children(self, node: int) -> list[int]:
        """The children of a node, from left to right."""
        return list(range(self.first[node], self.first[node] + self.size[node]))

    def kl(self, opened: int | None = None) -> Tensor:
        """The least `sum_i KL(theta_i || softmax_i)` `[...]`, with one family opened if asked."""
        inside = self.inside[0]
        if opened is not None:
            children = []
            for child in self.children(opened):
                children += self.children(child) if self.size[child] else [child]
            updated = {opened: self._inside(opened, children, self.inside)}
            node = self.parent[opened]
            while node >= 0:
                inside_of = {child: self.inside[child] for child in self.children(node)} | updated
                updated = {node: self._inside(node, self.children(node), inside_of)}
                node = self.parent[node]
            inside = updated[0]
        # A row that sees no key has distance 0.
        gap = torch.where(self.log_partition > -torch.inf, self.log_partition - inside, 0.0)
        return gap.sum(-1).clamp(min=0.0)

    def _inside(self, node: int, children: list[int], inside: dict[int, Tensor]) -> Tensor:
        """`log` of what each leaf of a node sees inside it: `[..., leaves of the node]`.

        With tied rows all leaves share its mean over the children, which is minus the energy.
        """
        low, high = self.begin[node], self.begin[node] + self.count[node]
        block = self.scores[..., low:high, low:high]
        if not self.size[node]:
            return block[..., 0]
        counts = torch.tensor([self.count[child] for child in children])
        owner = torch.repeat_interleave(counts)  # [n] the child that holds each leaf
        # A leaf sees all of a sibling or, if causal, none of it, so no mean mixes finite with -inf.
        logits = (
            _sums(block, owner, len(children), -1) / counts + counts.double().log()
        )  # [.., n, b]
        own = torch.cat([inside[child] for child in children], -1)  # [..., n]
        diagonal = owner[:, None] == torch.arange(len(children))
        if self.tie == "columns":
            return torch.logsumexp(torch.where(diagonal, own[..., None], logits), -1)
        pooled = _sums(logits, owner, len(children), -2) / counts[:, None]  # [..., b, b]
        starts = counts.cumsum(0) - counts
        pooled = torch.where(
            torch.eye(len(children), dtype=torch.bool), own[..., starts, None], pooled
        )
        values = torch.logsumexp(pooled, -1)  # [..., b]
        mean = (values * counts).sum(-1, keepdim=True) / counts.sum()
        return mean.expand(*mean.shape[:-1], high - low)


def _sums(values: Tensor, owner: Tensor, number: int, dim: int) -> Tensor:
    """Sums over the entries of each owner along a dimension; -inf if one of them is."""
    shape = list(values.shape)
    shape[dim] = number
    return values.new_zeros(shape).index_add(dim, owner, values)

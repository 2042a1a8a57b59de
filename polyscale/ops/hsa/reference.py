"""HSA from its definition: recursion on Python trees, dense matrices, no tricks.

This file is the specification. Everything is built from four sentences.

- The flat score of leaf i on another leaf j is `s_ij = scale * q_i . k_j + eps_q[B] . eps_k[C]`
  where B and C are the highest distinct ancestors of i and j (siblings); on itself it is
  `s_ii = scale * q_i . k_i`.
- The score of sibling B on sibling C is the mean of `s_ij` over their leaf pairs.
- The energy of a leaf is `-s_ii`, or infinite if a leaf may not attend to itself; that of an inner
  node is `phi(A) = -sum_B |l(B)|/|l(A)| log(exp(-phi(B)) + sum_C |l(C)| exp(score(B, C)))`.
- All leaves of B give each leaf of C the same weight (`tie="blocks"`), or each leaf of B gives all
  leaves of C the same weight (`tie="columns"`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from polyscale._extras import require


@dataclass
class Node:
    """A node of a Python tree: a leaf has a data row, an inner node has children."""

    number: int
    row: int | None = None
    children: list[Node] = field(default_factory=list)
    _rows: list[int] | None = None  # remembered by rows(), which is asked for once a tree is built

    def rows(self) -> list[int]:
        if self._rows is None:
            if self.row is not None:
                self._rows = [self.row]
            else:
                self._rows = [row for child in self.children for row in child.rows()]
        return self._rows


@dataclass
class Settings:
    """What a row may see and how it is scored."""

    scale: float
    tie: str = "blocks"
    causal: bool = False
    include_self: bool = True
    position_query: Tensor | None = None  # [..., M, P]
    position_key: Tensor | None = None  # [..., M, P]
    alpha: Any = None  # None is softmax; a number, or a tensor with one entry per depth


class Matrix:
    """A matrix [..., N, N] that is filled block by block with one weight each, zero elsewhere."""

    def __init__(self, query: Tensor) -> None:
        count = query.shape[-2]
        self.weights = [query.new_zeros(query.shape[:-2])]
        self.block = torch.zeros(count, count, dtype=torch.long)  # which weight stands where

    def fill(self, one: Node, other: Node, weight: Tensor) -> None:
        for row in one.rows():
            self.block[row, other.rows()] = len(self.weights)
        self.weights.append(weight)

    def dense(self) -> Tensor:
        return torch.stack(self.weights, -1)[..., self.block]


@dataclass
class Result:
    """The dense matrix of one tree and the energies of its nodes."""

    matrix: Tensor  # [..., N, N]
    phi: dict[int, Tensor]  # node number -> [...]
    row_energy: dict[int, Tensor]  # data row -> [...], columns only


def from_lists(nested: Any) -> Node:
    """Return the tree of nested lists of data rows, numbered breadth-first.

    >>> from_lists([[0, 1], 2]).rows()
    [0, 1, 2]
    """
    root = Node(0)
    queue: list[tuple[Node, Any]] = [(root, nested)]
    count = 1
    for node, content in queue:
        if isinstance(content, int):
            node.row = content
            continue
        for item in content:
            child = Node(count)
            count += 1
            node.children.append(child)
            queue.append((child, item))
    return root


def from_tree(tree: Any) -> list[Node]:
    """Return the roots of the trees of a SignalTree."""
    nodes = [
        Node(number, row if row >= 0 else None) for number, row in enumerate(tree.leaf_row.tolist())
    ]
    roots = []
    for node, parent in zip(nodes, tree.parent.tolist(), strict=True):
        if parent < 0:
            roots.append(node)
        else:
            nodes[parent].children.append(node)
    return roots


def prune(node: Node, ignored: list[bool]) -> Node | None:
    """Return the tree without the ignored rows, or None if nothing is left of it."""
    if node.row is not None:
        return None if ignored[node.row] else node
    children = [kept for child in node.children if (kept := prune(child, ignored)) is not None]
    return Node(node.number, None, children) if children else None


def attention_matrix(query: Tensor, key: Tensor, root: Node, settings: Settings) -> Result:
    """Return the attention matrix [..., N, N] of one tree; other rows and columns are zero."""
    if settings.tie == "blocks":
        return _blocks(query, key, root, settings)
    return _columns(query, key, root, settings)


def flat_scores(query: Tensor, key: Tensor, root: Node, settings: Settings) -> Tensor:
    """Return `s_ij` [..., N, N], minus infinity where row i does not see row j at all."""
    count = query.shape[-2]
    score = _Scores(query, key, settings)
    dots = settings.scale * query @ key.transpose(-1, -2)  # [..., N, N]
    scores = torch.full_like(dots, -torch.inf)

    def fill(node: Node) -> None:
        nonlocal scores
        if node.row is not None and settings.include_self:
            scores = torch.where(_block(node, node, count), dots, scores)
        for place, one in enumerate(node.children):
            for other_place, other in enumerate(node.children):
                if place == other_place or (settings.causal and other_place > place):
                    continue
                term = dots + score.position(one, other)[..., None, None]
                scores = torch.where(_block(one, other, count), term, scores)
            fill(one)

    fill(root)
    return scores


def _blocks(query: Tensor, key: Tensor, root: Node, settings: Settings) -> Result:
    batch = query.shape[:-2]
    score = _Scores(query, key, settings)
    phi: dict[int, Tensor] = {}
    stay: dict[int, Tensor] = {}  # share of its row's mass that a node keeps for itself
    weight: dict[tuple[int, int], Tensor] = {}  # weight on each leaf of a sibling

    def energy(node: Node, depth: int) -> Tensor | None:
        """Return phi, or None where it is infinite: there is nothing to attend to inside."""
        value = None
        if node.row is not None:
            if settings.include_self:
                value = -score.itself(node.row)
        else:
            inside = [energy(child, depth + 1) for child in node.children]
            total = len(node.rows())
            parts = []
            for one, within in zip(node.children, inside, strict=True):
                others = [other for other in node.children if other is not one]
                scores = [score.mean(one.rows(), one, other) for other in others]
                sizes = [len(other.rows()) for other in others]
                if within is not None:
                    scores, sizes = [*scores, -within], [*sizes, 1]
                if not scores:
                    continue
                shares, log_sum = _family(scores, sizes, _alpha_at(settings, depth))
                for position, other in enumerate(others):
                    weight[one.number, other.number] = shares[position]
                if within is not None:
                    stay[one.number] = shares[-1]
                parts.append(len(one.rows()) / total * log_sum)
            if len(parts) == len(node.children):
                value = -sum(parts[1:], parts[0])
        phi[node.number] = value if value is not None else query.new_full(batch, torch.inf)
        return value

    energy(root, 0)
    matrix = Matrix(query)

    def fill(node: Node, mass: Tensor) -> None:
        if node.row is not None and settings.include_self:
            matrix.fill(node, node, mass)
        for one in node.children:
            for other in node.children:
                if one is not other:
                    matrix.fill(one, other, mass * weight[one.number, other.number])
            # A node that keeps nothing has nothing inside to fill.
            if one.number in stay:
                fill(one, mass * stay[one.number])

    fill(root, query.new_ones(batch))
    return Result(matrix.dense(), phi, {})


def _columns(query: Tensor, key: Tensor, root: Node, settings: Settings) -> Result:
    batch = query.shape[:-2]
    matrix = Matrix(query)
    score = _Scores(query, key, settings)
    inside: dict[tuple[int, int], Tensor] = {}  # (node, row) -> energy of the row within the node

    def visit(node: Node, path: list[tuple[Node, Node]]) -> None:
        """Walk down; `path` holds (parent, child) pairs from the root to `node`."""
        if node.row is None:
            for child in node.children:
                visit(child, [*path, (node, child)])
        else:
            attend(node, path)

    def attend(leaf: Node, path: list[tuple[Node, Node]]) -> None:
        assert leaf.row is not None
        row = [leaf.row]
        within = None
        if settings.include_self:
            within = score.itself(leaf.row)
            inside[leaf.number, leaf.row] = -within
        steps = []  # bottom to top: (siblings seen, their shares, share kept inside)
        for depth, (parent, own) in reversed(list(enumerate(path))):
            place = next(at for at, child in enumerate(parent.children) if child is own)
            seen = [
                other
                for at, other in enumerate(parent.children)
                if at != place and not (settings.causal and at > place)
            ]
            scores = [score.mean(row, own, other) for other in seen]
            sizes = [len(other.rows()) for other in seen]
            had_inside = within is not None
            if within is not None:
                scores, sizes = [*scores, within], [*sizes, 1]
            shares: list[Tensor] = []
            if scores:
                shares, within = _family(scores, sizes, _alpha_at(settings, depth))
                inside[parent.number, leaf.row] = -within
            steps.append((seen, shares, shares[-1] if had_inside else None))
        mass: Tensor | None = query.new_ones(batch)
        for seen, shares, kept in reversed(steps):
            if mass is None:
                break
            for other, share in zip(seen, shares, strict=False):
                matrix.fill(leaf, other, mass * share)
            mass = mass * kept if kept is not None else None
        if mass is not None and settings.include_self:
            matrix.fill(leaf, leaf, mass)

    visit(root, [])
    nothing = query.new_full(batch, torch.inf)
    phi: dict[int, Tensor] = {}

    def collect(node: Node) -> None:
        rows = [inside.get((node.number, row), nothing) for row in node.rows()]
        phi[node.number] = torch.stack(rows).mean(0)
        for child in node.children:
            collect(child)

    collect(root)
    energies = {row: inside.get((root.number, row), nothing) for row in root.rows()}
    return Result(matrix.dense(), phi, energies)


class _Scores:
    """The scores of leaves and of siblings, from single rows of the tensors."""

    def __init__(self, query: Tensor, key: Tensor, settings: Settings) -> None:
        self.queries = query.unbind(-2)
        self.keys = key.unbind(-2)
        self.scale = settings.scale
        self.left = self.right = None
        if settings.position_query is not None and settings.position_key is not None:
            self.left = settings.position_query.unbind(-2)
            self.right = settings.position_key.unbind(-2)

    def itself(self, row: int) -> Tensor:
        """Return the score of a leaf on itself."""
        return self.scale * (self.queries[row] * self.keys[row]).sum(-1)

    def mean(self, rows: list[int], one: Node, other: Node) -> Tensor:
        """Return the mean score of `rows`, leaves of `one`, on the leaves of sibling `other`."""
        pooled_query = torch.stack([self.queries[row] for row in rows]).mean(0)  # [..., D]
        pooled_key = torch.stack([self.keys[row] for row in other.rows()]).mean(0)  # [..., D]
        dots = self.scale * (pooled_query * pooled_key).sum(-1)
        return dots + self.position(one, other)

    def position(self, one: Node, other: Node) -> Tensor:
        """Return the position term of two siblings."""
        if self.left is None or self.right is None:
            return torch.zeros(())
        return (self.left[one.number] * self.right[other.number]).sum(-1)


def _family(scores: list[Tensor], sizes: list[int], alpha: Any) -> tuple[list[Tensor], Tensor]:
    """Return the weight on each entry and the value, entry n being `sizes[n]` equal entries.

    Softmax, or alpha-entmax, over the list in which each score is written down `sizes` times; the
    value is the convex conjugate: log-sum-exp for softmax.
    """
    counts = torch.tensor(sizes)
    flat = torch.stack(torch.broadcast_tensors(*scores), dim=-1)
    flat = flat.repeat_interleave(counts, dim=-1)
    first = (counts.cumsum(0) - counts).tolist()
    if alpha is None or float(torch.as_tensor(alpha).detach()) == 1.0:
        shares = flat.softmax(-1)
        return [shares[..., at] for at in first], flat.logsumexp(-1)
    entmax = require("entmax", "train", "the alpha-entmax reference")
    shares = entmax.entmax_bisect(flat, alpha, dim=-1, n_iter=100)
    entropy = ((shares - shares**alpha) / (alpha * (alpha - 1))).sum(-1)
    return [shares[..., at] for at in first], (shares * flat).sum(-1) + entropy


def _alpha_at(settings: Settings, depth: int) -> Any:
    if isinstance(settings.alpha, Tensor) and settings.alpha.dim() == 1:
        return settings.alpha[depth]
    return settings.alpha


def _block(one: Node, other: Node, count: int) -> Tensor:
    """Return the mask of the pairs of a leaf of `one` and a leaf of `other`."""
    rows = torch.zeros(count, dtype=torch.bool)
    columns = torch.zeros(count, dtype=torch.bool)
    rows[one.rows()] = True
    columns[other.rows()] = True
    return rows[:, None] & columns

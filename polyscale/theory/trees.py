"""Where a tree loses: the divergence of HSA from flat softmax, family by family.

Row i of an attention matrix theta, flat softmax p. For a node A above leaf i let `theta_i(A)` and
`p_i(A)` be the masses on the leaves of A, and

    D_i(A) = theta_i(A) KL( theta_i(. | A) || p_i(. | A) )
           = sum_{j in A} theta_ij log(theta_ij / p_ij) - theta_i(A) log(theta_i(A) / p_i(A)),

what is lost inside A, weighted by the mass there. `D_i(root)` is the whole KL of row i
and `D_i(leaf) = 0`. The loss of the family of A is what is lost inside A, but not in its children:

    loss(A) = sum_{i in A} ( D_i(A) - D_i(child of A that holds i) ).

By the chain rule of the divergence a term is `theta_i(A)` times the KL of the choice among the
children, plus, for each other child C, the mass on C times the KL of the tied (equal) weights from
`p_i(. | C)`. So no loss is negative, and they telescope:
`sum_A loss(A) = sum_i KL(theta_i || p_i)`, for any theta that ties what the tree ties: both ties,
causal or not, entmax. Families that have only leaves lose nothing under softmax: there theta is p.

With tie="blocks" all rows of A have one mass m(A), and every node has a certificate of its own,
`sum_{i in A} KL(theta_i(. | A) || p_i(. | A)) = |A| phi(A) + sum_{i in A} log Z_i(A)`, so
`loss(A) = m(A) certificate(A) - sum_children m(B) certificate(B)`: the certificate of the whole
tree, split.

A finer tree: opening A puts the children of its inner children in their place. What the old tree
allows, the new one allows as well, so on the same scores the KL cannot grow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyscale.ops.hsa import PositionScores, check_request
from polyscale.theory.tied_softmax import TiedSoftmax
from polyscale.trees import SignalTree


def ancestors(tree: SignalTree) -> list[Tensor]:
    """For each depth the node `[N]` above (or at) every row's leaf there, -1 if there is none."""
    nodes, found = tree.row_node, []
    for depth in reversed(range(tree.max_depth + 1)):
        there = (nodes >= 0) & (tree.depth[nodes.clamp(min=0)] == depth)
        found.append(torch.where(there, nodes, -1))
        nodes = torch.where(there, tree.parent[nodes.clamp(min=0)], nodes)
    return found[::-1]


def flat_scores(
    query: Tensor,
    key: Tensor,
    tree: SignalTree,
    *,
    causal: bool = False,
    include_self: bool = True,
    position_scores: PositionScores = None,
    scale: float | None = None,
) -> Tensor:
    """The scores `[..., N, N]` that HSA ties, float64; minus infinity for what a row does not see.

    Takes `[..., N, D]` as `hsa_attention` does, without a mask: prune the tree instead.

    >>> tree = SignalTree.from_windows(4, (2,))
    >>> flat_scores(torch.ones(1, 4, 9), torch.ones(1, 4, 9), tree)[0, 0].tolist()
    [3.0, 3.0, 3.0, 3.0]
    """
    request = check_request(
        query.double(),
        key.double(),
        query.double(),
        tree,
        tie="columns",
        causal=causal,
        include_self=include_self,
        key_padding_mask=None,
        position_scores=_double(position_scores),
        scale=scale,
        alpha=1.0,
        impl="auto",
    )
    scores = request.scale * request.query @ request.key.mT  # [B, H, N, N]
    levels = ancestors(tree)
    if request.position_query is not None and request.position_key is not None:
        for nodes in levels[1:]:
            at = nodes.clamp(min=0)
            terms = request.position_query[:, at] @ request.position_key[:, at].mT
            parents = torch.where(nodes >= 0, tree.parent[at], -1)
            siblings = (parents[:, None] == parents) & (nodes[:, None] != nodes) & (nodes >= 0)
            scores = scores + terms.masked_fill(~siblings, 0.0)
    row = torch.arange(tree.num_rows)
    roots = levels[0]
    seen = (roots[:, None] == roots) & (roots >= 0)
    if not include_self:
        seen = seen & (row[:, None] != row)
    if causal:
        seen = seen & (row[:, None] >= row)
    scores = scores.masked_fill(~seen, -torch.inf)
    return scores.squeeze(0) if request.packed else scores


def _double(position_scores: PositionScores) -> PositionScores:
    if position_scores is None:
        return None
    if isinstance(position_scores, Tensor):
        return position_scores.double()
    return position_scores[0].double(), position_scores[1].double()


def family_losses(matrix: Tensor, scores: Tensor, tree: SignalTree) -> Tensor:
    """The part of `sum_i KL(theta_i || softmax_i)` that each family loses: `[..., M]`.

    Args:
        matrix: theta `[..., N, N]`, from `hsa_matrix`.
        scores: the flat scores, from `flat_scores`.
        tree: the tree of both. Entry A of the result belongs to the family of A's children; it is 0
            for a leaf.

    Example:
        >>> tree = SignalTree.from_windows(8, (2, 2))
        >>> x = torch.randn(1, 8, 4, dtype=torch.float64)
        >>> from polyscale.ops.hsa import hsa_energy, hsa_matrix
        >>> losses = family_losses(hsa_matrix(x, x, tree), flat_scores(x, x, tree), tree)
        >>> bool((losses.sum(-1) - hsa_energy(x, x, tree).kl.sum(-1)).abs().max() < 1e-10)
        True
    """
    size = tree.num_rows
    for name, tensor in (("matrix", matrix), ("scores", scores)):
        if tensor.shape[-2:] != (size, size) or tensor.shape != matrix.shape:
            raise ValueError(
                f"{name} must have shape [..., N, N] with the tree's N = {size} rows, "
                f"got {list(tensor.shape)}"
            )
    theta, scores = matrix.double(), scores.double()
    sees = (scores > -torch.inf).any(-1, keepdim=True)
    log_p = torch.where(sees, scores, 0.0).log_softmax(-1)
    # 0 log 0 = 0; a row that sees no key has no weights.
    terms = torch.where(theta > 0, theta * (theta.clamp(min=1e-300).log() - log_p), 0.0)
    losses = theta.new_zeros(*theta.shape[:-2], tree.num_nodes)
    inside_above = None
    for nodes in ancestors(tree):
        same = (nodes[:, None] == nodes) & (nodes >= 0)  # [N, N]
        mass = torch.where(same, theta, 0.0).sum(-1)
        log_mass = torch.where(same, log_p, -torch.inf)
        log_mass = torch.logsumexp(log_mass, -1)  # minus infinity if it sees no key here
        ratio = torch.where(mass > 0, mass.clamp(min=1e-300).log() - log_mass, 0.0)
        inside = torch.where(same, terms, 0.0).sum(-1) - mass * ratio  # D_i, [..., N]
        if inside_above is not None:
            above = torch.where(nodes >= 0, tree.parent[nodes.clamp(min=0)], -1)
            _add(losses, above, inside_above - inside)
        inside_above = inside
    return losses


def _add(losses: Tensor, nodes: Tensor, values: Tensor) -> None:
    rows = (nodes >= 0).nonzero().flatten()
    losses.index_add_(-1, nodes[rows], values[..., rows])


def family_dilution(tree: SignalTree) -> Tensor:
    """How many tokens share one weight when two leaves meet in a family: `[M]`, mean over pairs.

    1 is exact. The mean over all families, weighted by their pairs, is the tree's
    `diagnostics().dilution`. Families without pairs (one child) and leaves have 1.

    >>> family_dilution(SignalTree.from_windows(16, (4,)))[:2].tolist()
    [4.0, 1.0]
    """
    own = tree.leaf_count[tree.num_trees :].double()
    parent = tree.parent[tree.num_trees :]
    others = tree.leaf_count[parent].double() - own
    pairs, shared = torch.zeros(2, tree.num_nodes, dtype=torch.float64)
    pairs = pairs.index_add(0, parent, own * others)
    shared = shared.index_add(0, parent, own * own * others)
    return torch.where(pairs > 0, shared / pairs.clamp(min=1), 1.0)


def open_family(tree: SignalTree, node: int) -> SignalTree:
    """The tree in which the inner children of a node are replaced by their own children.

    Rows keep their numbers. Names, domains and positions of the nodes are not kept.

    >>> open_family(SignalTree.from_windows(6, (2,)), 0).child_count.tolist()
    [6, 0, 0, 0, 0, 0, 0]
    """
    _check_node(tree, node)
    children = set(_children(tree, node))
    removed = {child for child in children if int(tree.child_count[child]) > 0}
    # Depth-first, so that siblings keep their order whatever the numbers were.
    parents: list[int] = []
    rows: list[int] = []
    stack = [(0, -1)]
    while stack:
        at, above = stack.pop()
        number = above
        if at not in removed:
            number = len(parents)
            parents.append(above)
            rows.append(int(tree.leaf_row[at]))
        stack += [(child, number) for child in reversed(_children(tree, at))]
    return SignalTree.from_parents(parents, rows=rows, num_rows=tree.num_rows)


def _children(tree: SignalTree, node: int) -> list[int]:
    first = int(tree.first_child[node])
    return list(range(first, first + int(tree.child_count[node])))


def _check_node(tree: SignalTree, node: int) -> None:
    if tree.num_trees != 1:
        raise ValueError(f"tree must be one tree, got {tree.num_trees}: see unbatch")
    if not 0 <= node < tree.num_nodes or int(tree.child_count[node]) == 0:
        raise ValueError(f"node must be an inner node of the tree, got {node}")


@dataclass(frozen=True)
class Opening:
    """What opening one family would change; scores counted as the squared family sizes."""

    node: int
    kl_before: Tensor  # [...]
    kl_after: Tensor  # [...]
    scores_before: int
    scores_after: int


def finer_tree(scores: Tensor, tree: SignalTree, nodes: list[int], tie: str) -> list[Opening]:
    """The KL of the closest tied matrix before and after opening each of these families by itself.

    Args:
        scores: the flat scores `[..., N, N]`, see `flat_scores`; they stay as they are.
        tree: one tree.
        nodes: inner nodes.
        tie: "blocks" or "columns".

    Example:
        >>> tree = SignalTree.from_windows(8, (2, 2))
        >>> x = torch.randn(2, 8, 4, dtype=torch.float64)
        >>> best = finer_tree(flat_scores(x, x, tree), tree, [0], "blocks")[0]
        >>> bool((best.kl_after <= best.kl_before).all())
        True
    """
    tied = TiedSoftmax(scores, tree, tie)
    cost = tree.diagnostics().cost
    found = []
    for node in nodes:
        _check_node(tree, node)
        children = _children(tree, node)
        inner = [child for child in children if int(tree.child_count[child])]
        opened = sum(len(_children(tree, child)) for child in inner) + len(children) - len(inner)
        closed = len(children) ** 2 + sum(len(_children(tree, child)) ** 2 for child in inner)
        found.append(Opening(node, tied.kl(), tied.kl(node), cost, cost - closed + opened**2))
    return found

"""`hsa_energy`: the energy of every node and how far the attention is from flat softmax."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import Unpack

from polyscale.ops.hsa.api import context_of, flat_rows
from polyscale.ops.hsa.checks import HSAOptions, Request, check_request
from polyscale.ops.hsa.energies import blocks_energy, columns_energy
from polyscale.ops.hsa.softmax import log_sum

if TYPE_CHECKING:
    from polyscale.trees import SignalTree

CHUNK = 1 << 22  # scores held at once while log Z is summed


@dataclass(frozen=True)
class HSAEnergy:
    """What `hsa_energy` returns; leading dimensions are [B, H], or [H] if packed."""

    phi: Tensor  # [..., M]
    log_partition: Tensor | None  # [..., N]
    kl: Tensor | None  # [..., trees]


def hsa_energy(
    query: Tensor,
    key: Tensor,
    tree: SignalTree,
    *,
    certificate: bool = True,
    log_partition: Tensor | None = None,
    **options: Unpack[HSAOptions],
) -> HSAEnergy:
    """Return the energies of all nodes and the exact KL to flat softmax, per tree.

    `phi` [..., M] is the energy of each node: for tie="blocks" the recursion of the paper, for
    tie="columns" the mean over the node's leaves i of `-log(sum of the weights that i sees inside
    the node)`. It is infinite where some leaf has nothing to attend to inside the node.

    `kl` [..., trees] is `sum_i KL(theta_i || softmax_i) = n phi(root) + sum_i log Z_i` over the n
    rows of a tree, where theta is the matrix of `hsa_matrix` and `softmax_i` the softmax of the
    flat scores `s_ij` (see `hsa_attention`) over all rows j of the same tree that the mask leaves,
    without j = i if include_self is False, and up to j = i if causal; `log Z_i` is its
    log-sum-exp. Rows that see nothing count zero. The certificate costs nothing once `log Z` is
    known, so pass `log_partition` [..., N] if you have it; otherwise it is summed exactly, in
    O(N^2) time. certificate=False leaves both out.

    `options` are those of `hsa_attention`. With alpha other than 1, phi is that of the entmax
    recursion, and there is no certificate.

    >>> from polyscale.trees import SignalTree
    >>> tree = SignalTree.from_parents([-1, 0, 0, 0])
    >>> x = torch.randn(1, 3, 8, dtype=torch.float64)
    >>> abs(hsa_energy(x, x, tree).kl.item()) < 1e-12  # one family is softmax itself
    True
    """
    request = check_request(query, key, query, tree, impl="auto", **options).widened()
    if certificate and request.alpha is not None:
        raise ValueError(
            f"certificate needs alpha=1, as it is about softmax, got alpha={options['alpha']!r}; "
            "pass certificate=False"
        )
    if log_partition is not None:
        if not certificate:
            raise ValueError("log_partition: given with certificate=False, which does not use it")
        if log_partition.shape != query.shape[:-1]:
            raise ValueError(
                f"log_partition must have shape {list(query.shape[:-1])}, "
                f"got {list(log_partition.shape)}"
            )
    context = context_of(request)
    rows = [flat_rows(part, request.ignored) for part in (request.query, request.key)]
    energies = blocks_energy if request.tie == "blocks" else columns_energy
    phi, row_energy = energies(context, *rows)  # [X, M], [X, N]
    shape = query.shape[:-2]
    phi = phi.view(*shape, -1)
    if not certificate:
        return HSAEnergy(phi, None, None)
    if log_partition is None:
        log_partition = flat_log_partition(request).view(query.shape[:-1])
    gap = row_energy.view(query.shape[:-1]) + log_partition
    # A row that sees nothing has infinite energy and no softmax to be far from.
    gap = torch.where(row_energy.view(gap.shape) == torch.inf, 0.0, gap)
    kl = torch.stack([gap[..., low:high].sum(-1) for low, high in pairwise(tree.tree_rows)], -1)
    return HSAEnergy(phi, log_partition, kl)


def flat_log_partition(request: Request) -> Tensor:
    """Return `log Z_i` [B, H, N] of the flat softmax; minus infinity for a row that sees none."""
    tree = request.tree
    query, key = request.query, request.key
    batch, heads, count, _ = query.shape
    device = query.device
    row = torch.arange(count, device=device)
    ends = torch.tensor(tree.tree_rows[1:], device=device)
    home = torch.searchsorted(ends, row, right=True)  # tree of each row
    taking = (tree.row_node >= 0).expand(batch, count)
    if request.ignored is not None:
        taking = taking & ~request.ignored
        query, key = (
            part.masked_fill(request.ignored[:, None, :, None], 0.0) for part in (query, key)
        )
    ancestors = _ancestors(tree) if request.position_query is not None else []
    step = max(1, CHUNK // (batch * heads * count))
    found = []
    for low in range(0, count, step):
        chunk = slice(low, min(low + step, count))
        scores = request.scale * query[:, :, chunk] @ key.transpose(-1, -2)  # [B, H, c, N]
        for depth, nodes in enumerate(ancestors):
            scores = scores + _position_terms(request, tree, depth, nodes, chunk)
        seen = home[chunk, None] == home
        if not request.include_self:
            seen = seen & (row[chunk, None] != row)
        if request.causal:
            seen = seen & (row[chunk, None] >= row)
        shown = seen & taking[:, chunk, None] & taking[:, None, :]  # [B, c, N]
        found.append(log_sum(scores.masked_fill(~shown[:, None], -torch.inf)))
    return torch.cat(found, -1)


def _ancestors(tree: SignalTree) -> list[Tensor]:
    """Return for each depth the ancestor-or-self [N] of every row's leaf there, -1 if none."""
    nodes = tree.row_node
    found = []
    for depth in reversed(range(tree.max_depth + 1)):
        there = (nodes >= 0) & (tree.depth[nodes.clamp(min=0)] == depth)
        found.append(torch.where(there, nodes, -1))
        nodes = torch.where(there, tree.parent[nodes.clamp(min=0)], nodes)
    return found[::-1]


def _position_terms(
    request: Request, tree: SignalTree, depth: int, nodes: Tensor, chunk: slice
) -> Tensor:
    """Return `eps_q . eps_k` [H or 1, c, N] where two rows' ancestors here are siblings, else 0."""
    assert request.position_query is not None
    assert request.position_key is not None
    at = nodes.clamp(min=0)
    terms = request.position_query[:, at[chunk]] @ request.position_key[:, at].transpose(-1, -2)
    parents = torch.where(nodes >= 0, tree.parent[at], -2)
    siblings = (parents[chunk, None] == parents) & (nodes[chunk, None] != nodes) & (nodes >= 0)
    if depth == 0:
        siblings = torch.zeros_like(siblings)  # roots are not siblings: trees never mix
    return terms.masked_fill(~siblings, 0.0)

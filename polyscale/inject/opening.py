"""Columns-tied HSA in which each token opens the few nodes it attends to most.

An opened node is seen as its children instead of as one mean. Which nodes are opened is each
token's own choice; given the choice, the row is still the closest to softmax that gives one weight
to the leaves of each node it sees.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from polyscale.ops.hsa.api import flat_rows, problem_of
from polyscale.ops.hsa.checks import check_request
from polyscale.ops.hsa.columns import all_logits, below, from_spans, span_slots
from polyscale.ops.hsa.problem import Problem, pooled_slots
from polyscale.trees import SignalTree


def opened_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: SignalTree,
    opened: int,
    *,
    causal: bool,
    key_padding_mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return the output `[B, H, N, Dv]` and each row's log-sum-exp `[B, H, N]`.

    Takes what `hsa_attention` takes (packed `[H, N, D]` too); each token opens its `opened`
    heaviest nodes that have children. The KL of a row to softmax is `log Z` less its log-sum-exp.
    """
    request = check_request(
        query,
        key,
        value,
        tree,
        tie="columns",
        causal=causal,
        include_self=True,
        key_padding_mask=key_padding_mask,
        position_scores=None,
        scale=scale,
        alpha=1.0,
        impl="auto",
    )
    outputs, sums = [], []
    ignored = request.ignored
    # One text at a time: the opened children are gathered for every token.
    for at in range(len(request.query)):
        one = slice(at, at + 1)
        parts = [part[one] for part in (request.query, request.key, request.value)]
        hidden = None if ignored is None else ignored[one]
        output, total = _attend(parts, tree, hidden, causal, scale, opened)
        outputs.append(output)
        sums.append(total)
    output, total = torch.cat(outputs).to(request.dtype), torch.cat(sums)
    if ignored is not None:  # padding is no query either
        output = output.masked_fill(ignored[:, None, :, None], 0.0)
        total = total.masked_fill(ignored[:, None], -torch.inf)
    return (output[0], total[0]) if request.packed else (output, total)


def _attend(
    parts: list[Tensor],
    tree: SignalTree,
    hidden: Tensor | None,
    causal: bool,
    scale: float,
    opened: int,
) -> tuple[Tensor, Tensor]:
    heads, rows = parts[0].shape[1:3]
    request = check_request(
        parts[0],
        parts[1],
        parts[2],
        tree,
        tie="columns",
        causal=causal,
        include_self=True,
        key_padding_mask=hidden,
        position_scores=None,
        scale=scale,
        alpha=1.0,
        impl="auto",
    )
    problem = problem_of(request)
    query, key, value = (flat_rows(part, hidden) for part in parts)  # [H * N, D]
    logits = _by_row(problem, all_logits(problem, query, key))  # [H * N, V]
    seen = _seen_nodes(tree)  # [N, V]
    has_children = (tree.child_count[seen.clamp(min=0)] > 1) & (seen >= 0)
    can_open = has_children.repeat(heads, 1) & (logits > -torch.inf)
    count = min(opened, logits.shape[1])
    best = logits.detach().masked_fill(~can_open, -torch.inf).topk(count, -1).indices
    chosen = can_open.gather(1, best)  # [H * N, k]
    nodes = seen.repeat(heads, 1).gather(1, best).clamp(min=0)
    taken = torch.zeros_like(can_open).scatter(1, best, chosen)
    children, real = _children(tree, nodes, chosen)  # [H * N, k * b]
    counts = _counts(tree, hidden)  # [M]
    keys, values = (_means(tree, part, heads, rows, counts) for part in (key, value))
    index = children + torch.arange(heads, device=key.device).repeat_interleave(rows)[
        :, None
    ] * len(counts)
    finer = scale * torch.einsum("rd,rcd->rc", query, keys[index])
    left = counts[children] * real
    finer = (finer + left.clamp(min=1).to(finer.dtype).log()).masked_fill(left == 0, -torch.inf)
    logits = logits.masked_fill(taken, -torch.inf)
    joined = torch.cat([logits, finer], 1)
    empty = (joined == -torch.inf).all(1, keepdim=True)  # padding sees nothing
    total = torch.logsumexp(joined.masked_fill(empty, 0.0), 1)
    weights = torch.softmax(joined.masked_fill(empty, 0.0), 1).masked_fill(empty, 0.0)
    coarse, fine = weights.split([logits.shape[1], finer.shape[1]], 1)
    output = _mix(problem, coarse, value) + torch.einsum("rc,rcd->rd", fine, values[index])
    total = total.masked_fill(empty[:, 0], -torch.inf)
    return output.view(1, heads, rows, -1), total.view(1, heads, rows)


def _by_row(problem: Problem, logits: list[list[Tensor]]) -> Tensor:
    """Return the logits of all levels side by side for each row: [X * N, V]."""
    found = []
    for depth, parts in enumerate(logits):
        width = max(part.shape[-1] for part in parts)
        wide = [
            torch.nn.functional.pad(part, (0, width - part.shape[-1]), value=-torch.inf)
            for part in parts
        ]
        level = from_spans(problem, depth, wide)
        outside = below(problem, depth)
        found.append(level if outside is None else level.masked_fill(outside, -torch.inf))
    return torch.cat(found, 1)


def _mix(problem: Problem, weights: Tensor, value: Tensor) -> Tensor:
    """Return the pooled values of all levels, weighted: [X * N, Dv]."""
    output = torch.zeros_like(value)
    at = 0
    for depth, slots in enumerate(pooled_slots(problem, value)):
        width = max(slot.shape[1] for slot in slots)
        shares = span_slots(problem, depth, weights[:, at : at + width])
        at += width
        mixed = [
            torch.bmm(share[..., : slot.shape[1]], slot)
            for share, slot in zip(shares, slots, strict=True)
        ]
        output = output + from_spans(problem, depth, mixed)
    return output


_kept: Any = WeakIdKeyDictionary()  # of each tree object, as long as it lives


def _seen_nodes(tree: SignalTree) -> Tensor:
    """Return the children of each ancestor of a row's leaf, top first: [N, V], -1 for none."""
    known: Tensor | None = _kept.get(tree)
    if known is not None:
        return known
    found = []
    node = tree.row_node
    above = {}
    for depth in reversed(range(tree.max_depth + 1)):
        here = (node >= 0) & (tree.depth[node.clamp(min=0)] == depth)
        above[depth] = torch.where(here, node, -1)
        node = torch.where(here, tree.parent[node.clamp(min=0)], node)
    for depth in range(tree.max_depth):
        parent = above[depth].clamp(min=0)
        first, size = tree.first_child[parent], tree.child_count[parent]
        low, high = tree.depth_offsets[depth : depth + 2]
        step = torch.arange(int(tree.child_count[low:high].max()), device=tree.device)
        inside = (step < size[:, None]) & (above[depth] >= 0)[:, None]
        found.append(torch.where(inside, first[:, None] + step, -1))
    seen = torch.cat(found, 1)
    _kept[tree] = seen
    return seen


def _children(tree: SignalTree, nodes: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return the children of chosen nodes [R, k] as [R, k * b], and which are real."""
    size = tree.child_count[nodes] * chosen
    widest = int(size.max()) if size.numel() else 0
    step = torch.arange(max(1, widest), device=nodes.device)
    real = step < size[..., None]  # [R, k, b]
    children = torch.where(real, tree.first_child[nodes][..., None] + step, 0)
    return children.flatten(1), real.flatten(1)


def _counts(tree: SignalTree, hidden: Tensor | None) -> Tensor:
    """Return how many leaves the mask leaves under each node: [M]."""
    if hidden is None:
        return tree.leaf_count
    left = (~hidden[0, tree.leaf_row[tree.leaf_order]]).long()
    before = torch.nn.functional.pad(left.cumsum(0), (1, 0))
    return before[tree.leaf_begin + tree.leaf_count] - before[tree.leaf_begin]


def _means(tree: SignalTree, rows: Tensor, heads: int, count: int, counts: Tensor) -> Tensor:
    """Return the mean over the leaves under each node: [H * N, D] to [H * M, D]."""
    ordered = rows.view(heads, count, -1)[:, tree.leaf_row[tree.leaf_order]].double()
    # Running sums in double: their differences are exact enough for the mean of any span.
    before = torch.nn.functional.pad(ordered.cumsum(1), (0, 0, 1, 0))
    total = before[:, tree.leaf_begin + tree.leaf_count] - before[:, tree.leaf_begin]
    return (total / counts.clamp(min=1)[:, None]).to(rows.dtype).flatten(0, 1)

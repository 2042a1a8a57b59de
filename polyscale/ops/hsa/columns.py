"""`tie="columns"`: each leaf keeps its own query, only keys are pooled, in O(N b log_b N).

Leaf i sees, for each of its ancestors (itself included), that node's siblings as one pooled node
each; with `causal` only the earlier ones, so that nothing later than i enters row i.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyscale.ops.hsa.context import AttentionContext, pooled_slots
from polyscale.ops.hsa.entmax import normalise_entmax
from polyscale.ops.hsa.families import Bucket
from polyscale.ops.hsa.softmax import normalise


def span_slots(context: AttentionContext, depth: int, rows: Tensor) -> list[Tensor]:
    """Return data rows [X * N, ...] as the leaves of each bucket's families [X * F, n, ...]."""
    row_map = context.plan.spans[depth]
    assert row_map is not None
    buckets = context.plan.levels[depth].buckets
    sizes = [context.plan.copies * bucket.families * bucket.span for bucket in buckets]
    return [
        part.view(-1, bucket.span, *part.shape[1:])
        for part, bucket in zip(row_map.forward(rows).split(sizes), buckets, strict=True)
    ]


def from_spans(context: AttentionContext, depth: int, parts: list[Tensor]) -> Tensor:
    """Undo `span_slots`; rows that are not under a family of this depth are zero."""
    row_map = context.plan.spans[depth]
    assert row_map is not None
    flat = [part.flatten(0, 1) for part in parts]
    return row_map.backward(flat[0] if len(flat) == 1 else torch.cat(flat))


def below(context: AttentionContext, depth: int) -> Tensor | None:
    """Return which data rows [X * N, 1] are not under a family of this depth, None if all are."""
    row_map = context.plan.spans[depth]
    assert row_map is not None
    if row_map.missing is None:
        return None
    outside = torch.zeros(row_map.inverse.numel(), 1, dtype=torch.bool, device=row_map.index.device)
    outside[row_map.missing] = True
    return outside


def span_logits(
    context: AttentionContext,
    bucket: Bucket,
    depth: int,
    query: Tensor,
    key: Tensor,
    with_counts: bool,
) -> Tensor:
    """Return the logits [X * F, n, b] of the leaves under each family on its children."""
    scores = context.scale * torch.bmm(query, key.transpose(1, 2))
    bias = context.bias(bucket, depth, query.dtype, with_counts)  # [..., F or 1, b, b]
    return (context.by_family(bucket, scores) + by_leaf(bucket, bias)).flatten(0, 2)


def by_leaf(bucket: Bucket, table: Tensor) -> Tensor:
    """Return the row of each leaf's own child: [..., F or 1, b, b] -> [..., F or 1, n, b]."""
    if bucket.uniform:
        return table.repeat_interleave(bucket.span // bucket.size, -2)
    own = bucket.own.unsqueeze(-1).expand(*table.shape[:-3], *bucket.own.shape, bucket.size)
    return table.gather(-2, own)


def columns_attention(
    context: AttentionContext, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Return the output rows [X * N, Dv] for query, key [X * N, D] and value [X * N, Dv]."""
    weights = (
        softmax_weights(context, query, key)
        if context.alpha is None
        else entmax_weights(context, query, key)
    )
    output: Tensor | None = alone(context, value)
    for depth, slots in enumerate(pooled_slots(context, value)):
        row_map = context.plan.spans[depth]
        assert row_map is not None
        if row_map.identity and len(slots) == 1 and output is not None:
            spread = output.view(*weights[depth][0].shape[:2], output.shape[-1])
            output = torch.baddbmm(spread, weights[depth][0], slots[0]).flatten(0, 1)
            continue
        mixed = [torch.bmm(w, v) for w, v in zip(weights[depth], slots, strict=True)]
        found = from_spans(context, depth, mixed)
        output = found if output is None else output + found
    assert output is not None
    return output


def alone(context: AttentionContext, value: Tensor) -> Tensor | None:
    """Return the output of trees that are a single leaf, None if there are none."""
    leaves = context.plan.root_leaves
    if not leaves.numel():
        return None
    if not context.include_self:
        return torch.zeros_like(value)
    keep = torch.zeros(context.tree.num_rows, 1, dtype=value.dtype, device=value.device)
    keep[context.tree.leaf_row[leaves]] = 1.0
    by_copy = value.view(context.plan.copies, -1, value.shape[-1])
    return torch.where(keep > 0, by_copy, 0.0).flatten(0, 1)


def all_logits(
    context: AttentionContext, query: Tensor, key: Tensor, with_counts: bool = True
) -> list[list[Tensor]]:
    """Return the logits [X * F, n, b] of every level and bucket."""
    found = []
    for depth, keys in enumerate(pooled_slots(context, key)):
        queries = span_slots(context, depth, query)
        buckets = context.plan.levels[depth].buckets
        found.append(
            [
                span_logits(context, bucket, depth, q, k, with_counts)
                for bucket, q, k in zip(buckets, queries, keys, strict=True)
            ]
        )
    return found


def softmax_weights(context: AttentionContext, query: Tensor, key: Tensor) -> list[list[Tensor]]:
    """Return the weights [X * F, n, b]: one softmax per leaf over what it sees on all levels."""
    logits = all_logits(context, query, key)
    # The largest logit of each leaf over all levels; a constant that cancels.
    top = query.new_full((query.shape[0], 1), -torch.inf)
    with torch.no_grad():
        for depth, parts in enumerate(logits):
            level_top = from_spans(context, depth, [part.amax(-1, keepdim=True) for part in parts])
            outside = below(context, depth)
            if outside is not None:
                level_top = level_top.masked_fill(outside, -torch.inf)
            top = torch.maximum(top, level_top)
        top = top.masked_fill(top == -torch.inf, 0.0)
    powers = []
    total: Tensor | None = None
    for depth, parts in enumerate(logits):
        tops = span_slots(context, depth, top)
        powers.append([(part - t).exp() for part, t in zip(parts, tops, strict=True)])
        level_sum = from_spans(context, depth, [part.sum(-1, keepdim=True) for part in powers[-1]])
        total = level_sum if total is None else total + level_sum
    if total is None:
        return []
    total = total.masked_fill(total == 0, 1.0)
    return [
        [part / t for part, t in zip(parts, span_slots(context, depth, total), strict=True)]
        for depth, parts in enumerate(powers)
    ]


def row_insides(
    context: AttentionContext, query: Tensor, key: Tensor
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Return weights [X * F, n, b + 1] and values [X * F, n] of every level and bucket.

    The family step of each leaf in turn from the bottom up: over the siblings that it sees and,
    as the last entry, the value of what it sees inside its own branch.
    """
    logits = all_logits(context, query, key, with_counts=context.alpha is None)
    inside = query.new_full((query.shape[0], 1), -torch.inf)  # nothing below a leaf but itself
    weights: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    for depth in reversed(range(len(logits))):
        buckets = context.plan.levels[depth].buckets
        insides = span_slots(context, depth, inside)
        weights.insert(0, [])
        values.insert(0, [])
        for bucket, part, within in zip(buckets, logits[depth], insides, strict=True):
            entries = torch.cat([part, within], -1)  # [X * F, n, b + 1]
            if context.alpha is None:
                found, value = normalise(entries, may_be_empty=True)
            else:
                counts = torch.nn.functional.pad(_counts(context, bucket, entries), (0, 1), value=1)
                found, value = normalise_entmax(entries, counts, context.alpha[depth])
            weights[0].append(found)
            values[0].append(value)
        reached = from_spans(context, depth, [part.unsqueeze(-1) for part in values[0]])
        outside = below(context, depth)
        inside = reached if outside is None else torch.where(outside, inside, reached)
    return weights, values


def _counts(context: AttentionContext, bucket: Bucket, entries: Tensor) -> Tensor:
    """Return the multiplicities [X * F, n, b] of the entries: 1 for the leaf itself."""
    diagonal = torch.eye(bucket.size, dtype=torch.bool, device=entries.device)
    counts = context.counts_in(bucket).unsqueeze(-2)  # [..., F or 1, 1, b]
    table = by_leaf(bucket, torch.where(diagonal, 1, counts)).to(entries.dtype)
    shape = (context.batch, context.heads, bucket.families, bucket.span, bucket.size)
    return table.expand(shape).flatten(0, 2)


def entmax_weights(context: AttentionContext, query: Tensor, key: Tensor) -> list[list[Tensor]]:
    """Return the weights [X * F, n, b] of the nested entmax: the recursion, row by row."""
    steps, _ = row_insides(context, query, key)
    mass = query.new_ones(query.shape[0], 1)
    found = []
    for depth, parts in enumerate(steps):
        masses = span_slots(context, depth, mass)
        found.append([part[..., :-1] * m for part, m in zip(parts, masses, strict=True)])
        kept = [part[..., -1:] * m for part, m in zip(parts, masses, strict=True)]
        mass = from_spans(context, depth, kept)  # a row that has ended needs no more mass
    return found

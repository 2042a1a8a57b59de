"""`tie="blocks"`: one weight for each ordered pair of siblings, in O(M b^2).

Bottom-up, the families of a depth in one batched step: pooled queries, keys and values, and the
energies, which are the log-sum-exps of the family softmax. Top-down, what the leaves under a node
take from outside it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyscale.ops.hsa.context import AttentionContext, pooled_slots
from polyscale.ops.hsa.entmax import normalise_entmax
from polyscale.ops.hsa.families import Bucket
from polyscale.ops.hsa.softmax import normalise


def family_step(
    context: AttentionContext,
    bucket: Bucket,
    depth: int,
    query: Tensor,
    key: Tensor,
    inside: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return family weights [X * F, b, b] and log-sum-exps [X * F, b].

    `inside` [X * F, b] is minus the energy of the inner children: the logit of staying inside.
    """
    alpha = None if context.alpha is None else context.alpha[depth]
    scores = context.scale * torch.bmm(query, key.transpose(1, 2))
    bias = context.bias(bucket, depth, query.dtype, with_counts=alpha is None)
    logits = context.by_family(bucket, scores) + bias  # [B, H, F, b, b]
    if inside is not None:
        kept = context.by_family(bucket, inside).unsqueeze(-1)  # [B, H, F, b, 1]
        logits = torch.where(bucket.inner_diagonal, kept, logits)
    if alpha is None:
        weights, value = normalise(logits, context.may_be_empty)
    else:
        diagonal = torch.eye(bucket.size, dtype=torch.bool, device=logits.device)
        counts = torch.where(diagonal, 1, context.counts_in(bucket).unsqueeze(-2))
        weights, value = normalise_entmax(logits, counts.to(logits.dtype), alpha)
    return weights.flatten(0, 2), value.flatten(0, 2)


def parent_inside(
    context: AttentionContext, bucket: Bucket, value: Tensor, shares: Tensor | None
) -> Tensor:
    """Return minus the energy of the parents [X * F]: the leaf-weighted mean over children."""
    if shares is None:
        return value.mean(1)
    by_family = context.by_family(bucket, value)
    # A child without leaves may see nothing: 0 times minus infinity has to be 0 here.
    mean = (by_family.masked_fill(shares == 0, 0.0) * shares).sum(-1)  # [B, H, F]
    if context.counts is not None:
        mean = mean.masked_fill((shares == 0).all(-1), -torch.inf)
    return mean.flatten()


def bottom_up(
    context: AttentionContext, query: Tensor, key: Tensor, need_root: bool = False
) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Return family weights and parents' insides (minus energy) per level and bucket."""
    queries, keys = pooled_slots(context, query), pooled_slots(context, key)
    weights: list[list[Tensor]] = []
    insides: list[list[Tensor]] = []
    above: list[Tensor] = []
    for depth in reversed(range(len(context.plan.levels))):
        level = context.plan.levels[depth]
        slots: list[Tensor | None] = [None] * len(level.buckets)
        if not level.only_leaves:
            leaves = above[0].new_zeros(context.plan.copies * level.leaf_nodes.numel())
            stored = torch.cat([leaves, *above]) if len(leaves) or len(above) > 1 else above[0]
            slots = list(context.to_slots(depth, stored))
        level_weights, above = [], []
        for at, bucket in enumerate(level.buckets):
            inside = slots[at] if bucket.has_inner else None
            found, value = family_step(
                context, bucket, depth, queries[depth][at], keys[depth][at], inside
            )
            level_weights.append(found)
            if depth or need_root:
                shares = context.shares(bucket, query.dtype)
                above.append(parent_inside(context, bucket, value, shares))
        weights.append(level_weights)
        insides.append(above)
    return weights[::-1], insides[::-1]


def blocks_attention(
    context: AttentionContext, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Return the output rows [X * N, Dv] for query, key [X * N, D] and value [X * N, Dv]."""
    plan = context.plan
    weights, _ = bottom_up(context, query, key)
    values = pooled_slots(context, value)
    outputs: list[Tensor] = []  # pieces, from the top down
    if plan.root_leaves.numel():
        alone = context.pieces(value)[0]
        outputs.append(alone if context.include_self else torch.zeros_like(alone))
    taken: list[Tensor | None] = [None] * len(plan.levels[0].buckets) if plan.levels else []
    mass: list[Tensor | None] = list(taken)
    for depth, level in enumerate(plan.levels):
        mixed: list[Tensor] = []
        kept: list[Tensor] = []
        for at, bucket in enumerate(level.buckets):
            share = weights[depth][at]  # [X * F, b, b]
            above, outer = mass[at], taken[at]
            if above is not None:
                share = share * above[:, None, None]
            if not level.only_leaves:
                kept.append(share.diagonal(dim1=1, dim2=2))  # [X * F, b]
            if bucket.has_inner:
                inner = bucket.inner_diagonal
                hidden = context.by_family(bucket, share).masked_fill(inner, 0.0)
                share = hidden.flatten(0, 2)
            pooled = values[depth][at]  # [X * F, b, Dv]
            if outer is None:
                mixed.append(torch.bmm(share, pooled))
            else:
                mixed.append(torch.baddbmm(outer.unsqueeze(1), share, pooled))
        if level.only_leaves:
            outputs.extend(part.flatten(0, 1) for part in mixed)
            break
        stored = context.from_slots(depth, mixed)
        stored_mass = context.from_slots(depth, kept)
        leaves = plan.copies * level.leaf_nodes.numel()
        if leaves:
            outputs.append(stored[:leaves])
        sizes = plan.stored_sizes(depth + 1)
        taken = list(stored[leaves:].split(sizes))
        mass = list(stored_mass[leaves:].split(sizes))
    return context.from_pieces(outputs)

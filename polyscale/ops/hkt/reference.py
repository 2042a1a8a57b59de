"""HKT attention as it is defined: dense, plain, in any floating dtype.

This file is the specification; every other implementation is tested against its values and its
gradients.

Level l keeps every `2**l`-th position. Its scores are computed at its own resolution, repeated
`2**l` times along rows and columns, and merged with the other levels by the level weights:

    S[t, u] = sum_l weight_l * (q_l[t >> l] . k_l[u >> l] * scale + bias_l[(t >> l) - (u >> l)])

`t` and `u` are positions of a token in its own sequence, counted from 0.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polyscale.ops.hkt.mask import AttentionMask
from polyscale.ops.layout import keep_used
from polyscale.ops.numerics import accumulation_dtype, masked_softmax
from polyscale.ops.tracing import without_autocast


def hkt_attention_reference(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    mask: AttentionMask,
    scale: float,
    relative_bias: Sequence[Tensor] | None = None,
) -> Tensor:
    """The attended values, `[B, H, T, Dv]`."""
    value = keep_used([value], mask.lengths)[0]
    with without_autocast(value.device):
        attention = hkt_matrix(queries, keys, level_weights, mask, scale, relative_bias)
        return (attention @ value.to(attention.dtype)).to(value.dtype)


def hkt_matrix(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    level_weights: Tensor,
    mask: AttentionMask,
    scale: float,
    relative_bias: Sequence[Tensor] | None = None,
) -> Tensor:
    """The attention matrix `[B, H, T, T]`; a row with no allowed key is zero."""
    length, device = queries[0].shape[2], queries[0].device
    packed = mask.packed
    position = torch.arange(length, device=device) if packed is None else packed.position  # [T]
    queries, keys = keep_used(queries, mask.lengths), keep_used(keys, mask.lengths)
    scores = level_scores(queries, keys, scale)
    weights = level_weights.to(scores[0].dtype)
    weights = weights.expand(queries[0].shape[1], -1)  # [H, L]

    merged = scores[0].new_zeros(())
    for level, score in enumerate(scores):
        block = position >> level  # [T]
        index = block if packed is None else packed.level_starts[level][packed.sequence] + block
        upsampled = score[:, :, index][:, :, :, index]  # [B, H, T, T]
        if relative_bias is not None:
            upsampled = upsampled + relative_term(relative_bias[level], block, block).to(
                score.dtype
            )
        merged = merged + weights[:, level, None, None] * upsampled

    allowed = torch.ones(1, 1, length, length, dtype=torch.bool, device=device)
    if mask.causal:
        allowed = allowed & (position[:, None] >= position[None, :])
    if packed is not None:
        allowed = allowed & (packed.sequence[:, None] == packed.sequence[None, :])
    if mask.lengths is not None:
        real = position < mask.lengths[:, None]  # [B, T]
        allowed = allowed & real[:, None, :, None] & real[:, None, None, :]
    return masked_softmax(merged, allowed)


def level_scores(queries: Sequence[Tensor], keys: Sequence[Tensor], scale: float) -> list[Tensor]:
    """`q_l k_l^T * scale` of every level at its own resolution, `[B, H, T_l, T_l]` each.

    Half precision is accumulated in float32.
    """
    dtype = accumulation_dtype(queries[0].dtype)
    return [
        (q.to(dtype) * scale) @ k.to(dtype).transpose(-2, -1)
        for q, k in zip(queries, keys, strict=True)
    ]


def relative_term(table: Tensor, query_block: Tensor, key_block: Tensor) -> Tensor:
    """`table[:, R - 1 + i - j]` for every pair of blocks, `[..., H, Q, K]`.

    `table` is `[H, 2 R - 1]`; distances beyond it use its ends.
    """
    reach = table.shape[-1] // 2
    distance = query_block[..., :, None] - key_block[..., None, :]  # [..., Q, K]
    picked = table[:, distance.clamp(-reach, reach) + reach]  # [H, ..., Q, K]
    return picked.movedim(0, -3)

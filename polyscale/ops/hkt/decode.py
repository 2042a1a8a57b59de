"""HKT attention of a few new tokens against cached keys, one cache per level.

Coarse keys are never repeated: scores are taken at each level's resolution and repeated as
numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polyscale.ops.hkt.native import decode as native
from polyscale.ops.hkt.reference import accumulation_dtype, masked_softmax, relative_term


def hkt_decode(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    *,
    position: Tensor,
    scale: float,
    relative_bias: Sequence[Tensor] | None = None,
    kept: native.CoarseScores | None = None,
    changed: int = 0,
) -> Tensor:
    """Causal attention of new tokens over everything up to them, `[B, H, Q, Dv]`.

    Args:
        queries: per level the query each new token uses, `[B, H, Q, D]`.
        keys: per level the cached keys, the new ones included, `[B, H, T_l, D]`, counted from
            each row's own first token. Rows may differ in how much of it they fill.
        value: cached values, `[B, H, T, Dv]`.
        level_weights: `[L]` or `[H, L]`.
        position: `[B, Q]` each new token's position in its own row; -1 for padding (gives zeros).
        scale: factor of the dot products.
        relative_bias: per level `[H, 2 R - 1]`.
        kept: coarse scores of the last token, where all rows hold equally many; brought up to date.
        changed: how many levels, from the finest on, have gained an entry since the last token.

    A few tokens on a CPU without gradients go through the native kernel where there is one.
    """
    if native.takes(queries, keys, value, relative_bias):
        weights = level_weights.to(torch.float32).expand(value.shape[1], -1)  # [H, L]
        return native.decode(queries, keys, value, weights, position, scale, kept, changed)
    if kept is not None:
        kept.known = False
    length, device = value.shape[2], value.device
    dtype = accumulation_dtype(value.dtype)
    weights = level_weights.to(dtype).expand(value.shape[1], -1)  # [H, L]
    column = torch.arange(length, device=device)
    with torch.autocast(device.type, enabled=False):
        merged = torch.zeros((), dtype=dtype, device=device)
        for level, (query, key) in enumerate(zip(queries, keys, strict=True)):
            score = query.to(dtype) @ key.to(dtype).transpose(-2, -1) * scale  # [B, H, Q, T_l]
            score = score.repeat_interleave(2**level, dim=-1)[..., :length]
            if relative_bias is not None:
                bias = relative_term(relative_bias[level], position >> level, column >> level)
                score = score + bias.to(dtype)
            merged = merged + weights[:, level, None, None] * score
        allowed = (column <= position[..., None])[:, None]  # [B, 1, Q, T]
        attention = masked_softmax(merged, allowed)
        return (attention @ value.to(dtype)).to(value.dtype)

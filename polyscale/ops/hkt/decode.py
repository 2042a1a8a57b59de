"""HKT attention of a few new tokens against cached keys, one cache per level.

Coarse keys are never repeated: scores are taken at each level's resolution and repeated as
numbers.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from polyscale.ops.hkt.native import decode as native
from polyscale.ops.hkt.reference import accumulation_dtype, masked_softmax, relative_term
from polyscale.ops.hkt.sdpa import _upsample, call_sdpa
from polyscale.ops.looks import without_autocast


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
    impl: str = "auto",
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
        impl: as in `hkt_attention`; Triton has no kernel for this. `"auto"` is the native kernel
            for a few tokens on a CPU without gradients, where there is one, and the reference
            elsewhere.
    """
    check_decodes(impl)
    reason = None
    if impl in ("auto", "native"):
        reason = native.why_not(queries, keys, value, level_weights, relative_bias)
    if impl == "native" and reason is not None:
        raise ValueError(f'impl="native" cannot decode: {reason}; impl="auto" takes what can run')
    few = queries[0].shape[2] <= native.MAX_QUERIES
    if impl == "native" or (impl == "auto" and few and reason is None):
        weights = level_weights.to(torch.float32).expand(value.shape[1], -1)  # [H, L]
        return native.decode(queries, keys, value, weights, position, scale, kept, changed)
    if kept is not None:
        kept.known = False
    decode = _decode_by_sdpa if impl == "sdpa" else _decode_by_scores
    return decode(queries, keys, value, level_weights, position, scale, relative_bias)


def check_decodes(impl: str) -> None:
    """Raise for an implementation that cannot decode anything."""
    if impl == "triton":
        raise ValueError(
            "impl must be 'auto', 'native', 'sdpa' or 'reference' with a cache, got 'triton': it "
            "has no kernel for new tokens"
        )


def _decode_by_scores(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    position: Tensor,
    scale: float,
    relative_bias: Sequence[Tensor] | None,
) -> Tensor:
    length, device = value.shape[2], value.device
    dtype = accumulation_dtype(value.dtype)
    weights = level_weights.to(dtype).expand(value.shape[1], -1)  # [H, L]
    column = torch.arange(length, device=device)
    with without_autocast(device):
        merged = torch.zeros((), dtype=dtype, device=device)
        for level, (query, key) in enumerate(zip(queries, keys, strict=True)):
            score = (query.to(dtype) * scale) @ key.to(dtype).transpose(-2, -1)  # [B, H, Q, T_l]
            score = score.repeat_interleave(2**level, dim=-1)[..., :length]
            if relative_bias is not None:
                bias = relative_term(relative_bias[level], position >> level, column >> level)
                score = score + bias.to(dtype)
            merged = merged + weights[:, level, None, None] * score
        allowed = (column <= position[..., None])[:, None]  # [B, 1, Q, T]
        attention = masked_softmax(merged, allowed)
        return (attention @ value.to(dtype)).to(value.dtype)


def _decode_by_sdpa(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    position: Tensor,
    scale: float,
    relative_bias: Sequence[Tensor] | None,
) -> Tensor:
    """One call of `scaled_dot_product_attention`; here coarse keys are repeated."""
    length, value_width = value.shape[-2:]
    weights = level_weights.expand(value.shape[1], -1)[..., None, None]  # [H, L, 1, 1]
    query = torch.cat(
        [(weights[:, level] * q).to(q.dtype) for level, q in enumerate(queries)], dim=-1
    )
    key = torch.cat([_upsample(k, level, length) for level, k in enumerate(keys)], dim=-1)
    width = max(query.shape[-1], value_width)
    query, key, value = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    column = torch.arange(length, device=value.device)
    # Padding keeps one key, so that nothing turns NaN; it is zeroed below.
    mask = (column <= position.clamp(min=0)[..., None])[:, None]  # [B, 1, Q, T]
    if relative_bias is not None:
        terms = [
            weights[:, level] * relative_term(table, position >> level, column >> level)
            for level, table in enumerate(relative_bias)
        ]
        mask = sum(terms, torch.zeros_like(terms[0])).to(query.dtype).masked_fill(~mask, -torch.inf)
    output = call_sdpa(query, key, value, mask, False, scale)
    return output[..., :value_width].masked_fill((position < 0)[:, None, :, None], 0.0)

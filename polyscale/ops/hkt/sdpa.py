"""HKT attention as one call of `scaled_dot_product_attention`: exact, memory linear in T.

The merged score is a sum of dot products, so it is the dot product of concatenations: the level
weights go into the queries, every level is repeated to full length, and all levels stand side by
side along D. The score products cost L times those of standard attention.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from polyscale.ops.hkt.mask import AttentionMask
from polyscale.ops.hkt.reference import relative_term
from polyscale.ops.hkt.sdpa_gradients import guarded_sdpa, has_huge_scores
from polyscale.ops.layout import keep_used
from polyscale.ops.native.derivatives import beyond_gradients
from polyscale.ops.tracing import is_cheap_to_read, without_autocast


def hkt_attention_sdpa(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    mask: AttentionMask,
    scale: float,
    relative_bias: Sequence[Tensor] | None = None,
) -> Tensor:
    """The attended values, `[B, H, T, Dv]`.

    With `relative_bias` the bias of every pair is materialised: `[H, T, T]`.
    """
    if mask.packed is None:
        return _attend(queries, keys, value, level_weights, mask, scale, relative_bias)
    parts, boundaries = [], mask.packed.boundaries
    for number in range(len(boundaries[0]) - 1):
        pieces = [slice(ends[number], ends[number + 1]) for ends in boundaries]
        parts.append(
            _attend(
                [q[:, :, piece] for q, piece in zip(queries, pieces, strict=True)],
                [k[:, :, piece] for k, piece in zip(keys, pieces, strict=True)],
                value[:, :, pieces[0]],
                level_weights,
                AttentionMask(mask.causal),
                scale,
                relative_bias,
            )
        )
    return torch.cat(parts, dim=2)


def _attend(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    mask: AttentionMask,
    scale: float,
    relative_bias: Sequence[Tensor] | None,
) -> Tensor:
    length, value_width = value.shape[-2:]
    queries, keys = keep_used(queries, mask.lengths), keep_used(keys, mask.lengths)
    value = keep_used([value], mask.lengths)[0]
    weights = level_weights.expand(value.shape[1], -1)[..., None, None]  # [H, L, 1, 1]
    # The product is taken in the wider dtype of the two and rounded once.
    query = torch.cat(
        [
            upsample_blocks((weights[:, level] * q).to(q.dtype), level, length)
            for level, q in enumerate(queries)
        ],
        dim=-1,
    )  # [B, H, T, L * D]
    key = torch.cat([upsample_blocks(k, level, length) for level, k in enumerate(keys)], dim=-1)
    # The memory-efficient kernels take one width for all three; padding with zeros changes nothing.
    width = max(query.shape[-1], value_width)
    query, key, value = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))

    position = torch.arange(length, device=value.device)
    attn_mask = None
    if relative_bias is not None:
        attn_mask = _merged_bias(relative_bias, level_weights, position).to(
            query.dtype
        )  # [H, T, T]
        if mask.causal:
            attn_mask = attn_mask.masked_fill(position[:, None] < position, float("-inf"))
    if mask.lengths is not None and not mask.causal:
        # A row of padding alone keeps one key, so that nothing becomes NaN; it is zeroed below.
        real = (position < mask.lengths.clamp(min=1)[:, None])[:, None, None, :]  # [B, 1, 1, T]
        attn_mask = real if attn_mask is None else attn_mask.masked_fill(~real, float("-inf"))
    causal = mask.causal and attn_mask is None
    output = call_sdpa(query, key, value, attn_mask, causal, scale)[..., :value_width]
    if mask.lengths is not None:
        output = output.masked_fill((position >= mask.lengths[:, None])[:, None, :, None], 0.0)
    return output


def call_sdpa(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """`scaled_dot_product_attention` as a softmax: at any scale, and NaN for queries that are not
    finite, which some of its kernels read as zeros. The result has the dtype of `value`.
    """
    finite = query.isfinite().all(-1, keepdim=True)  # [B, H, Q, 1]
    if scale < 1:
        # Some kernels look for the largest product before they scale, which may be negative, and
        # products may overflow where scores do not.
        query, scale = query * scale, 1.0
    with without_autocast(value.device):
        output = _attend_at_any_size(query, key, value, mask, causal, scale)
    return output.masked_fill(~finite, float("nan"))


def _attend_at_any_size(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """The attended values, with the kernel whose gradients hold at scores of this size."""
    inputs = [query, key, value] if mask is None else [query, key, value, mask]
    kernels: AbstractContextManager = nullcontext()
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        if is_cheap_to_read(query):
            if has_huge_scores(query, key, scale):
                kernels = sdpa_kernel(SDPBackend.MATH)
        elif not beyond_gradients(inputs):
            return guarded_sdpa(query, key, value, mask, causal, scale)
    with kernels:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=causal, scale=scale
        )


def upsample_blocks(x: Tensor, level: int, length: int) -> Tensor:
    """Repeat each block for its `2**level` positions, cut to `length`: `[B, H, T, D]`."""
    if level == 0:
        return x
    repeated = x.unsqueeze(3).expand(-1, -1, -1, 2**level, -1)
    return repeated.flatten(2, 3)[:, :, :length]


def _merged_bias(
    relative_bias: Sequence[Tensor], level_weights: Tensor, position: Tensor
) -> Tensor:
    merged = torch.zeros((), device=position.device)
    for level, table in enumerate(relative_bias):
        block = position >> level
        weight = level_weights[..., level, None, None]  # [H, 1, 1] or [1, 1]
        merged = merged + weight * relative_term(table, block, block)
    return merged

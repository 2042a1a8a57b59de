"""`hkt_attention`: checks the arguments, lines up padded rows, and chooses an implementation."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from polyscale.ops.backends import Backend, Operation
from polyscale.ops.hkt.checks import (
    check_cu_seqlens,
    check_level_lengths,
    check_levels,
    check_padding_mask,
    check_relative_bias,
    check_scale,
    check_weights,
)
from polyscale.ops.hkt.decode import DECODE, CoarseScores, hkt_decode
from polyscale.ops.hkt.mask import AttentionMask
from polyscale.ops.hkt.native import op as native
from polyscale.ops.hkt.native.library import LIBRARY
from polyscale.ops.hkt.native.projected import hkt_attention_projected, split_projections
from polyscale.ops.hkt.reference import (
    hkt_attention_reference,
    hkt_matrix,
    level_scores,
    relative_term,
)
from polyscale.ops.hkt.sdpa import hkt_attention_sdpa
from polyscale.ops.hkt.triton import hkt_attention_triton
from polyscale.ops.hkt.triton import why_unavailable as why_no_triton
from polyscale.ops.hkt.triton import why_unsupported as why_not_by_triton
from polyscale.ops.layout import PackedLayout, Padding
from polyscale.ops.native.backend import native_backend
from polyscale.ops.native.derivatives import beyond_gradients

__all__ = [
    "ATTENTION",
    "DECODE",
    "AttentionMask",
    "CoarseScores",
    "attend",
    "attend_projected",
    "check_cu_seqlens",
    "check_padding_mask",
    "hkt_attention",
    "hkt_decode",
    "hkt_matrix",
    "level_scores",
    "relative_term",
]


def hkt_attention(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    *,
    causal: bool = True,
    key_padding_mask: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    scale: float | None = None,
    relative_bias: Sequence[Tensor] | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attention whose scores are a weighted sum over L resolutions.

    Level `l` has one query and one key for every `2**l` positions. A token at position `t` of its
    own sequence uses entry `t // 2**l` of level `l`.

    Args:
        queries: L tensors `[B, H, T_l, D]`, fine to coarse, `T_l = ceil(T / 2**l)`.
        keys: L tensors of the same shapes.
        value: `[B, H, T, Dv]`.
        level_weights: `[L]` or `[H, L]`, finite; usually a softmax, so that the merge is convex.
        causal: whether a token sees only itself and what comes before it.
        key_padding_mask: bool `[B, T]`, True for padding, on any side, as in
            `torch.nn.MultiheadAttention`. Coarse entries count from each row's first real token,
            whatever stands before it. Padding gives zeros.
        cu_seqlens: for sequences packed in one row (`B = 1`): their cumulative lengths
            `[0, n_1, n_1 + n_2, ..., T]`. Each level holds the sequences' own blocks one after
            the other: `T_l = sum ceil(n_s / 2**l)`.
        scale: factor of the dot products, `1 / sqrt(D)` if None.
        relative_bias: L tables `[H, 2 R - 1]` added to each level's scores by the distance
            between query and key block, from `-(R - 1)` to `R - 1`; longer ones take the ends.
        impl: `"auto"`, or a name that `polyscale.implementations()` lists.

    Returns:
        `[B, H, T, Dv]`.

    Example:
        >>> import torch, polyscale as ps
        >>> fine, coarse = torch.randn(2, 4, 10, 16), torch.randn(2, 4, 5, 16)
        >>> ps.hkt_attention([fine, coarse], [fine, coarse], fine, torch.tensor([0.7, 0.3])).shape
        torch.Size([2, 4, 10, 16])
    """
    check_levels(queries, keys, value)
    check_weights(level_weights, value, len(queries))
    check_relative_bias(relative_bias, value, len(queries))
    check_scale(scale)
    if key_padding_mask is not None and cu_seqlens is not None:
        raise ValueError(
            "pass key_padding_mask or cu_seqlens, not both: packed rows have no padding"
        )
    packed = None
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, value.shape[0], value.shape[2])
        packed = PackedLayout.from_cu_seqlens(cu_seqlens, len(queries))
    check_level_lengths(queries, keys, value.shape[2], packed)
    padding = None
    if key_padding_mask is not None:
        check_padding_mask(key_padding_mask, value.shape[0], value.shape[2], value.device)
        padding = Padding.from_mask(key_padding_mask)
        queries = [padding.line_up(queries[0]), *queries[1:]]
        keys = [padding.line_up(keys[0]), *keys[1:]]
        value = padding.line_up(value)
    mask = AttentionMask(causal, None if padding is None else padding.lengths, packed)
    output = attend(
        queries,
        keys,
        value,
        level_weights,
        mask,
        scale=scale,
        relative_bias=relative_bias,
        impl=impl,
    )
    return output if padding is None else padding.put_back(output)


def attend(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    mask: AttentionMask,
    *,
    scale: float | None = None,
    relative_bias: Sequence[Tensor] | None = None,
    impl: str = "auto",
) -> Tensor:
    """`hkt_attention` for callers that have checked and lined up their tensors: our layers."""
    scale = queries[0].shape[-1] ** -0.5 if scale is None else scale
    return ATTENTION.run(impl, queries, keys, value, level_weights, mask, scale, relative_bias)


def attend_projected(
    fine: Tensor,
    coarse: Tensor | None,
    sizes: list[int],
    level_weights: Tensor,
    mask: AttentionMask,
    *,
    impl: str = "auto",
) -> Tensor:
    """`attend` on projections as they come out of a layer's products.

    Args:
        fine: `[B, T, 3 H D]`: queries, keys and values of level 0.
        coarse: `[B, T_1 + T_2 + .., 2 H D]`: queries and keys of the levels above it, or None.
        sizes: `T_1, T_2, ..`.
        level_weights: `[H, L]`.
        mask: as in `attend`.
        impl: likewise.
    """
    parts = split_projections(fine, coarse, sizes, level_weights.shape[0])
    scale = parts[2].shape[-1] ** -0.5
    backend = ATTENTION.choose(impl, *parts, level_weights, mask, scale, None)
    if backend.name == "native" and torch.is_grad_enabled():
        # The same kernel, whose gradients are then laid out like the projections.
        weights = level_weights.to(torch.float32)
        return hkt_attention_projected(fine, coarse, sizes, weights, mask, scale)
    return backend.run(*parts, level_weights, mask, scale, None)


def _preferred(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    mask: AttentionMask,
    scale: float,
    relative_bias: Sequence[Tensor] | None,
) -> Iterator[str]:
    yield "native"
    tensors = (*queries, *keys, value, level_weights, *(relative_bias or ()))
    # The kernels behind sdpa have neither tangents nor second derivatives.
    yield "reference" if beyond_gradients(tensors) else "sdpa"


ATTENTION = Operation(
    "hkt_attention",
    (
        Backend("reference", hkt_attention_reference, "dense, any dtype, memory T^2"),
        Backend("sdpa", hkt_attention_sdpa, "exact, memory linear in T"),
        native_backend(
            LIBRARY,
            native.hkt_attention_native,
            "fused, CPU, float32 and bfloat16",
            native.why_unsupported,
        ),
        Backend(
            "triton",
            hkt_attention_triton,
            "GPU kernel, memory linear in T",
            why_unavailable=why_no_triton,
            why_unsupported=why_not_by_triton,
        ),
    ),
    preferred=_preferred,
)
OPERATIONS = (ATTENTION, DECODE)

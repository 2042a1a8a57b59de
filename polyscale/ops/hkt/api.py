"""`hkt_attention`: checks the arguments, lines up padded rows, and calls an implementation."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from polyscale.ops.hkt.layout import PackedLayout, Padding, level_length
from polyscale.ops.hkt.native.derivatives import beyond_gradients
from polyscale.ops.hkt.native.op import hkt_attention_native, why_not
from polyscale.ops.hkt.native.projected import hkt_attention_projected, split_projections
from polyscale.ops.hkt.reference import hkt_attention_reference
from polyscale.ops.hkt.sdpa import hkt_attention_sdpa
from polyscale.ops.hkt.triton import hkt_attention_triton
from polyscale.ops.looks import can_look, has_numbers

IMPLEMENTATIONS: dict[str, Callable[..., Tensor]] = {
    "reference": hkt_attention_reference,
    "sdpa": hkt_attention_sdpa,
    "native": hkt_attention_native,
    "triton": hkt_attention_triton,
}


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
    _check_tensors(queries, keys, value)
    _check_weights(level_weights, value, len(queries))
    _check_relative_bias(relative_bias, value, len(queries))
    if scale is not None and not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")
    if key_padding_mask is not None and cu_seqlens is not None:
        raise ValueError(
            "pass key_padding_mask or cu_seqlens, not both: packed rows have no padding"
        )
    packed = None
    if cu_seqlens is not None:
        check_cu_seqlens(cu_seqlens, value.shape[0], value.shape[2])
        packed = PackedLayout.from_cu_seqlens(cu_seqlens, len(queries))
    _check_level_lengths(queries, keys, value.shape[2], packed)

    padding = None
    if key_padding_mask is not None:
        check_padding_mask(key_padding_mask, value.shape[0], value.shape[2], value.device)
        padding = Padding.from_mask(key_padding_mask)
        queries = [padding.line_up(queries[0]), *queries[1:]]
        keys = [padding.line_up(keys[0]), *keys[1:]]
        value = padding.line_up(value)
    output = attend(
        queries,
        keys,
        value,
        level_weights,
        causal=causal,
        lengths=None if padding is None else padding.lengths,
        packed=packed,
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
    *,
    causal: bool,
    lengths: Tensor | None = None,
    packed: PackedLayout | None = None,
    scale: float | None = None,
    relative_bias: Sequence[Tensor] | None = None,
    impl: str = "auto",
) -> Tensor:
    """`hkt_attention` for callers that have checked and lined up their tensors: our layers.

    `lengths` `[B]` is the number of real tokens, which come first in each row.
    """
    if impl == "auto":
        impl = _fastest(queries, keys, value, level_weights, relative_bias)
    return implementation(impl)(
        queries,
        keys,
        value,
        level_weights,
        causal=causal,
        lengths=lengths,
        packed=packed,
        scale=queries[0].shape[-1] ** -0.5 if scale is None else scale,
        relative_bias=relative_bias,
    )


def attend_projected(
    fine: Tensor,
    coarse: Tensor | None,
    sizes: list[int],
    level_weights: Tensor,
    *,
    causal: bool,
    lengths: Tensor | None = None,
    packed: PackedLayout | None = None,
    impl: str = "auto",
) -> Tensor:
    """`attend` on projections as they come out of a layer's products.

    Args:
        fine: `[B, T, 3 H D]`: queries, keys and values of level 0.
        coarse: `[B, T_1 + T_2 + .., 2 H D]`: queries and keys of the levels above it, or None.
        sizes: `T_1, T_2, ..`.
        level_weights: `[H, L]`.
        causal: as in `attend`.
        lengths: likewise.
        packed: likewise.
        impl: likewise.
    """
    parts = split_projections(fine, coarse, sizes, level_weights.shape[0])
    scale = parts[2].shape[-1] ** -0.5
    masks: dict[str, Any] = {"causal": causal, "lengths": lengths, "packed": packed}
    fused = impl in ("auto", "native") and torch.is_grad_enabled()
    if fused and why_not(*parts, level_weights, None) is None:
        weights = level_weights.to(torch.float32)
        return hkt_attention_projected(fine, coarse, sizes, weights, scale=scale, **masks)
    return attend(*parts, level_weights, scale=scale, impl=impl, **masks)


def _fastest(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    relative_bias: Sequence[Tensor] | None,
) -> str:
    """What `"auto"` stands for."""
    if why_not(queries, keys, value, level_weights, relative_bias) is None:
        return "native"
    tensors = (*queries, *keys, value, level_weights, *(relative_bias or ()))
    # The kernels behind sdpa have neither tangents nor second derivatives.
    return "reference" if beyond_gradients(tensors) else "sdpa"


def implementation(name: str) -> Callable[..., Tensor]:
    """The implementation of that name; `"auto"` is the one that takes everything fast.

    `attend` itself turns `"auto"` into `"native"` where that takes the tensors.
    """
    if name == "auto":
        return hkt_attention_sdpa
    if name not in IMPLEMENTATIONS:
        known = ", ".join(repr(known) for known in ("auto", *IMPLEMENTATIONS))
        raise ValueError(f"impl must be one of {known}, got {name!r}")
    return IMPLEMENTATIONS[name]


def _check_tensors(queries: Sequence[Tensor], keys: Sequence[Tensor], value: Tensor) -> None:
    for name, levels in (("queries", queries), ("keys", keys)):
        if isinstance(levels, Tensor) or not isinstance(levels, Sequence):
            raise TypeError(
                f"{name} must be a list of one tensor [B, H, T_l, D] per level, "
                f"got {type(levels).__name__}"
            )
        if not levels:
            raise ValueError(f"{name} must hold at least one level, got an empty list")
    if len(queries) != len(keys):
        raise ValueError(
            f"queries and keys must have the same number of levels, "
            f"got {len(queries)} and {len(keys)}"
        )
    named = [("value", value)]
    named += [(f"queries[{level}]", query) for level, query in enumerate(queries)]
    named += [(f"keys[{level}]", key) for level, key in enumerate(keys)]
    for name, tensor in named:
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dim() != 4:
            raise ValueError(
                f"{name} must have 4 dimensions [B, H, T, D], got shape {tuple(tensor.shape)}"
            )
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be of a floating dtype, got {tensor.dtype}")
        if tensor.dtype != value.dtype:
            raise TypeError(
                f"{name} must have the dtype of value, {value.dtype}, got {tensor.dtype}"
            )
        if tensor.device != value.device:
            raise ValueError(
                f"{name} must be on the device of value, {value.device}, got {tensor.device}"
            )
        if tensor.shape[:2] != value.shape[:2]:
            raise ValueError(
                f"{name} must have the batch size and heads of value, {tuple(value.shape[:2])}, "
                f"got {tuple(tensor.shape[:2])}"
            )
        if name != "value" and tensor.shape[3] != queries[0].shape[3]:
            raise ValueError(
                f"{name} must have the head dimension of queries[0], {queries[0].shape[3]}, "
                f"got {tensor.shape[3]}"
            )
    if value.shape[1] == 0 or queries[0].shape[3] == 0 or value.shape[3] == 0:
        raise ValueError(
            f"heads and head dimensions must be at least 1, got queries[0] "
            f"{tuple(queries[0].shape)} and value {tuple(value.shape)}"
        )
    if value.shape[2] == 0:
        raise ValueError("value must have at least one position, got an empty sequence (T = 0)")


def _check_level_lengths(
    queries: Sequence[Tensor], keys: Sequence[Tensor], length: int, packed: PackedLayout | None
) -> None:
    for level, pair in enumerate(zip(queries, keys, strict=True)):
        if packed is None:
            expected, rule = level_length(length, level), f"ceil(T / {2**level})"
        else:
            expected, rule = packed.boundaries[level][-1], f"sum of ceil(n_s / {2**level})"
        for name, tensor in zip(("queries", "keys"), pair, strict=True):
            if tensor.shape[2] != expected:
                raise ValueError(
                    f"{name}[{level}] must have {rule} = {expected} positions for T = {length}, "
                    f"got {tensor.shape[2]}"
                )


def _check_weights(level_weights: Tensor, value: Tensor, levels: int) -> None:
    if not isinstance(level_weights, Tensor):
        raise TypeError(f"level_weights must be a tensor, got {type(level_weights).__name__}")
    heads = value.shape[1]
    if level_weights.shape not in ((levels,), (heads, levels)):
        raise ValueError(
            f"level_weights must have shape [L] = [{levels}] or [H, L] = [{heads}, {levels}], "
            f"got {list(level_weights.shape)}"
        )
    if level_weights.dtype not in (value.dtype, torch.float32):
        raise TypeError(
            f"level_weights must be {value.dtype}, as value is, or torch.float32, "
            f"got {level_weights.dtype}"
        )
    if level_weights.device != value.device:
        raise ValueError(
            f"level_weights must be on the device of value, {value.device}, "
            f"got {level_weights.device}"
        )
    if can_look(level_weights) and not bool(level_weights.isfinite().all()):
        raise ValueError(f"level_weights must be finite, got {level_weights.tolist()}")


def _check_relative_bias(
    relative_bias: Sequence[Tensor] | None, value: Tensor, levels: int
) -> None:
    if relative_bias is None:
        return
    if isinstance(relative_bias, Tensor) or len(relative_bias) != levels:
        raise ValueError(f"relative_bias must be a list of one table per level ({levels})")
    for level, table in enumerate(relative_bias):
        if table.dim() != 2 or table.shape[0] != value.shape[1] or table.shape[1] % 2 == 0:
            raise ValueError(
                f"relative_bias[{level}] must have shape [H, 2 R - 1] with H = {value.shape[1]}, "
                f"got {list(table.shape)}"
            )


def check_padding_mask(
    key_padding_mask: Tensor, batch: int, length: int, device: torch.device
) -> None:
    """Raise unless the mask is bool `[B, T]` on the device."""
    if not isinstance(key_padding_mask, Tensor) or key_padding_mask.dtype != torch.bool:
        got = getattr(key_padding_mask, "dtype", type(key_padding_mask).__name__)
        raise TypeError(f"key_padding_mask must be a bool tensor, True for padding, got {got}")
    if key_padding_mask.shape != (batch, length):
        raise ValueError(
            f"key_padding_mask must have shape [B, T] = [{batch}, {length}], "
            f"got {list(key_padding_mask.shape)}"
        )
    if key_padding_mask.device != device:
        raise ValueError(
            f"key_padding_mask must be on the device of the input, {device}, "
            f"got {key_padding_mask.device}"
        )


def check_cu_seqlens(cu_seqlens: Tensor, batch: int, length: int) -> None:
    """Raise unless the boundaries are whole numbers that rise from 0 to T, for one row."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__)
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor, got {got}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens must have shape [sequences + 1], got {list(cu_seqlens.shape)}"
        )
    if batch != 1:
        raise ValueError(f"cu_seqlens takes all sequences in one row (B = 1), got B = {batch}")
    if not torch.compiler.is_compiling() and not has_numbers(cu_seqlens):
        raise ValueError(
            "cu_seqlens must hold numbers, as they say how long the levels are; got a tensor "
            "without any (meta, fake or batched by torch.func.vmap)"
        )
    bounds = cu_seqlens.tolist()
    rising = all(low < high for low, high in pairwise(bounds))
    if bounds[0] != 0 or bounds[-1] != length or not rising:
        raise ValueError(
            f"cu_seqlens must rise from 0 to T = {length}, no sequence empty, got {bounds}"
        )

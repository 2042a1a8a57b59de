"""Checks of the arguments of `hkt_attention`."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from polyscale.ops.layout import PackedLayout, level_length
from polyscale.ops.tracing import has_values, is_cheap_to_read


def check_scale(scale: float | None) -> None:
    """Raise unless it is a number or None."""
    if scale is not None and not isinstance(scale, (int, float)):
        raise TypeError(f"scale must be a number or None, got {type(scale).__name__}")


def check_levels(queries: Sequence[Tensor], keys: Sequence[Tensor], value: Tensor) -> None:
    """Raise unless there is one query and one key per level, all of which go with the value."""
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
        _check_tensor(name, tensor, value)
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


def _check_tensor(name: str, tensor: Tensor, value: Tensor) -> None:
    """Raise unless it is of the dtype, device, batch size and heads of the value."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dim() != 4:
        raise ValueError(
            f"{name} must have 4 dimensions [B, H, T, D], got shape {tuple(tensor.shape)}"
        )
    if not tensor.is_floating_point():
        raise TypeError(f"{name} must be of a floating dtype, got {tensor.dtype}")
    if tensor.dtype != value.dtype:
        raise TypeError(f"{name} must have the dtype of value, {value.dtype}, got {tensor.dtype}")
    if tensor.device != value.device:
        raise ValueError(
            f"{name} must be on the device of value, {value.device}, got {tensor.device}"
        )
    if tensor.shape[:2] != value.shape[:2]:
        raise ValueError(
            f"{name} must have the batch size and heads of value, {tuple(value.shape[:2])}, "
            f"got {tuple(tensor.shape[:2])}"
        )


def check_level_lengths(
    queries: Sequence[Tensor], keys: Sequence[Tensor], length: int, packed: PackedLayout | None
) -> None:
    """Raise unless each level has as many entries as the sequences have blocks."""
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


def check_weights(level_weights: Tensor, value: Tensor, levels: int) -> None:
    """Raise unless they are finite, one per level or one per head and level."""
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
    if is_cheap_to_read(level_weights) and not bool(level_weights.isfinite().all()):
        raise ValueError(f"level_weights must be finite, got {level_weights.tolist()}")


def check_relative_bias(relative_bias: Sequence[Tensor] | None, value: Tensor, levels: int) -> None:
    """Raise unless there is one table per level, with one row per head, or none at all."""
    if relative_bias is None:
        return
    if isinstance(relative_bias, Tensor) or len(relative_bias) != levels:
        got = f"{len(relative_bias)} tables" if isinstance(relative_bias, list) else "no list"
        raise ValueError(
            f"relative_bias must be a list of {levels} tables, one per level, got {got}"
        )
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
    """Raise unless the boundaries are integers that rise from 0 to T, for one row."""
    if not isinstance(cu_seqlens, Tensor) or cu_seqlens.dtype not in (torch.int32, torch.int64):
        got = getattr(cu_seqlens, "dtype", type(cu_seqlens).__name__)
        raise TypeError(f"cu_seqlens must be an int32 or int64 tensor, got {got}")
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError(
            f"cu_seqlens must have shape [sequences + 1], got {list(cu_seqlens.shape)}"
        )
    if batch != 1:
        raise ValueError(f"cu_seqlens must have all sequences in one row (B = 1), got B = {batch}")
    if not torch.compiler.is_compiling() and not has_values(cu_seqlens):
        raise ValueError(
            "cu_seqlens must have readable values, which set the lengths of the levels, "
            "got a tensor without any (meta, fake or batched by torch.func.vmap)"
        )
    bounds = cu_seqlens.tolist()
    rising = all(low < high for low, high in pairwise(bounds))
    if bounds[0] != 0 or bounds[-1] != length or not rising:
        raise ValueError(
            f"cu_seqlens must rise from 0 to T = {length}, no sequence empty, got {bounds}"
        )

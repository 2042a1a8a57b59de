"""Packing and unpacking the blocks of a store with torch alone: the specification of its bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyscale.ops.levels.packing import (
    BLOCK,
    VALUE_GROUP,
    pack_keys,
    pack_rest,
    pack_values,
    pad_channels,
    padded,
    quantize,
    quantize_symmetric,
    to_kept,
    unpack_keys,
    unpack_rest,
    unpack_values,
)

if TYPE_CHECKING:
    from polyscale.ops.levels.store import LevelStore


def append(store: LevelStore, key: Tensor, value: Tensor, real: Tensor | None) -> None:
    """Write new tokens into arrays that have room for them; pack the blocks that are full."""
    for row, length in enumerate(store.lengths.tolist()):
        parts = key[row], value[row]  # [H, N, D]
        if real is not None:
            parts = parts[0][:, real[row]], parts[1][:, real[row]]
        if store.settings.is_8bit:
            _append_bytes(store, row, length, *parts)
        else:
            _append_exact(store, row, length, *parts)


def _append_exact(store: LevelStore, row: int, length: int, key: Tensor, value: Tensor) -> None:
    end = length + key.shape[1]
    store.keys[row, :, length:end] = key
    store.values[row, :, length:end] = value
    first, last = length // BLOCK, end // BLOCK
    whole = slice(first * BLOCK, last * BLOCK)
    pack(store, row, first, store.keys[row, :, whole], store.values[row, :, whole])


def _append_bytes(store: LevelStore, row: int, length: int, key: Tensor, value: Tensor) -> None:
    first, waiting = divmod(length, BLOCK)
    key, value = to_kept(key), to_kept(value)
    sinks = min(store.settings.sinks, length + key.shape[1])
    if length < sinks:
        store.sink_keys[row, :, length:sinks] = key[:, : sinks - length]
    key = torch.cat((store.keys[row, :, :waiting], key), 1)
    value = torch.cat((store.values[row, :, :waiting], value), 1)
    whole = key.shape[1] // BLOCK * BLOCK
    pack(store, row, first, key[:, :whole], value[:, :whole])
    left = key.shape[1] - whole
    store.keys[row, :, :left] = key[:, whole:]
    store.values[row, :, :left] = value[:, whole:]


def pack(store: LevelStore, row: int, first: int, key: Tensor, value: Tensor) -> None:
    """Pack whole blocks `[H, 64 n, D]` of a row, the first of which is block `first`."""
    count = key.shape[1] // BLOCK
    if not count:
        return
    settings, here = store.settings, slice(first, first + count)
    key = pad_channels(key).unflatten(1, (count, BLOCK))  # [H, n, 64, D]
    value = value.unflatten(1, (count, BLOCK))
    place = torch.arange(first * BLOCK, (first + count) * BLOCK, device=key.device)
    counted = (place >= settings.sinks).view(count, BLOCK, 1)
    lo, step, codes, rest = quantize(key, 2**settings.key_bits - 1, -2, counted)
    store.key_scales[row, :, here] = torch.cat((lo, step), -2)
    store.key_codes[row, :, here] = pack_keys(codes)
    tokens = slice(first * BLOCK, (first + count) * BLOCK)
    if settings.is_8bit:
        store.key_rest[row, :, tokens] = pack_rest(rest).flatten(1, 2)
    if settings.value_bits == 4:
        scale, codes, rest = quantize_symmetric(value, 7)
        store.value_scales[row, :, here] = scale.transpose(-1, -2)
        store.value_codes[row, :, here] = pack_values(pad_channels(codes) + 8, 4)
        if settings.is_8bit:
            store.value_rest[row, :, tokens] = pack_rest(pad_channels(rest)).flatten(1, 2)
        return
    parts = [quantize(part, 3, -1) for part in value.split(VALUE_GROUP, -1)]
    scales = torch.cat([torch.cat(part[:2], -1) for part in parts], -1)  # [H, n, 64, 2 groups]
    store.value_scales[row, :, here] = scales.transpose(-1, -2)
    codes = torch.cat([part[2] for part in parts], -1)
    store.value_codes[row, :, here] = pack_values(pad_channels(codes), 2)
    if settings.is_8bit:
        scale, codes, _ = quantize_symmetric(value, 127)
        store.rest_scales[row, :, here] = scale[..., 0]
        store.value_rest[row, :, tokens] = pad_channels(codes).to(torch.int8).flatten(1, 2)


def coarse_level(store: LevelStore, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values `[B, H, T, D]` as the codes have them; tokens not packed yet are zeros."""
    key, value, _, _ = _unpacked(store, dtype)
    place = torch.arange(store.longest, device=store.lengths.device)
    missing = (place >= (store.lengths // BLOCK * BLOCK)[:, None])[:, None, :, None]
    return key.masked_fill(missing, 0.0), value.masked_fill(missing, 0.0)


def exact_level(store: LevelStore, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values `[B, H, T, D]` as opened tokens have them; what is beyond a row is zeros."""
    longest = store.longest
    place = torch.arange(longest, device=store.lengths.device)
    here = (place < store.lengths[:, None])[:, None, :, None]
    if not store.settings.is_8bit:
        key, value = (x[:, :, :longest].to(dtype) for x in (store.keys, store.values))
    else:
        _, _, key, value = _unpacked(store, dtype)
        sinks = min(store.settings.sinks, longest)
        key[:, :, :sinks] = store.sink_keys[:, :, :sinks].to(dtype)
        for row, length in enumerate(store.lengths.tolist()):
            first = length // BLOCK * BLOCK
            key[row, :, first:length] = store.keys[row, :, : length - first].to(dtype)
            value[row, :, first:length] = store.values[row, :, : length - first].to(dtype)
    return key.masked_fill(~here, 0.0), value.masked_fill(~here, 0.0)


def reopen(store: LevelStore, row: int, block: int) -> None:
    """Make a packed block of an 8-bit store the one that is not packed yet."""
    tokens = slice(block * BLOCK, (block + 1) * BLOCK)
    _, _, key, value = _unpacked(store, torch.float32, slice(block, block + 1), row)
    sinks = store.sink_keys[row, :, tokens]
    key[0, :, : sinks.shape[1]] = sinks.to(key.dtype)
    for array, x in ((store.keys, key[0]), (store.values, value[0])):
        array[row] = x.to(array.dtype)


def _unpacked(
    store: LevelStore, dtype: torch.dtype, here: slice | None = None, row: int | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Coarse keys and values, and in an 8-bit store exact ones; `[B, H, T, D]`."""
    rows = slice(None) if row is None else slice(row, row + 1)
    longest = store.longest if here is None else BLOCK
    if here is None:
        here = slice(0, (longest + BLOCK - 1) // BLOCK)
    tokens = slice(here.start * BLOCK, here.stop * BLOCK)
    settings = store.settings
    scales = store.key_scales[rows, :, here].to(dtype)
    lo, step = scales[:, :, :, :1], scales[:, :, :, 1:]
    codes = unpack_keys(store.key_codes[rows, :, here]).to(dtype)  # [B, H, n, 64, D]
    rest = torch.zeros((), dtype=dtype, device=codes.device)
    key = exact_key = lo + step * codes
    if settings.is_8bit:
        rest = unpack_rest(store.key_rest[rows, :, tokens]).to(dtype).view(codes.shape)
        exact_key = lo + step * (codes + rest / 16)
    codes = unpack_values(store.value_codes[rows, :, here], settings.value_bits).to(dtype)
    scales = store.value_scales[rows, :, here].to(dtype).transpose(-1, -2)  # [B, H, n, 64, *]
    if settings.value_bits == 4:
        codes = codes - 8
        value = exact_value = scales * codes
        if settings.is_8bit:
            rest = unpack_rest(store.value_rest[rows, :, tokens]).to(dtype).view(codes.shape)
            exact_value = scales * (codes + rest / 16)
    else:
        wide = scales.repeat_interleave(VALUE_GROUP, -1).unflatten(-1, (-1, 2, VALUE_GROUP))
        lo, step = wide.transpose(-2, -3).flatten(-2)[..., : padded(store.value_width)].unbind(-2)
        value = exact_value = lo + step * codes
        if settings.is_8bit:
            scale = store.rest_scales[rows, :, here, :, None].to(dtype)
            exact_value = store.value_rest[rows, :, tokens].to(dtype).view(codes.shape) * scale
    key, exact_key = (x.flatten(2, 3)[:, :, :longest, : store.width] for x in (key, exact_key))
    value, exact_value = (
        x.flatten(2, 3)[:, :, :longest, : store.value_width] for x in (value, exact_value)
    )
    return key, value, exact_key.clone(), exact_value.clone()

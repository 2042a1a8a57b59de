"""Calls the built library: tensors become pointers and strides. Mirrors arguments.h."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from polyscale.ops.levels.native.build import LIBRARY
from polyscale.ops.levels.settings import LevelSettings
from polyscale.ops.native.entry import (
    Entry,
    TensorView,
    has_contiguous_channels,
    threads,
)
from polyscale.ops.native.instructions import wanted_variant

_int64, _int32 = ctypes.c_int64, ctypes.c_int32

# In the order of the fields of `Store`.
ARRAYS = (
    *("key_codes", "key_scales", "value_codes", "value_scales", "keys", "values"),
    *("key_rest", "value_rest", "rest_scales", "sink_keys"),
)


class _Store(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*ARRAYS, "lengths")),
        *((name, _int64) for name in ("batch", "heads", "blocks", "width", "value_width", "sinks")),
        *((name, _int32) for name in ("key_bits", "value_bits", "is_8bit", "bfloat16")),
    )


class _Attention(ctypes.Structure):
    _fields_ = (
        ("store", ctypes.POINTER(_Store)),
        *((name, TensorView) for name in ("query", "output")),
        *((name, _int64) for name in ("heads", "queries", "longest", "near", "heavy")),
        *((name, ctypes.c_void_p) for name in ("opened", "counts")),
        ("room", _int64),
        *((name, ctypes.c_double) for name in ("scale", "mass")),
        *((name, _int32) for name in ("threads", "variant")),
    )


class _Append(ctypes.Structure):
    _fields_ = (
        ("store", ctypes.POINTER(_Store)),
        *((name, TensorView) for name in ("key", "value")),
        ("tokens", _int64),
        ("real", ctypes.c_void_p),
        *((name, _int32) for name in ("threads", "variant")),
    )


# The fields of both behind the first one.
_FIELDS = struct.Struct("=16q2d2i")
_APPEND_FIELDS = struct.Struct("=10q2i")
_POINTER = ctypes.sizeof(ctypes.c_void_p)

_ENTRY = Entry(LIBRARY, {"store": _Store, "attention": _Attention, "append": _Append})
best_instructions = _ENTRY.best_instructions


class StoreView:
    """The arrays of a store for the library, which stay alive as long as this does."""

    def __init__(
        self,
        arrays: Sequence[Tensor],
        lengths: Tensor,
        settings: LevelSettings,
        width: int,
        value_width: int,
    ) -> None:
        self.kept = (*arrays, lengths)
        store = _Store()
        for name, array in zip((*ARRAYS, "lengths"), self.kept, strict=True):
            if not array.is_contiguous():
                raise ValueError(f"{name} must be contiguous, got strides {array.stride()}")
            setattr(store, name, array.data_ptr())
        store.batch, store.heads, store.blocks = arrays[0].shape[:3]
        store.width, store.value_width, store.sinks = width, value_width, settings.sinks
        store.key_bits, store.value_bits = settings.bits
        store.is_8bit = settings.is_8bit
        store.bfloat16 = arrays[4].dtype == torch.bfloat16
        self.pointer = ctypes.pointer(store)
        self.arguments, self.new = _Attention(), _Append()
        self.arguments.store = self.new.store = self.pointer


def attend(
    view: StoreView,
    query: Tensor,
    output: Tensor,
    longest: int,
    opening: tuple[int, int, float],
    scale: float,
    opened: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Fill `output`, and if asked for the opened tokens and their numbers.

    `opening`: near, heavy, and the share of the mass; negative without one.
    """
    shape, strides, to = query.shape, query.stride(), output.stride()
    if strides[3] != 1 and not has_contiguous_channels(query):
        query = query.contiguous()
        strides = query.stride()
    addresses = (0, 0, 0)
    if opened is not None:
        addresses = (opened[0].data_ptr(), opened[1].data_ptr(), opened[0].shape[3])
    # All fields at once: this runs for every token of every layer.
    _FIELDS.pack_into(
        view.arguments,
        _POINTER,
        *(query.data_ptr(), *strides[:3], output.data_ptr(), *to[:3]),
        *(shape[1], shape[2], longest, opening[0], opening[1], *addresses),
        *(scale, opening[2], threads(), wanted_variant()),
    )
    _ENTRY.run("attend", view.arguments)


def append(view: StoreView, key: Tensor, value: Tensor, real: Tensor | None) -> None:
    """Write new tokens into arrays that have room for them; pack the blocks that are full."""
    if not has_contiguous_channels(key):
        key = key.contiguous()
    if not has_contiguous_channels(value):
        value = value.contiguous()
    if real is not None:
        real = real.contiguous()
    _APPEND_FIELDS.pack_into(
        view.new,
        _POINTER,
        *(key.data_ptr(), *key.stride()[:3], value.data_ptr(), *value.stride()[:3]),
        *(key.shape[2], 0 if real is None else real.data_ptr(), threads(), wanted_variant()),
    )
    _ENTRY.run("append", view.new)

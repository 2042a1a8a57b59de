"""The library of the opened kernel, and its calls. Mirrors arguments.h."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from polyscale.ops.native.entry import Entry, TensorView, Views, threads
from polyscale.ops.native.instructions import kernel_library, wanted_variant

LIBRARY = kernel_library("opened", Path(__file__).parent)

_int64, _int32 = ctypes.c_int64, ctypes.c_int32

# What the operations take as one list of integers, in this order.
NUMBERS = ("causal", "strict", "pool", "unit", "key_block", "near", "heavy", "sample", "choosing")


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("batch", "heads", "key_heads", "queries", "keys")),
        *((name, _int64) for name in ("width", "value_width")),
        *((name, _int64) for name in ("unit", "key_block", "near", "heavy", "sample", "choosing")),
        ("sequences", _int64),
        *((name, ctypes.c_void_p) for name in ("boundaries", "lengths", "query_lengths")),
        *((name, _int64) for name in ("query_blocks", "rows", "block_bytes")),
        *((name, ctypes.c_void_p) for name in ("sinks", "opened", "kept", "log_sum", "row_sum")),
        *((name, TensorView) for name in ("query", "key", "value", "output")),
        *((name, TensorView) for name in ("grad_query", "grad_key", "grad_value", "grad_output")),
        *((name, ctypes.c_double) for name in ("mass", "scale")),
        *((name, _int32) for name in ("causal", "strict", "pool", "bfloat16")),
        *((name, _int32) for name in ("threads", "variant")),
    )


_ENTRY = Entry(LIBRARY, {"arguments": _Arguments})


class Call(Views):
    """Arguments of one call of the library, and what must stay alive while it runs.

    `spans` is `[2, B]`, the numbers of real keys and queries, which come first in their rows, or
    `[1, S + 1]`, the boundaries of packed sequences, or None.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor | None,
        sinks: Tensor,
        spans: Tensor | None,
        numbers: Sequence[int],
        scale: float,
    ) -> None:
        super().__init__()
        arguments = self.arguments = _Arguments()
        arguments.batch, arguments.heads, arguments.queries, arguments.width = query.shape
        arguments.key_heads, arguments.keys = key.shape[1:3]
        arguments.scale = scale
        for name, number in zip(NUMBERS, numbers, strict=True):
            setattr(arguments, name, number)
        arguments.bfloat16 = int(query.dtype == torch.bfloat16)
        arguments.threads, arguments.variant = threads(), wanted_variant()
        arguments.query, arguments.key = self.read(query), self.read(key)
        if value is not None:
            arguments.value_width, arguments.value = value.shape[3], self.read(value)
        arguments.sinks = self.address(sinks.to(torch.uint8).contiguous())
        if spans is not None:
            spans = spans.to(torch.int64).contiguous()
            if spans.shape[0] == 1:
                arguments.sequences = spans.shape[1] - 1
                arguments.boundaries = self.address(spans)
            else:
                arguments.lengths, arguments.query_lengths = map(self.address, spans)

    def set_choice(self, opened: Tensor) -> None:
        """The bits of the heavy key blocks, uint8 `[B, Hk, Q, bytes]`."""
        self.arguments.query_blocks, self.arguments.block_bytes = opened.shape[2:]
        self.arguments.opened = self.address(opened)

    def run(self, function: str) -> None:
        """Compute; the interpreter's lock is released meanwhile."""
        _ENTRY.run(function, self.arguments)

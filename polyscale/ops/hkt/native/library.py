"""Calls the built library: tensors become pointers and strides. Mirrors arguments.h."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from polyscale.ops.hkt.limits import MAX_LEVELS
from polyscale.ops.native.entry import Entry, TensorView, Views, threads
from polyscale.ops.native.instructions import kernel_library, wanted_variant

LIBRARY = kernel_library("hkt", Path(__file__).parent, {"HKT_MAX_LEVELS": MAX_LEVELS})

_int64, _int32 = ctypes.c_int64, ctypes.c_int32
_Levels = TensorView * MAX_LEVELS


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("batch", "heads", "length", "width", "value_width")),
        ("levels", _int64),
        ("sequences", _int64),
        *((name, ctypes.c_void_p) for name in ("boundaries", "lengths", "weights")),
        ("queries", _int64),
        ("positions", ctypes.c_void_p),
        ("statistics", ctypes.c_void_p),
        ("grad_weights", ctypes.c_void_p),
        ("query", _Levels),
        ("key", _Levels),
        ("value", TensorView),
        ("output", TensorView),
        ("grad_query", _Levels),
        ("grad_key", _Levels),
        ("grad_value", TensorView),
        ("grad_output", TensorView),
        ("coarse_scores", _Levels),
        ("first_reused", _int64),
        ("scale", ctypes.c_double),
        *((name, _int32) for name in ("causal", "bfloat16", "threads", "variant")),
    )


_ENTRY = Entry(LIBRARY, {"arguments": _Arguments})
best_instructions = _ENTRY.best_instructions


class Call(Views):
    """One call of the library, and the tensors that must stay alive while it runs."""

    def __init__(
        self,
        queries: Sequence[Tensor],
        keys: Sequence[Tensor],
        value: Tensor,
        weights: Tensor,
        lengths: Tensor | None,
        boundaries: Tensor | None,
        causal: bool,
        scale: float,
    ) -> None:
        super().__init__()
        arguments = self.arguments = _Arguments()
        arguments.batch, arguments.heads, arguments.length, arguments.value_width = value.shape
        arguments.width, arguments.levels = queries[0].shape[-1], len(queries)
        arguments.causal, arguments.scale = int(causal), scale
        arguments.bfloat16 = int(value.dtype == torch.bfloat16)
        arguments.threads = threads()
        arguments.variant = wanted_variant()
        arguments.weights = self.address(weights.detach().to(torch.float32).contiguous())
        if lengths is not None:
            clamped = lengths.to(torch.int64).clamp(0, value.shape[2])
            arguments.lengths = self.address(clamped.contiguous())
        if boundaries is not None:
            arguments.sequences = boundaries.shape[1] - 1
            arguments.boundaries = self.address(boundaries.contiguous())
        for level, (query, key) in enumerate(zip(queries, keys, strict=True)):
            arguments.query[level], arguments.key[level] = self.read(query), self.read(key)
        arguments.value = self.read(value)

    def set_gradients(
        self, queries: Sequence[Tensor], keys: Sequence[Tensor], value: Tensor, weights: Tensor
    ) -> None:
        """The tensors that receive the gradients, all float32."""
        for level, (query, key) in enumerate(zip(queries, keys, strict=True)):
            self.arguments.grad_query[level] = self.write(query)
            self.arguments.grad_key[level] = self.write(key)
        self.arguments.grad_value = self.write(value)
        self.arguments.grad_weights = self.address(weights)

    def set_results(self, output: Tensor, statistics: Tensor, grad_output: Tensor) -> None:
        """The results of the forward pass, and the gradient of its output."""
        self.arguments.output = self.read(output)
        self.arguments.grad_output = self.read(grad_output)
        self.arguments.statistics = self.address(statistics.contiguous())

    def run(self, function: str) -> None:
        """Compute; the interpreter's lock is released meanwhile."""
        _ENTRY.run(function, self.arguments)

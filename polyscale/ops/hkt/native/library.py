"""Calls the built library: tensors become pointers and strides. Mirrors problem.h."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from polyscale.ops.hkt.native.build import load

MAX_LEVELS = 5
VARIANTS = ("portable", "avx2", "avx512")
# The best instructions the processor has, unless a test names lesser ones.
instructions: str | None = None

_int64, _int32 = ctypes.c_int64, ctypes.c_int32


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("batch", _int64),
        ("head", _int64),
        ("row", _int64),
    )


_Levels = _Tensor * MAX_LEVELS


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("batch", "heads", "length", "width", "value_width")),
        ("levels", _int64),
        ("sequences", _int64),
        *((name, ctypes.c_void_p) for name in ("boundaries", "lengths", "weights")),
        ("statistics", ctypes.c_void_p),
        ("grad_weights", ctypes.c_void_p),
        ("query", _Levels),
        ("key", _Levels),
        ("value", _Tensor),
        ("output", _Tensor),
        ("grad_query", _Levels),
        ("grad_key", _Levels),
        ("grad_value", _Tensor),
        ("grad_output", _Tensor),
        ("scale", ctypes.c_float),
        *((name, _int32) for name in ("causal", "bfloat16", "threads", "variant")),
    )


def best_variant() -> str:
    """The instructions this processor has: `"portable"`, `"avx2"` or `"avx512"`."""
    return VARIANTS[load().hkt_best_variant()]


class Call:
    """One problem for the library, and what must stay alive while it runs."""

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
        self.library = load()
        if self.library.hkt_problem_size() != ctypes.sizeof(_Problem):
            raise RuntimeError("library.py and problem.h differ: they must describe one struct")
        self.kept: list[object] = []
        problem = self.problem = _Problem()
        problem.batch, problem.heads, problem.length, problem.value_width = value.shape
        problem.width, problem.levels = queries[0].shape[-1], len(queries)
        problem.causal, problem.scale = int(causal), scale
        problem.bfloat16 = int(value.dtype == torch.bfloat16)
        problem.threads = torch.get_num_threads()
        problem.variant = -1 if instructions is None else VARIANTS.index(instructions)
        problem.weights = self.numbers(weights.detach().to(torch.float32).contiguous())
        if lengths is not None:
            clamped = lengths.to(torch.int64).clamp(0, value.shape[2])
            problem.lengths = self.numbers(clamped.contiguous())
        if boundaries is not None:
            problem.sequences = boundaries.shape[1] - 1
            problem.boundaries = self.numbers(boundaries.contiguous())
        for level, (query, key) in enumerate(zip(queries, keys, strict=True)):
            problem.query[level], problem.key[level] = self.read(query), self.read(key)
        problem.value = self.read(value)

    def numbers(self, tensor: Tensor) -> int:
        """The address of a contiguous tensor."""
        self.kept.append(tensor)
        return tensor.data_ptr()

    def read(self, tensor: Tensor) -> _Tensor:
        """`[B, H, T, D]`; copied only if its channels do not lie side by side."""
        return self.write(tensor if _side_by_side(tensor) else tensor.contiguous())

    def write(self, tensor: Tensor) -> _Tensor:
        """`[B, H, T, D]` for a result: a copy would be lost."""
        if not _side_by_side(tensor):
            raise ValueError(f"channels must lie side by side, got strides {tensor.stride()}")
        self.kept.append(tensor)
        return _Tensor(tensor.data_ptr(), *tensor.stride()[:3])

    def run(self, name: str) -> None:
        """Compute; the interpreter's lock is released meanwhile."""
        if getattr(self.library, name)(ctypes.byref(self.problem)) != 0:
            raise MemoryError(f"{name}: not enough memory for the scratch space of every thread")


def _side_by_side(tensor: Tensor) -> bool:
    return tensor.shape[-1] == 1 or tensor.stride(-1) == 1

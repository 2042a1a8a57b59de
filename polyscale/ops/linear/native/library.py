"""Calls the built library: tensors become pointers. Mirrors arguments.h."""

import ctypes
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from polyscale.ops.native.entry import Entry, threads
from polyscale.ops.native.instructions import kernel_library, wanted_variant

LIBRARY = kernel_library("linear", Path(__file__).parent)

_int64, _int32 = ctypes.c_int64, ctypes.c_int32


class _Projected(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "grad")),
        *((name, _int64) for name in ("rows", "outputs")),
    )


class _Arguments(ctypes.Structure):
    _fields_ = (
        ("projected", _Projected * 2),
        ("width", _int64),
        *((name, ctypes.c_void_p) for name in ("grad_weight", "grad_bias")),
        *((name, _int32) for name in ("threads", "variant")),
    )


_ENTRY = Entry(LIBRARY, {"arguments": _Arguments})


def weight_gradient(
    inputs: Sequence[Tensor], grads: Sequence[Tensor], grad_weight: Tensor, grad_bias: Tensor
) -> None:
    """Fill the gradients of a projection. Everything is contiguous and float32.

    Args:
        inputs: one or two, `[N, C]`.
        grads: of their projections, `[N, O]`; the second may have the first outputs only.
        grad_weight: `[O, C]`, to be filled.
        grad_bias: `[O]`, to be filled.
    """
    arguments = _Arguments()
    for number, (x, grad) in enumerate(zip(inputs, grads, strict=True)):
        arguments.projected[number] = _Projected(x.data_ptr(), grad.data_ptr(), *grad.shape)
    arguments.width = grad_weight.shape[1]
    arguments.grad_weight, arguments.grad_bias = grad_weight.data_ptr(), grad_bias.data_ptr()
    arguments.threads, arguments.variant = threads(), wanted_variant()
    _ENTRY.run("weight_gradient", arguments)

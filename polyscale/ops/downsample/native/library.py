"""Calls the built library: tensors become pointers and strides. Mirrors arguments.h."""

import ctypes
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from polyscale.ops.native.entry import Entry, threads
from polyscale.ops.native.instructions import kernel_library, wanted_variant

LIBRARY = kernel_library("downsample", Path(__file__).parent)

_int64, _int32 = ctypes.c_int64, ctypes.c_int32


class _Arguments(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("batch", "length", "channels", "levels", "width")),
        *((name, ctypes.c_void_p) for name in ("x", "weights")),
        *((name, _int64) for name in ("x_batch", "x_row")),
        *((name, ctypes.c_void_p) for name in ("coarse", "grad_coarse", "grad_fine")),
        *((name, ctypes.c_void_p) for name in ("grad_x", "grad_weights")),
        *((name, _int32) for name in ("threads", "variant")),
    )


_ENTRY = Entry(LIBRARY, {"arguments": _Arguments})


class Gradients(NamedTuple):
    """Gradients that are given, of `coarse` and of what else depends on `x`, and those to fill."""

    coarse: Tensor  # [B, T_1 + T_2 + .., C]
    fine: Tensor  # [B, T, C]
    x: Tensor  # [B, T, C], to be filled
    weights: Tensor  # [L - 1, width, C], to be filled


def forward(x: Tensor, weights: Tensor, coarse: Tensor) -> None:
    """Fill `coarse` from `x` `[B, T, C]`, all float32; everything but `x` is contiguous."""
    _ENTRY.run("forward", _arguments(x, weights, coarse))


def backward(x: Tensor, weights: Tensor, coarse: Tensor, gradients: Gradients) -> None:
    """Fill the gradients of `x` and `weights`."""
    arguments = _arguments(x, weights, coarse)
    for name, gradient in gradients._asdict().items():
        setattr(arguments, f"grad_{name}", gradient.data_ptr())
    _ENTRY.run("backward", arguments)


def _arguments(x: Tensor, weights: Tensor, coarse: Tensor) -> _Arguments:
    arguments = _Arguments()
    arguments.batch, arguments.length, arguments.channels = x.shape
    arguments.levels, arguments.width = weights.shape[:2]
    arguments.x, arguments.weights, arguments.coarse = (
        x.data_ptr(),
        weights.data_ptr(),
        coarse.data_ptr(),
    )
    arguments.x_batch, arguments.x_row = x.stride()[:2]
    arguments.threads, arguments.variant = threads(), wanted_variant()
    return arguments

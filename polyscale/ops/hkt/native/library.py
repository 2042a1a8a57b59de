"""Calls the built library: tensors become pointers and strides. Mirrors problem.h."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from polyscale.ops.hkt.native.build import LIBRARY
from polyscale.ops.native.entry import Entry, TensorView, Views, threads
from polyscale.ops.native.instructions import wanted_variant

MAX_LEVELS = 5

_int64, _int32 = ctypes.c_int64, ctypes.c_int32


_Levels = TensorView * MAX_LEVELS


class _Problem(ctypes.Structure):
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
        ("kept", _Levels),
        ("known_from", _int64),
        ("scale", ctypes.c_double),
        *((name, _int32) for name in ("causal", "bfloat16", "threads", "variant")),
    )


class _Downsample(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("batch", "length", "channels", "levels", "width")),
        *((name, ctypes.c_void_p) for name in ("x", "weights")),
        *((name, _int64) for name in ("x_batch", "x_row")),
        *((name, ctypes.c_void_p) for name in ("coarse", "grad_coarse", "grad_fine")),
        *((name, ctypes.c_void_p) for name in ("grad_x", "grad_weights")),
        *((name, _int32) for name in ("threads", "variant")),
    )


class _Projected(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "grad")),
        *((name, _int64) for name in ("rows", "outputs")),
    )


class _WeightGradient(ctypes.Structure):
    _fields_ = (
        ("projected", _Projected * 2),
        ("width", _int64),
        *((name, ctypes.c_void_p) for name in ("grad_weight", "grad_bias")),
        *((name, _int32) for name in ("threads", "variant")),
    )


_ENTRY = Entry(
    LIBRARY,
    {"problem": _Problem, "downsample": _Downsample, "weight_gradient": _WeightGradient},
)
best_instructions = _ENTRY.best_instructions


class Call(Views):
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
        super().__init__()
        problem = self.problem = _Problem()
        problem.batch, problem.heads, problem.length, problem.value_width = value.shape
        problem.width, problem.levels = queries[0].shape[-1], len(queries)
        problem.causal, problem.scale = int(causal), scale
        problem.bfloat16 = int(value.dtype == torch.bfloat16)
        problem.threads = threads()
        problem.variant = wanted_variant()
        problem.weights = self.address(weights.detach().to(torch.float32).contiguous())
        if lengths is not None:
            clamped = lengths.to(torch.int64).clamp(0, value.shape[2])
            problem.lengths = self.address(clamped.contiguous())
        if boundaries is not None:
            problem.sequences = boundaries.shape[1] - 1
            problem.boundaries = self.address(boundaries.contiguous())
        for level, (query, key) in enumerate(zip(queries, keys, strict=True)):
            problem.query[level], problem.key[level] = self.read(query), self.read(key)
        problem.value = self.read(value)

    def set_gradients(
        self, queries: Sequence[Tensor], keys: Sequence[Tensor], value: Tensor, weights: Tensor
    ) -> None:
        """Where the gradients go, all of them float32."""
        for level, (query, key) in enumerate(zip(queries, keys, strict=True)):
            self.problem.grad_query[level] = self.write(query)
            self.problem.grad_key[level] = self.write(key)
        self.problem.grad_value = self.write(value)
        self.problem.grad_weights = self.address(weights)

    def set_results(self, output: Tensor, statistics: Tensor, grad_output: Tensor) -> None:
        """What the forward pass found, and the gradient of its output."""
        self.problem.output = self.read(output)
        self.problem.grad_output = self.read(grad_output)
        self.problem.statistics = self.address(statistics.contiguous())

    def run(self, function: str) -> None:
        """Compute; the interpreter's lock is released meanwhile."""
        _ENTRY.run(function, self.problem)


def downsample(
    x: Tensor,
    weights: Tensor,
    coarse: Tensor,
    grads: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    """Fill `coarse` from `x` `[B, T, C]`, or gradients if they are given; all in float32.

    The gradients of `coarse` and, from elsewhere, of `x`, and those to fill: of `x` in all and of
    `weights` `[L - 1, width, C]`. Everything but `x` is contiguous.
    """
    problem = _Downsample()
    problem.batch, problem.length, problem.channels = x.shape
    problem.levels, problem.width = weights.shape[:2]
    problem.x, problem.weights, problem.coarse = x.data_ptr(), weights.data_ptr(), coarse.data_ptr()
    problem.x_batch, problem.x_row = x.stride()[:2]
    problem.threads, problem.variant = threads(), wanted_variant()
    if grads is None:
        _ENTRY.run("downsample", problem)
        return
    names = ("grad_coarse", "grad_fine", "grad_x", "grad_weights")
    for name, gradient in zip(names, grads, strict=True):
        setattr(problem, name, gradient.data_ptr())
    _ENTRY.run("downsample_backward", problem)


def weight_gradient(
    inputs: Sequence[Tensor], grads: Sequence[Tensor], grad_weight: Tensor, grad_bias: Tensor
) -> None:
    """Fill the gradients of a projection that made one or two inputs, `[N, C]`, into others.

    `grads`: those of the outputs, `[N, O]`; of a second input there may be the first outputs only.
    Everything is contiguous and float32.
    """
    problem = _WeightGradient()
    for number, (x, grad) in enumerate(zip(inputs, grads, strict=True)):
        addresses = x.data_ptr(), grad.data_ptr()
        problem.projected[number] = _Projected(*addresses, *grad.shape)
    problem.width = grad_weight.shape[1]
    problem.grad_weight, problem.grad_bias = grad_weight.data_ptr(), grad_bias.data_ptr()
    problem.threads, problem.variant = threads(), wanted_variant()
    _ENTRY.run("weight_gradient", problem)

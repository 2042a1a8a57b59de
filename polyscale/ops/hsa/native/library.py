"""Calls the built library: tensors become pointers and strides. Mirrors problem.h."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyscale.ops.hsa.native.build import LIBRARY
from polyscale.ops.native.entry import Entry, TensorView, Views, threads
from polyscale.ops.native.instructions import wanted_variant

_int64, _int32, _pointer = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p


class _Problem(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("batch", "heads", "key_heads", "rows", "width")),
        *((name, _int64) for name in ("value_width", "position_width", "position_heads")),
        *((name, _pointer) for name in ("plan", "ignored", "position_query", "position_key")),
        *((name, TensorView) for name in ("query", "key", "value", "output")),
        *((name, TensorView) for name in ("grad_output", "grad_query", "grad_key", "grad_value")),
        *((name, _pointer) for name in ("log_sums", "grad_log_sums")),
        *((name, _pointer) for name in ("grad_position_query", "grad_position_key")),
        ("scale", ctypes.c_double),
        *((name, _int32) for name in ("columns", "causal", "include_self", "bfloat16")),
        *((name, _int32) for name in ("threads", "variant")),
    )


class _Forest(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("nodes", "rows", "trees")),
        *((name, _pointer) for name in ("first_child", "child_count", "leaf_count", "leaf_begin")),
        *((name, _pointer) for name in ("leaf_row", "leaf_order", "row_node", "plan")),
        *((name, _int64) for name in ("room", "leaves")),
    )


MOST_OPEN = 64


class _Decode(ctypes.Structure):
    _fields_ = (
        *((name, _int64) for name in ("batch", "heads", "key_heads", "width", "value_width")),
        ("levels", _int64),
        *((name, TensorView) for name in ("query", "key", "value", "output")),
        *((name, _pointer * MOST_OPEN) for name in ("keys", "values", "counts", "filled")),
        ("room", _int64 * MOST_OPEN),
        *((name, _pointer) for name in ("closes", "rows")),
        ("missing", _int64),
        ("scale", ctypes.c_double),
        *((name, _int32) for name in ("include_self", "bfloat16", "threads", "variant")),
    )


_ENTRY = Entry(LIBRARY, {"problem": _Problem, "forest": _Forest, "decode": _Decode})
best_instructions = _ENTRY.best_instructions


@dataclass(frozen=True)
class Inputs:
    """What both passes take."""

    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, Hk, N, D]
    value: Tensor  # [B, Hk, N, Dv]
    plan: Tensor
    ignored: Tensor | None  # [B, N]
    position_query: Tensor | None  # [H or 1, M, P]
    position_key: Tensor | None
    columns: bool
    causal: bool
    include_self: bool
    scale: float


def forward(inputs: Inputs, output: Tensor, log_sums: Tensor) -> None:
    """Fill the output `[B, H, N, Dv]` and the logarithms of sums `[B, H, N]`."""
    views = Views()
    problem = _problem(inputs, views)
    problem.output = views.write(output)
    problem.log_sums = views.address(log_sums)
    _ENTRY.run("forward", problem)


def backward(
    inputs: Inputs,
    grad_output: Tensor,
    grad_log_sums: Tensor | None,
    gradients: tuple[Tensor, Tensor, Tensor],
    grad_positions: tuple[Tensor, Tensor] | None,
) -> None:
    """Fill the gradients of query, key and value, per query head, and of positions, per copy."""
    views = Views()
    problem = _problem(inputs, views)
    problem.grad_output = views.read(grad_output)
    names = ("grad_query", "grad_key", "grad_value")
    for name, gradient in zip(names, gradients, strict=True):
        setattr(problem, name, views.write(gradient))
    if grad_log_sums is not None:
        problem.grad_log_sums = views.address(grad_log_sums.contiguous())
    if grad_positions is not None:
        problem.grad_position_query = views.address(grad_positions[0])
        problem.grad_position_key = views.address(grad_positions[1])
    _ENTRY.run("backward", problem)


def _problem(inputs: Inputs, views: Views) -> _Problem:
    problem = _Problem()
    problem.batch, problem.heads, problem.rows, problem.width = inputs.query.shape
    problem.key_heads, problem.value_width = inputs.key.shape[1], inputs.value.shape[3]
    for name in ("query", "key", "value"):
        setattr(problem, name, views.read(getattr(inputs, name)))
    problem.plan = views.address(inputs.plan)
    if inputs.ignored is not None:
        problem.ignored = views.address(inputs.ignored.contiguous())
    if inputs.position_query is not None and inputs.position_key is not None:
        problem.position_heads, _, problem.position_width = inputs.position_query.shape
        problem.position_query = views.address(inputs.position_query.contiguous())
        problem.position_key = views.address(inputs.position_key.contiguous())
    problem.scale, problem.columns = inputs.scale, int(inputs.columns)
    problem.causal, problem.include_self = int(inputs.causal), int(inputs.include_self)
    problem.bfloat16 = int(inputs.query.dtype == torch.bfloat16)
    problem.threads, problem.variant = threads(), wanted_variant()
    return problem


def plan_size(tensors: list[Tensor], plan: Tensor) -> int:
    """Write the plan of a forest and return its size; nothing is written if there is no room.

    `tensors`: parent, first_child, child_count, leaf_count, leaf_begin, leaf_row, leaf_order,
    row_node.
    """
    views = Views()
    forest = _Forest()
    parent, *tensors = tensors
    forest.nodes, forest.rows = parent.numel(), tensors[6].numel()
    forest.trees = int((parent < 0).sum())
    forest.leaves, forest.room = tensors[5].numel(), plan.numel()
    names = [field[0] for field in _Forest._fields_[3:10]]
    for name, tensor in zip(names, tensors, strict=True):
        setattr(forest, name, views.address(tensor.contiguous()))
    forest.plan = views.address(plan)
    _ENTRY.run("plan", forest)
    return forest.room


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    families: Sequence[tuple[Tensor, Tensor, Tensor, Tensor]],
    closes: Tensor,
    rows: Tensor,
    output: Tensor,
    scale: float,
    include_self: bool,
) -> int:
    """One token of every row; the families change in place, unless one lacks room.

    `families`: keys, values, counts and how many are filled, from the tokens up. Returns the level
    that has no room for one more member, for which nothing has been done yet; -1 when it is done.
    """
    views = Views()
    problem = _Decode()
    problem.batch, problem.heads, _, problem.width = query.shape
    problem.key_heads, problem.value_width = key.shape[1], value.shape[3]
    problem.levels = len(families)
    for name, part in (("query", query), ("key", key), ("value", value)):
        setattr(problem, name, views.read(part))
    problem.output = views.write(output)
    for level, (keys, values, counts, filled) in enumerate(families):
        problem.keys[level], problem.values[level] = keys.data_ptr(), values.data_ptr()
        problem.counts[level], problem.filled[level] = counts.data_ptr(), filled.data_ptr()
        problem.room[level] = keys.shape[2]
    problem.closes = views.address(closes.to(torch.int64).contiguous())
    problem.rows = views.address(rows.contiguous())
    problem.scale, problem.include_self = scale, int(include_self)
    problem.bfloat16 = int(query.dtype == torch.bfloat16)
    problem.threads, problem.variant = threads(), wanted_variant()
    _ENTRY.run("decode", problem)
    return problem.missing

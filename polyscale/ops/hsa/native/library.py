"""Calls the built library: tensors become pointers and strides. Mirrors arguments.h."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyscale.ops.hsa.native.build import LIBRARY
from polyscale.ops.native.entry import Entry, TensorView, Views, threads
from polyscale.ops.native.instructions import wanted_variant

_int64, _int32, _pointer = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p


class _AttentionArguments(ctypes.Structure):
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


_ENTRY = Entry(LIBRARY, {"arguments": _AttentionArguments, "forest": _Forest, "decode": _Decode})
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
    arguments = _arguments(inputs, views)
    arguments.output = views.write(output)
    arguments.log_sums = views.address(log_sums)
    _ENTRY.run("forward", arguments)


def backward(
    inputs: Inputs,
    grad_output: Tensor,
    grad_log_sums: Tensor | None,
    gradients: tuple[Tensor, Tensor, Tensor],
    grad_positions: tuple[Tensor, Tensor] | None,
) -> None:
    """Fill the gradients of query, key and value, per query head, and of positions, per copy."""
    views = Views()
    arguments = _arguments(inputs, views)
    arguments.grad_output = views.read(grad_output)
    names = ("grad_query", "grad_key", "grad_value")
    for name, gradient in zip(names, gradients, strict=True):
        setattr(arguments, name, views.write(gradient))
    if grad_log_sums is not None:
        arguments.grad_log_sums = views.address(grad_log_sums.contiguous())
    if grad_positions is not None:
        arguments.grad_position_query = views.address(grad_positions[0])
        arguments.grad_position_key = views.address(grad_positions[1])
    _ENTRY.run("backward", arguments)


def _arguments(inputs: Inputs, views: Views) -> _AttentionArguments:
    arguments = _AttentionArguments()
    arguments.batch, arguments.heads, arguments.rows, arguments.width = inputs.query.shape
    arguments.key_heads, arguments.value_width = inputs.key.shape[1], inputs.value.shape[3]
    for name in ("query", "key", "value"):
        setattr(arguments, name, views.read(getattr(inputs, name)))
    arguments.plan = views.address(inputs.plan)
    if inputs.ignored is not None:
        arguments.ignored = views.address(inputs.ignored.contiguous())
    if inputs.position_query is not None and inputs.position_key is not None:
        arguments.position_heads, _, arguments.position_width = inputs.position_query.shape
        arguments.position_query = views.address(inputs.position_query.contiguous())
        arguments.position_key = views.address(inputs.position_key.contiguous())
    arguments.scale, arguments.columns = inputs.scale, int(inputs.columns)
    arguments.causal, arguments.include_self = int(inputs.causal), int(inputs.include_self)
    arguments.bfloat16 = int(inputs.query.dtype == torch.bfloat16)
    arguments.threads, arguments.variant = threads(), wanted_variant()
    return arguments


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
    arguments = _Decode()
    arguments.batch, arguments.heads, _, arguments.width = query.shape
    arguments.key_heads, arguments.value_width = key.shape[1], value.shape[3]
    arguments.levels = len(families)
    for name, part in (("query", query), ("key", key), ("value", value)):
        setattr(arguments, name, views.read(part))
    arguments.output = views.write(output)
    for level, (keys, values, counts, filled) in enumerate(families):
        arguments.keys[level], arguments.values[level] = keys.data_ptr(), values.data_ptr()
        arguments.counts[level], arguments.filled[level] = counts.data_ptr(), filled.data_ptr()
        arguments.room[level] = keys.shape[2]
    arguments.closes = views.address(closes.to(torch.int64).contiguous())
    arguments.rows = views.address(rows.contiguous())
    arguments.scale, arguments.include_self = scale, int(include_self)
    arguments.bfloat16 = int(query.dtype == torch.bfloat16)
    arguments.threads, arguments.variant = threads(), wanted_variant()
    _ENTRY.run("decode", arguments)
    return arguments.missing

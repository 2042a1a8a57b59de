"""Opened attention on the CPU: torch operations around the native kernel.

Two operations: `opened_choose` finds the heavy key blocks and what the sampled rows keep, and is
constant for gradients; `opened_attend` attends to a given choice, and has a backward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from polyscale.ops.native.derivatives import refuse_tangents, transformed
from polyscale.ops.opened.native.library import Call

MAX_WIDTH = 256


def why_unsupported(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> str | None:
    """Why the kernel cannot take these tensors; None if it can."""
    if query.device.type != "cpu":
        return f"it runs on the CPU, got tensors on {query.device}"
    if query.dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 and bfloat16, got {query.dtype}"
    width = max(query.shape[-1], value.shape[-1])
    if width > MAX_WIDTH:
        return f"it takes head dimensions up to {MAX_WIDTH}, got {width}"
    # torch would take the operation for a constant: a tangent of zero, without a word.
    if transformed((query, key, value)):
        return "it has reverse-mode gradients only: no torch.func transforms, no forward mode"
    return None


@torch.library.custom_op("polyscale::opened_choose", mutates_args=(), device_types="cpu")
def choose(
    query: Tensor,
    key: Tensor,
    sinks: Tensor,
    spans: Tensor | None,
    numbers: list[int],
    sizes: list[int],
    mass: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The bits of the heavy key blocks, and of sampled rows what they keep and log Z.

    `sizes` says for how many query blocks, bytes of a choice, and sampled rows there is room.
    """
    opened, kept, log_sum = _empty_choice(query, key, sizes)
    if not query.numel():
        return opened, kept, log_sum
    call = Call(query, key, None, sinks, spans, numbers, scale)
    call.arguments.mass = mass
    call.set_choice(opened)
    call.arguments.rows = kept.shape[2]
    call.arguments.kept, call.arguments.log_sum = call.address(kept), call.address(log_sum)
    call.run("choose")
    return opened, kept, log_sum


@choose.register_fake
def _(
    query: Tensor,
    key: Tensor,
    sinks: Tensor,
    spans: Tensor | None,
    numbers: list[int],
    sizes: list[int],
    mass: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return _empty_choice(query, key, sizes)


def _empty_choice(query: Tensor, key: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads = query.shape[:2]
    blocks, block_bytes, rows = sizes
    opened = query.new_zeros(batch, key.shape[1], blocks, block_bytes, dtype=torch.uint8)
    kept = query.new_zeros(batch, heads, rows, dtype=torch.float32)
    return opened, kept, torch.zeros_like(kept)


@torch.library.custom_op("polyscale::opened_attend", mutates_args=(), device_types="cpu")
def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    spans: Tensor | None,
    opened: Tensor,
    numbers: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """The attended values `[B, H, N, Dv]` and the log of each row's sum `[B, H, N]`."""
    output, row_sum = _empty_results(query, value, spans)
    if not query.numel():
        return output, row_sum
    call = Call(query, key, value, sinks, spans, numbers, scale)
    call.set_choice(opened.contiguous())
    call.arguments.output = call.write(output)
    call.arguments.row_sum = call.address(row_sum)
    call.run("attend")
    return output, row_sum


@attend.register_fake
def _(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    spans: Tensor | None,
    opened: Tensor,
    numbers: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    return _empty_results(query, value, spans)


def _empty_results(query: Tensor, value: Tensor, spans: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = query.shape
    # Heads side by side, as the projection after the attention reads them. Zeros at padding.
    make = query.new_empty if spans is None else query.new_zeros
    output = make(batch, queries, heads, value.shape[3]).transpose(1, 2)
    return output, make(batch, heads, queries, dtype=torch.float32)


@torch.library.custom_op("polyscale::opened_backward", mutates_args=(), device_types="cpu")
def backward(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    spans: Tensor | None,
    opened: Tensor,
    output: Tensor,
    row_sum: Tensor,
    numbers: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the queries, the keys and the values."""
    gradients = [torch.zeros(x.shape, dtype=torch.float32) for x in (query, key, value)]
    if query.numel():
        call = Call(query, key, value, sinks, spans, numbers, scale)
        call.set_choice(opened.contiguous())
        arguments = call.arguments
        arguments.output, arguments.row_sum = call.read(output), call.address(row_sum.contiguous())
        arguments.grad_output = call.read(grad_output.to(query.dtype))
        arguments.grad_query, arguments.grad_key, arguments.grad_value = map(call.write, gradients)
        call.run("backward")
    grad_query, grad_key, grad_value = (x.to(query.dtype) for x in gradients)
    return grad_query, grad_key, grad_value


@backward.register_fake
def _(
    grad_output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor,
    spans: Tensor | None,
    opened: Tensor,
    output: Tensor,
    row_sum: Tensor,
    numbers: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad_query, grad_key, grad_value = (x.new_empty(x.shape) for x in (query, key, value))
    return grad_query, grad_key, grad_value


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, numbers, scale = inputs
    ctx.numbers, ctx.scale = numbers, scale
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, *output)


def _differentiate(ctx: Any, grad_output: Tensor, _: Tensor | None) -> tuple:
    refuse_tangents(grad_output)
    gradients = backward(grad_output, *ctx.saved_tensors, ctx.numbers, ctx.scale)
    return (*gradients, *[None] * 5)


attend.register_autograd(_differentiate, setup_context=_setup_context)

"""HKT attention on the CPU as one fused kernel: a torch operation with its own backward pass.

Scores of every level are computed at the level's own resolution, so they cost `sum 4**-l` times
those of standard attention; nothing of size T x T is ever stored.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyscale.ops.hkt.limits import why_beyond_limits
from polyscale.ops.hkt.mask import AttentionMask
from polyscale.ops.hkt.native.library import Call
from polyscale.ops.hkt.reference import hkt_attention_reference
from polyscale.ops.layout import PackedLayout
from polyscale.ops.native.derivatives import (
    differentiate_gradients,
    refuse_tangents,
    transformed,
)
from polyscale.ops.native.entry import has_contiguous_channels


def hkt_attention_native(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    mask: AttentionMask,
    scale: float,
    relative_bias: None = None,
) -> Tensor:
    """The attended values, `[B, H, T, Dv]`."""
    if torch.compiler.is_compiling():
        # Inductor may save a view for the backward pass in another layout than it traced, and
        # takes the strides of that layout for constants when the length is dynamic.
        queries, keys = [q.contiguous() for q in queries], [k.contiguous() for k in keys]
        value = value.contiguous()
    weights = level_weights.to(torch.float32).expand(value.shape[1], -1)  # [H, L]
    output, _ = _forward(
        list(queries),
        list(keys),
        value,
        weights,
        mask.lengths,
        boundaries_of(mask),
        mask.causal,
        scale,
    )
    return output


def boundaries_of(mask: AttentionMask) -> Tensor | None:
    """Where packed sequences begin and end at every level, `[L, S + 1]`."""
    return None if mask.packed is None else torch.tensor(mask.packed.boundaries)


def why_unsupported(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    mask: AttentionMask | None = None,
    scale: float | None = None,
    relative_bias: Sequence[Tensor] | None = None,
) -> str | None:
    """Why the kernel cannot take these tensors; None if it can."""
    if value.device.type != "cpu":
        return f"it runs on the CPU, got tensors on {value.device}"
    if value.dtype not in (torch.float32, torch.bfloat16):
        return f"it takes float32 and bfloat16, got {value.dtype}"
    if any(x.dtype != value.dtype for x in (*queries, *keys)):
        return "queries, keys and value must have one dtype"
    reason = why_beyond_limits(queries, value, relative_bias)
    if reason is not None:
        return reason
    # torch would treat the operation as a constant and silently return a tangent of zero.
    if transformed((*queries, *keys, value, level_weights)):
        return "it has reverse-mode gradients only: no torch.func transforms, no forward mode"
    return None


@torch.library.custom_op("polyscale::hkt_attention", mutates_args=(), device_types="cpu")
def _forward(
    queries: list[Tensor],
    keys: list[Tensor],
    value: Tensor,
    weights: Tensor,
    lengths: Tensor | None,
    boundaries: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    output, statistics = _empty_results(value)
    call = Call(queries, keys, value, weights, lengths, boundaries, causal, scale)
    call.arguments.output = call.write(output)
    call.arguments.statistics = call.address(statistics)
    call.run("forward")
    return output, statistics


@_forward.register_fake
def _(queries: list[Tensor], keys: list[Tensor], value: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return _empty_results(value)


@torch.library.custom_op("polyscale::hkt_attention_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad_output: Tensor,
    queries: list[Tensor],
    keys: list[Tensor],
    value: Tensor,
    weights: Tensor,
    lengths: Tensor | None,
    boundaries: Tensor | None,
    output: Tensor,
    statistics: Tensor,
    causal: bool,
    scale: float,
) -> list[Tensor]:
    """Gradients of the queries, the keys, the value and the weights, in this order."""
    gradients = _empty_gradients(queries, keys, value, weights)
    levels = len(queries)
    call = Call(queries, keys, value, weights, lengths, boundaries, causal, scale)
    call.set_gradients(gradients[:levels], gradients[levels:-2], gradients[-2], gradients[-1])
    call.set_results(output, statistics, grad_output.to(value.dtype))
    call.run("backward")
    return [gradient.to(value.dtype) for gradient in gradients[:-1]] + gradients[-1:]


@_backward.register_fake
def _(
    grad_output: Tensor,
    queries: list[Tensor],
    keys: list[Tensor],
    value: Tensor,
    weights: Tensor,
    *_: Any,
) -> list[Tensor]:
    gradients = _empty_gradients(queries, keys, value, weights)
    return [gradient.to(value.dtype) for gradient in gradients[:-1]] + gradients[-1:]


def _empty_results(value: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, length, width = value.shape
    # The heads of a token are contiguous, as the projection after the attention reads them.
    output = value.new_empty(batch, length, heads, width).transpose(1, 2)
    return output, value.new_empty(3, batch, heads, length, dtype=torch.float32)


def _empty_gradients(
    queries: list[Tensor], keys: list[Tensor], value: Tensor, weights: Tensor
) -> list[Tensor]:
    """Sums are taken in float32 whatever the inputs are."""
    gradients = [_empty_gradient(x) for x in (*queries, *keys, value)]
    return [*gradients, torch.empty(weights.shape, dtype=torch.float32, device=weights.device)]


def _empty_gradient(x: Tensor) -> Tensor:
    """With the strides of the input if its channels are contiguous, as the kernel writes them."""
    like = torch.empty_like(x, dtype=torch.float32)
    if has_contiguous_channels(like):
        return like
    return torch.empty(x.shape, dtype=torch.float32, device=x.device)


def _setup_context(ctx: torch.autograd.function.FunctionCtx, inputs: tuple, output: tuple) -> None:
    queries, keys, value, weights, lengths, boundaries, causal, scale = inputs
    ctx.levels, ctx.causal, ctx.scale = len(queries), causal, scale  # type: ignore[attr-defined]
    ctx.save_for_backward(*queries, *keys, value, weights, lengths, boundaries, *output)


def _differentiate(
    ctx: torch.autograd.function.FunctionCtx, grad_output: Tensor, _: Tensor | None
) -> tuple:
    refuse_tangents(grad_output)
    levels = ctx.levels  # type: ignore[attr-defined]
    saved = list(ctx.saved_tensors)  # type: ignore[attr-defined]
    queries, keys = saved[:levels], saved[levels : 2 * levels]
    value, weights, lengths, boundaries, output, statistics = saved[2 * levels :]
    gradients = _backward(
        grad_output,
        queries,
        keys,
        value,
        weights,
        lengths,
        boundaries,
        output,
        statistics,
        ctx.causal,  # type: ignore[attr-defined]
        ctx.scale,  # type: ignore[attr-defined]
    )
    return (
        gradients[:levels],
        gradients[levels : 2 * levels],
        *gradients[2 * levels :],
        *[None] * 4,
    )


_forward.register_autograd(_differentiate, setup_context=_setup_context)


def attend_by_reference(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    weights: Tensor,
    lengths: Tensor | None,
    boundaries: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """The same as `_forward` by the reference, with derivatives of every order."""
    packed = None
    if boundaries is not None:
        packed = PackedLayout.from_cu_seqlens(boundaries[0], len(queries))
    mask = AttentionMask(causal, lengths, packed)
    return hkt_attention_reference(queries, keys, value, weights, mask, scale)


def _setup_second(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    grad_output, queries, keys, value, weights, lengths, boundaries, _, _, causal, scale = inputs
    ctx.levels, ctx.options = len(queries), (lengths, boundaries, causal, scale)
    ctx.save_for_backward(grad_output, *queries, *keys, value, weights)


def _differentiate_again(ctx: Any, cotangents: list[Tensor | None]) -> tuple:
    levels = ctx.levels
    grad_output, *inputs = ctx.saved_tensors

    def attend(*given: Tensor) -> Tensor:
        value, weights = given[-2:]
        return attend_by_reference(given[:levels], given[levels:-2], value, weights, *ctx.options)

    # The output and its statistics are functions of the inputs, whose gradients include theirs.
    first, second = differentiate_gradients(attend, inputs, [grad_output], cotangents)
    return first[0], second[:levels], second[levels:-2], *second[-2:], *[None] * 6


_backward.register_autograd(_differentiate_again, setup_context=_setup_second)

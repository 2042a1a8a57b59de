"""The fused kernel on the projections of a layer as they come out of its products.

One tensor holds queries, keys and values of level 0 along its channels, another one those of the
coarser levels, concatenated along the sequence. The gradients are written into tensors of the same
layout, so nothing is split or concatenated in the backward pass.
"""

from typing import Any

import torch
from torch import Tensor

from polyscale.ops.hkt.mask import AttentionMask
from polyscale.ops.hkt.native.library import Call
from polyscale.ops.hkt.native.op import _forward, attend_by_reference, boundaries_of
from polyscale.ops.native.derivatives import differentiate_gradients, refuse_tangents


def split_projections(
    fine: Tensor, coarse: Tensor | None, sizes: list[int], heads: int
) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Views of queries and keys per level, and of the values, `[B, H, T_l, D]` each.

    Args:
        fine: `[B, T, 3 H D]`: queries, keys and values of level 0.
        coarse: `[B, T_1 + T_2 + .., 2 H D]`: queries and keys of the levels above it, or None.
        sizes: `T_1, T_2, ..`.
        heads: H.
    """
    query, key, value = fine.unflatten(-1, (3, heads, -1)).transpose(1, 3).unbind(2)
    if coarse is None:
        return [query], [key], value
    coarse_query, coarse_key = coarse.unflatten(-1, (2, heads, -1)).transpose(1, 3).unbind(2)
    return (
        [query, *coarse_query.split(sizes, dim=2)],
        [key, *coarse_key.split(sizes, dim=2)],
        value,
    )


def hkt_attention_projected(
    fine: Tensor,
    coarse: Tensor | None,
    sizes: list[int],
    weights: Tensor,
    mask: AttentionMask,
    scale: float,
) -> Tensor:
    """The attended values, `[B, H, T, D]`, of tensors that the kernel takes.

    Args:
        fine: as in `split_projections`.
        coarse: likewise.
        sizes: likewise.
        weights: `[H, L]`, the level weights in float32.
        mask: which keys a token may attend to.
        scale: factor of the dot products.
    """
    return _Attend.apply(
        fine, coarse, weights, mask.lengths, boundaries_of(mask), sizes, mask.causal, scale
    )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        fine: Tensor,
        coarse: Tensor | None,
        weights: Tensor,
        lengths: Tensor | None,
        boundaries: Tensor | None,
        sizes: list[int],
        causal: bool,
        scale: float,
    ) -> Tensor:
        parts = split_projections(fine, coarse, sizes, weights.shape[0])
        output, statistics = _forward(*parts, weights, lengths, boundaries, causal, scale)
        ctx.save_for_backward(fine, coarse, weights, lengths, boundaries, output, statistics)
        ctx.sizes, ctx.causal, ctx.scale = sizes, causal, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_tangents(grad_output)
        gradients = _backward(grad_output, *ctx.saved_tensors, ctx.sizes, ctx.causal, ctx.scale)
        coarse = gradients[1] if len(gradients) == 3 else None
        return gradients[0], coarse, gradients[-1], *[None] * 5


@torch.library.custom_op("polyscale::hkt_projected_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad_output: Tensor,
    fine: Tensor,
    coarse: Tensor | None,
    weights: Tensor,
    lengths: Tensor | None,
    boundaries: Tensor | None,
    output: Tensor,
    statistics: Tensor,
    sizes: list[int],
    causal: bool,
    scale: float,
) -> list[Tensor]:
    """Gradients of `fine`, of `coarse` if there is one, and of the weights."""
    gradients = _empty_gradients(fine, coarse, weights)
    grad_coarse = None if coarse is None else gradients[1]
    heads = weights.shape[0]
    call = Call(
        *split_projections(fine, coarse, sizes, heads), weights, lengths, boundaries, causal, scale
    )
    call.set_gradients(*split_projections(gradients[0], grad_coarse, sizes, heads), gradients[-1])
    call.set_results(output, statistics, grad_output.to(fine.dtype))
    call.run("backward")
    return [gradient.to(fine.dtype) for gradient in gradients[:-1]] + gradients[-1:]


@_backward.register_fake
def _(
    grad_output: Tensor, fine: Tensor, coarse: Tensor | None, weights: Tensor, *_: Any
) -> list[Tensor]:
    gradients = _empty_gradients(fine, coarse, weights)
    return [gradient.to(fine.dtype) for gradient in gradients[:-1]] + gradients[-1:]


def _empty_gradients(fine: Tensor, coarse: Tensor | None, weights: Tensor) -> list[Tensor]:
    """Sums are taken in float32 whatever the inputs are."""
    return [
        torch.empty(x.shape, dtype=torch.float32, device=x.device)
        for x in _present(fine, coarse, weights)
    ]


def _present(fine: Tensor, coarse: Tensor | None, weights: Tensor) -> list[Tensor]:
    return [fine, weights] if coarse is None else [fine, coarse, weights]


def _setup_second(ctx: Any, inputs: tuple, output: list[Tensor]) -> None:
    grad_output, fine, coarse, weights, lengths, boundaries, _, _, sizes, causal, scale = inputs
    ctx.sizes, ctx.options = sizes, (lengths, boundaries, causal, scale)
    ctx.save_for_backward(grad_output, *_present(fine, coarse, weights))


def _differentiate_again(ctx: Any, cotangents: list[Tensor | None]) -> tuple:
    grad_output, *inputs = ctx.saved_tensors

    def attend(fine: Tensor, *given: Tensor) -> Tensor:
        *coarse, weights = given
        parts = split_projections(fine, coarse[0] if coarse else None, ctx.sizes, len(weights))
        return attend_by_reference(*parts, weights, *ctx.options)

    first, second = differentiate_gradients(attend, inputs, [grad_output], cotangents)
    coarse = second[1] if len(second) == 3 else None
    sizes: list | None = None if ctx.sizes else []  # torch counts an empty list as one of tensors
    return first[0], second[0], coarse, second[-1], *[None] * 4, sizes, None, None


_backward.register_autograd(_differentiate_again, setup_context=_setup_second)

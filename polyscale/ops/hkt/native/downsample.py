"""Causal downsampling on the CPU, all levels in one pass: a torch operation with its gradients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyscale.ops.hkt.layout import level_length
from polyscale.ops.hkt.native import library
from polyscale.ops.hkt.native.derivatives import (
    differentiate_gradients,
    refuse_tangents,
    transformed,
)
from polyscale.ops.hkt.native.op import why_no_kernel


def takes(x: Tensor, weights: Tensor) -> bool:
    """Whether the kernel can run on these: float32 on the CPU, outside of torch.func."""
    if x.device.type != "cpu" or x.dtype != torch.float32 or weights.dtype != torch.float32:
        return False
    if transformed((x, weights)):
        return False
    return why_no_kernel() is None


def downsample(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """`x` itself, and at every coarse level, one after the other: `[B, T_1 + T_2 + .., C]`.

    `y_l[i] = sum_k weights[l - 1, k] * y_{l - 1}[2 i - k]` with `y_0 = x`, zeros before the start.
    Whoever uses `x`, too, takes the first of the two: gradients of both are added up in one pass.

    Args:
        x: `[B, T, C]`.
        weights: `[L - 1, width, C]`.
    """
    return _Downsample.apply(x, weights)


class _Downsample(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        coarse = _downsample(x, weights)
        ctx.save_for_backward(x, weights, coarse)
        return x.view_as(x), coarse

    @staticmethod
    def backward(ctx: Any, grad_fine: Tensor, grad_coarse: Tensor) -> tuple[Tensor, Tensor]:
        refuse_tangents(grad_fine, grad_coarse)
        return _backward(grad_fine, grad_coarse, *ctx.saved_tensors)


@torch.library.custom_op("polyscale::hkt_downsample", mutates_args=(), device_types="cpu")
def _downsample(x: Tensor, weights: Tensor) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    coarse = _empty_coarse(x, weights)
    library.downsample(x, weights.contiguous(), coarse)
    return coarse


@_downsample.register_fake
def _(x: Tensor, weights: Tensor) -> Tensor:
    return _empty_coarse(x, weights)


def _empty_coarse(x: Tensor, weights: Tensor) -> Tensor:
    batch, length, channels = x.shape
    rows = sum(level_length(length, level + 1) for level in range(weights.shape[0]))
    return x.new_empty(batch, rows, channels)


@torch.library.custom_op("polyscale::hkt_downsample_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad_fine: Tensor, grad_coarse: Tensor, x: Tensor, weights: Tensor, coarse: Tensor
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weights = x.new_empty(x.shape), weights.new_empty(weights.shape)
    x = x if x.stride(-1) == 1 else x.contiguous()
    gradients = (grad_coarse.contiguous(), grad_fine.contiguous(), grad_x, grad_weights)
    library.downsample(x, weights.contiguous(), coarse, gradients)
    return grad_x, grad_weights


@_backward.register_fake
def _(
    grad_fine: Tensor, grad_coarse: Tensor, x: Tensor, weights: Tensor, coarse: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weights.new_empty(weights.shape)


def _downsample_plainly(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """What `downsample` returns, in torch: with derivatives of every order."""
    levels = [x]
    for taps in weights:
        padded = F.pad(levels[-1], (0, 0, len(taps) - 1, 0))
        windows = padded.unfold(1, len(taps), 2)  # [B, T_l, C, width], oldest first
        levels.append((windows * taps.flip(0).t()).sum(-1))
    return x, torch.cat(levels[1:], dim=1)


def _setup_second(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*inputs[:4])


def _differentiate_again(ctx: Any, *cotangents: Tensor | None) -> tuple:
    *grads, x, weights = ctx.saved_tensors
    first, second = differentiate_gradients(_downsample_plainly, [x, weights], grads, cotangents)
    return *first, *second, None


_backward.register_autograd(_differentiate_again, setup_context=_setup_second)

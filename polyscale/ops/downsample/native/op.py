"""Causal downsampling on the CPU, all levels in one pass: a torch operation with its gradients."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polyscale.ops.downsample.native import library
from polyscale.ops.layout import level_length
from polyscale.ops.native.derivatives import differentiate_gradients, refuse_tangents


def downsample_native(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """`x` itself, and at every coarse level, one after the other: `[B, T_1 + T_2 + .., C]`.

    `y_l[i] = sum_k weights[l - 1, k] * y_{l - 1}[2 i - k]` with `y_0 = x`, zeros before the start.

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


@torch.library.custom_op("polyscale::downsample", mutates_args=(), device_types="cpu")
def _downsample(x: Tensor, weights: Tensor) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    coarse = _empty_coarse(x, weights)
    library.forward(x, weights.contiguous(), coarse)
    return coarse


@_downsample.register_fake
def _(x: Tensor, weights: Tensor) -> Tensor:
    return _empty_coarse(x, weights)


def _empty_coarse(x: Tensor, weights: Tensor) -> Tensor:
    batch, length, channels = x.shape
    rows = sum(level_length(length, level + 1) for level in range(weights.shape[0]))
    return x.new_empty(batch, rows, channels)


@torch.library.custom_op("polyscale::downsample_backward", mutates_args=(), device_types="cpu")
def _backward(
    grad_fine: Tensor, grad_coarse: Tensor, x: Tensor, weights: Tensor, coarse: Tensor
) -> tuple[Tensor, Tensor]:
    grad_x, grad_weights = x.new_empty(x.shape), weights.new_empty(weights.shape)
    x = x if x.stride(-1) == 1 else x.contiguous()
    gradients = library.Gradients(
        grad_coarse.contiguous(), grad_fine.contiguous(), grad_x, grad_weights
    )
    library.backward(x, weights.contiguous(), coarse, gradients)
    return grad_x, grad_weights


@_backward.register_fake
def _(
    grad_fine: Tensor, grad_coarse: Tensor, x: Tensor, weights: Tensor, coarse: Tensor
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), weights.new_empty(weights.shape)


def _differentiable(x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The same in plain torch, with derivatives of every order."""
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
    first, second = differentiate_gradients(_differentiable, [x, weights], grads, cotangents)
    return *first, *second, None


_backward.register_autograd(_differentiate_again, setup_context=_setup_second)

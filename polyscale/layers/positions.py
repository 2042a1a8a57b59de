"""Rotary positions."""

import torch
from torch import Tensor


def rotate(x: Tensor, position: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate pairs of channels by angles proportional to the position.

    The dot product of two rotated vectors depends on the difference of their positions only.

    Args:
        x: `[B, .., T, D]`, D even; channel `i` is paired with channel `i + D / 2`.
        position: `[T]` or `[B, T]`.
        base: the slowest pair rotates about `1 / base` times as fast as the fastest.

    Example:
        >>> rotate(torch.ones(1, 1, 1, 2), torch.tensor([0]))
        tensor([[[[1., 1.]]]])
    """
    half = x.shape[-1] // 2
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    frequency = base ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    # (a, b) becomes (a cos - b sin, b cos + a sin): the sign of the sine is in the frequency.
    angle = position.to(dtype)[..., None] * torch.cat((-frequency, frequency))  # [.., T, D]
    if angle.dim() == 3:
        angle = angle.view(-1, *[1] * (x.dim() - 3), *angle.shape[1:])  # [B, 1, .., T, D]
    wide = x.to(dtype)
    rotated = torch.addcmul(wide * angle.cos(), wide.roll(half, -1), angle.sin())
    return rotated.to(x.dtype)

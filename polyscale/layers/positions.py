"""Rotary positions."""

import torch
from torch import Tensor


def rotate(x: Tensor, position: Tensor, base: float = 10_000.0) -> Tensor:
    """Rotate pairs of channels by angles proportional to the position.

    The dot product of two rotated vectors depends on their positions only by the difference.

    Args:
        x: `[B, H, T, D]`, D even; channel `i` is paired with channel `i + D / 2`.
        position: `[T]` or `[B, T]`.
        base: the slowest pair turns about `1 / base` as fast as the fastest.
    """
    half = x.shape[-1] // 2
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    frequency = base ** (-torch.arange(half, device=x.device, dtype=dtype) / half)
    angle = position.to(dtype)[..., None] * frequency  # [T, D / 2] or [B, T, D / 2]
    if angle.dim() == 3:
        angle = angle[:, None]  # [B, 1, T, D / 2]
    cosine, sine = angle.cos(), angle.sin()
    first, second = x[..., :half].to(dtype), x[..., half:].to(dtype)
    rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)
    return rotated.to(x.dtype)

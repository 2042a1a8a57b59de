"""Arithmetic that every operation shares."""

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, otherwise the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def masked_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed keys; exactly zero where there are none, in values and gradients."""
    scores = scores.masked_fill(~allowed, float("-inf"))
    # Minus infinity everywhere has no softmax: NaN where the scores are so, zeros without any key.
    scores = scores.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    return torch.softmax(scores, dim=-1).masked_fill(~allowed, 0.0)

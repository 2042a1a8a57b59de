"""Arithmetic that every operation shares."""

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for half precision, otherwise the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def masked_softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Softmax over the allowed keys; exactly zero where there are none, in values and gradients."""
    lowest = torch.finfo(scores.dtype).min
    attention = torch.softmax(scores.masked_fill(~allowed, lowest), dim=-1)
    return attention.masked_fill(~allowed, 0.0)

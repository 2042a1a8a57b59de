"""Softmax and log-sum-exp that know what an empty row is."""

from __future__ import annotations

import torch
from torch import Tensor


def normalise(logits: Tensor, may_be_empty: bool) -> tuple[Tensor, Tensor]:
    """Return softmax and log-sum-exp over the last dimension.

    A row of minus infinities gets weights of zero and minus infinity, and gradients of zero, where
    `may_be_empty` says that there can be one.
    """
    top = logits.detach().amax(-1, keepdim=True)
    if may_be_empty:
        top = top.masked_fill(top == -torch.inf, 0.0)
    weights = (logits - top).exp()
    total = weights.sum(-1, keepdim=True)
    if not may_be_empty:
        return weights / total, (total.log() + top).squeeze(-1)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    log_sum = (total.log() + top).masked_fill(empty, -torch.inf)
    return weights / total, log_sum.squeeze(-1)


def log_sum(logits: Tensor) -> Tensor:
    """Return log-sum-exp over the last dimension, minus infinity for an empty row."""
    return normalise(logits, may_be_empty=True)[1]

"""Several projections of one input by one matrix product."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def project(x: Tensor, projections: Sequence[nn.Module]) -> Tensor:
    """What the projections make of `[B, T, C]`, side by side along the last axis.

    Example:
        >>> project(torch.randn(1, 5, 8), [nn.Linear(8, 8), nn.Linear(8, 4)]).shape
        torch.Size([1, 5, 12])
    """
    linear = [projection for projection in projections if _is_plain(projection)]
    # For few rows copying the weights side by side would take longer than the products.
    if len(linear) < len(projections) or x.shape[0] * x.shape[1] < 64:
        return torch.cat([projection(x) for projection in projections], dim=-1)
    weight = torch.cat(tuple(projection.weight for projection in linear))
    biases = tuple(projection.bias for projection in linear if projection.bias is not None)
    return F.linear(x, weight, torch.cat(biases) if biases else None)


def _is_plain(projection: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether its weight and bias say everything: no adapter, no hook, nothing quantised."""
    hooks = projection._forward_hooks or projection._forward_pre_hooks
    return type(projection) is nn.Linear and not hooks

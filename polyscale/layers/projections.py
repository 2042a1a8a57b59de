"""Several projections of one input by one matrix product."""

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor, nn

from polyscale.ops.linear.api import linear_together

# For fewer rows, concatenating the weights would take longer than the products.
_MANY_ROWS = 64


def project(x: Tensor, projections: Sequence[nn.Module], impl: str = "auto") -> Tensor:
    """The projections of `[B, T, C]`, concatenated along the last axis.

    Args:
        x: `[B, T, C]`.
        projections: usually linear layers.
        impl: implementation of the product, see `ops.linear`.

    Example:
        >>> project(torch.randn(1, 5, 8), [nn.Linear(8, 8), nn.Linear(8, 4)]).shape
        torch.Size([1, 5, 12])
    """
    return project_together(x, None, projections, 0, impl)[0]


def project_together(
    x: Tensor,
    other: Tensor | None,
    projections: Sequence[nn.Module],
    shared: int,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`project` of `x`, and of another input by the first `shared` of the projections.

    Their gradients are summed in one pass over both inputs.
    """
    plain = [projection for projection in projections if _is_plain(projection)]
    rows = sum(each.shape[0] * each.shape[1] for each in (x, other) if each is not None)
    # A compiled graph serves every number of rows.
    few = not torch.compiler.is_compiling() and rows < _MANY_ROWS
    if len(plain) < len(projections) or few:
        projected = _one_by_one(x, projections)
        return projected, None if other is None else _one_by_one(other, projections[:shared])
    weight = torch.cat(tuple(projection.weight for projection in plain))
    biases = tuple(projection.bias for projection in plain if projection.bias is not None)
    bias = torch.cat(biases) if biases else None
    outputs = sum(projection.out_features for projection in plain[:shared])
    return linear_together(x, other, weight, bias, outputs, impl)


def _one_by_one(x: Tensor, projections: Sequence[nn.Module]) -> Tensor:
    return torch.cat([projection(x) for projection in projections], dim=-1)


def _is_plain(projection: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether its weight and bias define it: no adapter, no hook, nothing quantised."""
    hooks = projection._forward_hooks or projection._forward_pre_hooks
    return type(projection) is nn.Linear and not hooks

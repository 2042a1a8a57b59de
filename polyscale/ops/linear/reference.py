"""Projections, and the gradients of their weights, by torch: the definition."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor


def linear_reference(
    x: Tensor, other: Tensor | None, weight: Tensor, bias: Tensor | None, outputs: int
) -> tuple[Tensor, Tensor | None]:
    """`x` times the weight, and another input times the first `outputs` rows of it."""
    projected = F.linear(x, weight, bias)
    if other is None:
        return projected, None
    return projected, F.linear(other, weight[:outputs], None if bias is None else bias[:outputs])


def weight_gradient_reference(
    inputs: Sequence[Tensor], grads: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """`[O, C]`, the sum of `grad^T x`, and `[O]`, the sum of `grad`.

    Args:
        inputs: one or two, `[.., C]`.
        grads: of the projection of each, `[.., O]`; the second may have the first outputs only.
    """
    first, outputs = grads[0].flatten(0, -2), grads[0].shape[-1]
    weight, bias = first.t() @ inputs[0].flatten(0, -2), first.sum(0)
    for x, grad in zip(inputs[1:], grads[1:], strict=True):
        rows, missing = grad.flatten(0, -2), outputs - grad.shape[-1]
        weight = weight + F.pad(rows.t() @ x.flatten(0, -2), (0, 0, 0, missing))
        bias = bias + F.pad(rows.sum(0), (0, missing))
    return weight, bias

"""Decoding on the CPU as one call of the native kernel."""

from collections.abc import Sequence

import torch
from torch import Tensor

from polyscale.ops.hkt.native.library import Call
from polyscale.ops.hkt.native.op import why_not

# More queries than this are better served by matrix products.
MAX_QUERIES = 16


def takes(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    relative_bias: Sequence[Tensor] | None,
) -> bool:
    """Whether the kernel can decode these: a few queries on the CPU, and no gradient asked for."""
    if queries[0].shape[2] > MAX_QUERIES or torch.compiler.is_compiling():
        return False
    if torch.is_grad_enabled() and any(x.requires_grad for x in (*queries, *keys, value)):
        return False
    return why_not(queries, keys, value, relative_bias) is None


def decode(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    weights: Tensor,
    position: Tensor,
    scale: float,
) -> Tensor:
    """Attention of `queries` `[B, H, Q, D]` at `position` `[B, Q]`: `[B, H, Q, Dv]`.

    Caches are read where they are, coarse keys at their own resolution.
    """
    batch, heads, count, _ = queries[0].shape
    # Heads side by side, as the projection after the attention reads them.
    output = value.new_empty(batch, count, heads, value.shape[3]).transpose(1, 2)
    call = Call(queries, keys, value, weights, None, None, True, scale)
    call.problem.queries = count
    call.problem.positions = call.numbers(position.contiguous())
    call.problem.output = call.write(output)
    call.run("hkt_decode")
    return output

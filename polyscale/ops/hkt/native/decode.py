"""Decoding on the CPU as one call of the native kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyscale.ops.hkt.native import op
from polyscale.ops.hkt.native.library import Call
from polyscale.ops.tracing import has_values

if TYPE_CHECKING:  # it is imported there
    from polyscale.ops.hkt.decode import NewTokens

# More queries than this are faster as matrix products.
MAX_QUERIES = 16


def why_unsupported(tokens: NewTokens) -> str | None:
    """Why the kernel cannot decode these; None if it can."""
    queries, keys, value, level_weights = tokens[:4]
    given = (*queries, *keys, value, level_weights)
    if torch.compiler.is_compiling():
        return "decoding with it cannot be compiled"
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return "decoding with it has no gradients: call it under torch.no_grad()"
    reason = op.why_unsupported(
        queries, keys, value, level_weights, relative_bias=tokens.relative_bias
    )
    if reason is None and not has_values(*given):
        return "it reads memory, which fake tensors and other subclasses need not have"
    return reason


def decode_native(tokens: NewTokens) -> Tensor:
    """As `hkt_decode`. Caches are read in place, coarse keys at their own resolution."""
    queries, keys, value, level_weights, position, scale, _, coarse_scores = tokens
    levels = len(queries)
    batch, heads, count, _ = queries[0].shape
    weights = level_weights.to(torch.float32).expand(heads, -1)  # [H, L]
    # The heads of a token are contiguous, as the projection after the attention reads them.
    output = value.new_empty(batch, count, heads, value.shape[3]).transpose(1, 2)
    call = Call(queries, keys, value, weights, None, None, True, scale)
    call.arguments.queries = count
    call.arguments.positions = call.address(position.contiguous())
    call.arguments.output = call.write(output)
    call.arguments.first_reused = levels
    if coarse_scores is not None:
        if count == 1:
            if coarse_scores.valid:
                call.arguments.first_reused = coarse_scores.gained
            coarse_scores.reserve(keys)
            for level, scores in enumerate(coarse_scores.levels, start=1):
                call.arguments.coarse_scores[level] = call.write(scores)
        coarse_scores.valid = count == 1
    call.run("decode")
    return output

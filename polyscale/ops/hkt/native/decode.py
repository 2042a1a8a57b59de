"""Decoding on the CPU as one call of the native kernel."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from polyscale.ops.hkt.native import op
from polyscale.ops.hkt.native.library import Call
from polyscale.ops.looks import has_numbers

# More queries than this are better served by matrix products.
MAX_QUERIES = 16
WIDEST_VECTOR = 16


def why_not(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    relative_bias: Sequence[Tensor] | None,
) -> str | None:
    """Why the kernel cannot decode these; None if it can."""
    given = (*queries, *keys, value, level_weights)
    if torch.compiler.is_compiling():
        return "decoding with it cannot be compiled"
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return "decoding with it has no gradients: call it under torch.no_grad()"
    reason = op.why_not(queries, keys, value, level_weights, relative_bias)
    if reason is None and not has_numbers(*given):
        return "it reads memory, which fake tensors and other subclasses need not have"
    return reason


class CoarseScores:
    """Scores of the coarse levels, kept from one token to the next.

    A coarse query serves `2**l` tokens, and its scores do, too: so the keys of level `l` are read
    once in `2**l` tokens. Rows of the batch come first and may be moved.
    """

    def __init__(self) -> None:
        self.levels: list[Tensor] = []  # of levels 1 and up, [B, H, 2, room]
        self.known = False  # whether they are those of the last token

    def make_room(self, keys: Sequence[Tensor]) -> None:
        """As many scores for each level above 0 as it has keys, and a vector more."""
        for number, key in enumerate(keys[1:]):
            batch, heads, length = key.shape[:3]
            if number == len(self.levels):
                self.levels.append(key.new_empty(batch, heads, 2, 0, dtype=torch.float32))
            missing = length + WIDEST_VECTOR - self.levels[number].shape[3]
            if missing > 0:
                self.levels[number] = F.pad(self.levels[number], (0, missing + length // 2))


def decode(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    weights: Tensor,
    position: Tensor,
    scale: float,
    kept: CoarseScores | None = None,
    changed: int = 0,
) -> Tensor:
    """Attention of `queries` `[B, H, Q, D]` at `position` `[B, Q]`: `[B, H, Q, Dv]`.

    Caches are read where they are, coarse keys at their own resolution. `kept` holds the coarse
    scores of the last token; `changed` levels have gained an entry since.
    """
    levels = len(queries)
    batch, heads, count, _ = queries[0].shape
    # Heads side by side, as the projection after the attention reads them.
    output = value.new_empty(batch, count, heads, value.shape[3]).transpose(1, 2)
    call = Call(queries, keys, value, weights, None, None, True, scale)
    call.problem.queries = count
    call.problem.positions = call.address(position.contiguous())
    call.problem.output = call.write(output)
    call.problem.known_from = levels
    if kept is not None:
        if count == 1:
            if kept.known:
                call.problem.known_from = changed
            kept.make_room(keys)
            for level, scores in enumerate(kept.levels, start=1):
                call.problem.kept[level] = call.write(scores)
        kept.known = count == 1
    call.run("decode")
    return output

"""What the scores of HKT cost, counted on the running operation."""

import torch
from torch.utils.flop_counter import FlopCounterMode

from polyscale.ops.hkt.layout import level_length
from polyscale.ops.hkt.reference import level_scores


def score_flops(levels: int, length: int, head_dim: int = 8) -> int:
    """FLOPs of the score products of one head, counted while they run (on the meta device)."""
    with FlopCounterMode(display=False) as counter:
        levels_input = [
            torch.empty(1, 1, level_length(length, level), head_dim, device="meta")
            for level in range(levels)
        ]
        level_scores(levels_input, levels_input, scale=1.0)
    return counter.get_total_flops()


def score_flop_ratio(levels: int, length: int) -> float:
    """Score FLOPs of `levels` resolutions over those of standard attention: below 4/3.

    >>> score_flop_ratio(3, 1024)
    1.3125
    """
    return score_flops(levels, length) / score_flops(1, length)

"""What the measured work needs at least, products and bytes, and where its time goes."""

from collections.abc import Callable
from typing import Any

import torch

from polyscale.ops.hkt.cost import score_flop_ratio
from polyscale.ops.hkt.layout import level_length


def attention_flops(shape: tuple[int, int, int, int], grad: bool, levels: int) -> float:
    """What the causal products of `[B, H, T, D]` need: scores at every level, values at one.

    The backward pass takes five products of the same kind for the forward's two: scores again,
    dQ, dK at every level; dV and dP at the fine one.
    """
    batch, heads, length, width = shape
    one = batch * heads * length * length * width  # half of 2 T^2 D: causal
    scores = score_flop_ratio(levels, length)
    return one * (scores + 1) + (one * (3 * scores + 2) if grad else 0)


def step_flops(batch: int, length: int, levels: int) -> float:
    """The matrix products of `compare_training`, forward and backward.

    A token has four projections and an MLP of eight times that size; coarse entries have a query
    and a key.
    """
    return sum(step_flops_by_part(batch, length, levels).values())


def step_flops_by_part(batch: int, length: int, levels: int) -> dict[str, float]:
    """The same, named as the parts of `time_by_part`."""
    width, heads, layers, vocabulary = 256, 4, 2, 259
    coarse = sum(level_length(length, level) for level in range(1, levels))
    square = 2 * batch * width * width
    products = layers * square * (12 * length + 2 * coarse)
    products += 2 * batch * length * width * vocabulary
    shape = (batch, heads, length, width // heads)
    forward = layers * attention_flops(shape, grad=False, levels=levels)
    both = layers * attention_flops(shape, grad=True, levels=levels)
    return {
        "attention forward": forward,
        "attention backward": both - forward,
        "matrix products": 3 * products,
    }


def bytes_per_token(model: Any, context: int) -> int:
    """What a token must read on average: all weights, and the keys of every level and the values.

    The keys of level l are read once in `2**l` tokens; the scores made of them are kept.
    """
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters())
    keys = sum(level_length(context, level) // 2**level for level in range(config.levels))
    scores = level_length(context, 1) if config.levels > 1 else 0
    read = config.hidden_size * (context + keys) + config.num_attention_heads * scores
    return 4 * (weights + config.num_hidden_layers * read)


# Operations by what their time is spent on; the first part of a name that fits decides.
_PARTS = {
    "attention forward": ("polyscale::hkt_attention",),
    "attention backward": ("polyscale::hkt_projected_backward", "polyscale::hkt_backward"),
    "downsampling": ("polyscale::hkt_downsample",),
    "matrix products": ("aten::mm", "aten::addmm", "aten::bmm"),
}


def time_by_part(step: Callable[[], object], rounds: int = 3) -> dict[str, float]:
    """Seconds of one step in attention, downsampling, matrix products and all the rest."""
    activity = torch.profiler.ProfilerActivity.CPU
    best: dict[str, float] = {}
    for _ in range(rounds):
        with torch.profiler.profile(activities=[activity]) as profile:
            step()
        found = dict.fromkeys((*_PARTS, "the rest"), 0.0)
        for event in profile.key_averages():
            names = (part for part, starts in _PARTS.items() if event.key.startswith(starts))
            found[next(names, "the rest")] += event.self_cpu_time_total / 1e6
        if not best or sum(found.values()) < sum(best.values()):
            best = found
    return best

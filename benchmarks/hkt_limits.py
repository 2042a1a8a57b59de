"""Lower bounds of the measured work, in products and bytes, and its time by part."""

from collections.abc import Callable
from typing import Any

import torch

from benchmarks.timing import best_seconds
from polyscale.cost.hkt import score_flop_ratio
from polyscale.ops.hkt.layout import level_length

# The model of `compare_training`.
STEP_WIDTH, STEP_HEADS, STEP_LAYERS = 256, 4, 2
_VOCABULARY = 259


def attention_flops(shape: tuple[int, int, int, int], grad: bool, levels: int) -> float:
    """FLOPs of the causal products of `[B, H, T, D]`: scores at every level, values at one.

    The backward pass has five products for the two of the forward pass: scores, dQ and dK at every
    level; dV and dP at the fine level.
    """
    batch, heads, length, width = shape
    one = batch * heads * length * length * width  # half of 2 T^2 D: causal
    scores = score_flop_ratio(levels, length)
    return one * (scores + 1) + (one * (3 * scores + 2) if grad else 0)


def step_flops(batch: int, length: int, levels: int) -> float:
    """FLOPs of the matrix products of `compare_training`, forward and backward.

    A token has four projections and an MLP of eight times that size; coarse entries have a query
    and a key.
    """
    return sum(step_flops_by_part(batch, length, levels).values())


def step_flops_by_part(batch: int, length: int, levels: int) -> dict[str, float]:
    """The same by the parts of `time_by_part`."""
    square = 2 * batch * STEP_WIDTH * STEP_WIDTH
    products = STEP_LAYERS * square * (12 * length + 2 * _coarse_length(length, levels))
    products += 2 * batch * length * STEP_WIDTH * _VOCABULARY
    shape = (batch, STEP_HEADS, length, STEP_WIDTH // STEP_HEADS)
    forward = STEP_LAYERS * attention_flops(shape, grad=False, levels=levels)
    both = STEP_LAYERS * attention_flops(shape, grad=True, levels=levels)
    return {
        "attention forward": forward,
        "attention backward": both - forward,
        "matrix products": 3 * products,
    }


def downsampling_bytes(batch: int, length: int, levels: int) -> int:
    """Bytes that the downsampling of a step must read and write; its products are negligible.

    Forward: the input, and the coarse levels. Backward: both again with their gradients, and the
    sum of the gradients.
    """
    coarse = _coarse_length(length, levels)
    rows = 4 * length + 3 * coarse if coarse else 0
    return 4 * STEP_LAYERS * batch * rows * STEP_WIDTH


def peak_rates() -> dict[str, float]:
    """GFLOP/s of a large matrix product and GB/s, read and written, of a large copy, here and now.

    Example:
        >>> sorted(peak_rates())
        ['gigabytes_per_second', 'gigaflops']
    """
    a, b, c = (torch.ones(2048, 2048) for _ in range(3))
    x, y = torch.ones(2**24), torch.ones(2**24)
    seconds = best_seconds({"product": lambda: torch.mm(a, b, out=c), "copy": lambda: y.copy_(x)})
    return {
        "gigaflops": 2 * 2048**3 / seconds["product"] / 1e9,
        "gigabytes_per_second": 2 * 4 * 2**24 / seconds["copy"] / 1e9,
    }


def step_limit(
    batch: int, length: int, levels: int, standard_seconds: float, peak: dict[str, float]
) -> float:
    """A lower bound of the ratio to a standard step, with HKT's additions at the peak rates.

    These are its products and its downsampling. Adding coarse scores to fine ones and pooling their
    gradients are not included.
    """
    extra = step_flops(batch, length, levels) - step_flops(batch, length, 1)
    seconds = extra / peak["gigaflops"] / 1e9
    seconds += downsampling_bytes(batch, length, levels) / peak["gigabytes_per_second"] / 1e9
    return 1 + seconds / standard_seconds


def _coarse_length(length: int, levels: int) -> int:
    return sum(level_length(length, level) for level in range(1, levels))


def bytes_per_token(model: Any, context: int) -> int:
    """Bytes that a token must read on average: weights, keys of every level, and values.

    The keys of level l are read once in `2**l` tokens; the scores made of them are kept.
    """
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters())
    keys = sum(level_length(context, level) // 2**level for level in range(config.levels))
    scores = level_length(context, 1) if config.levels > 1 else 0
    read = config.hidden_size * (context + keys) + config.num_attention_heads * scores
    return 4 * (weights + config.num_hidden_layers * read)


# Operations by part of a step; the first part with a matching prefix is used.
_PARTS = {
    "attention forward": ("polyscale::hkt_attention",),
    "attention backward": ("polyscale::hkt_projected_backward", "polyscale::hkt_backward"),
    "downsampling": ("polyscale::hkt_downsample",),
    "matrix products": (
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "mkldnn::_linear_pointwise",
        "polyscale::weight_gradient",
    ),
}


def time_by_part(step: Callable[[], object], rounds: int = 9) -> dict[str, float]:
    """Seconds of a step in attention, downsampling, matrix products and all the rest.

    Each part is the best of all rounds.
    """
    activity = torch.profiler.ProfilerActivity.CPU
    best: dict[str, float] = {}
    for _ in range(rounds):
        with torch.profiler.profile(activities=[activity]) as profile:
            step()
        found = dict.fromkeys((*_PARTS, "the rest"), 0.0)
        for event in profile.key_averages():
            names = (part for part, starts in _PARTS.items() if event.key.startswith(starts))
            found[next(names, "the rest")] += event.self_cpu_time_total / 1e6
        best = {part: min(time, best.get(part, time)) for part, time in found.items()}
    return best

"""Lower bounds of the measured work, in products and bytes, and its time by part."""

from collections.abc import Callable

import torch

from benchmarks.timing import best_seconds
from polyscale.cost import decoder

# The model of `compare_training`.
STEP_WIDTH, STEP_HEADS, STEP_LAYERS = 256, 4, 2
STEP = decoder.DecoderSizes(STEP_WIDTH, STEP_HEADS, STEP_LAYERS, vocabulary=259)


def step_flops(batch: int, length: int, levels: int) -> float:
    """The matrix products of `compare_training`, forward and backward."""
    return sum(step_flops_by_part(batch, length, levels).values())


def step_flops_by_part(batch: int, length: int, levels: int) -> dict[str, float]:
    """The same, named as the parts of `time_by_part`."""
    return decoder.step_flops_by_part(STEP, batch, length, levels)


def downsampling_bytes(batch: int, length: int, levels: int) -> int:
    """What the downsampling of `compare_training` must read and write."""
    return decoder.downsampling_bytes(STEP, batch, length, levels)


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
    """The least ratio to a standard step: its time, and what HKT adds at the machine's peak rates.

    That is its products and its downsampling. Adding coarse scores to fine ones and pooling their
    gradients is not in it.
    """
    extra = step_flops(batch, length, levels) - step_flops(batch, length, 1)
    seconds = extra / peak["gigaflops"] / 1e9
    seconds += downsampling_bytes(batch, length, levels) / peak["gigabytes_per_second"] / 1e9
    return 1 + seconds / standard_seconds


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

"""What a step and a generated token of an HKT decoder cost, by formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from polyscale.cost.hkt import score_flop_ratio
from polyscale.ops.layout import level_length


@dataclass(frozen=True)
class DecoderSizes:
    """The sizes that decide what a decoder costs; its MLP has four times the width."""

    width: int
    heads: int
    layers: int
    vocabulary: int


def causal_attention_flops(
    shape: tuple[int, int, int, int], levels: int, *, backward: bool = False
) -> float:
    """What the causal products of `[B, H, T, D]` need: scores at every level, values at one.

    The backward pass takes five products of the same kind for the forward's two: scores again,
    dQ, dK at every level; dV and dP at the fine one. `backward` adds them.

    >>> causal_attention_flops((1, 1, 4, 1), levels=1)
    32.0
    """
    batch, heads, length, width = shape
    one = batch * heads * length * length * width  # half of 2 T^2 D: causal
    scores = score_flop_ratio(levels, length)
    return one * (scores + 1) + (one * (3 * scores + 2) if backward else 0)


def step_flops_by_part(
    sizes: DecoderSizes, batch: int, length: int, levels: int
) -> dict[str, float]:
    """The matrix products of a training step: attention forward, attention backward, all others.

    A token has four projections and an MLP of eight times that size; coarse entries have a query
    and a key.

    >>> sizes = DecoderSizes(width=8, heads=2, layers=1, vocabulary=10)
    >>> step_flops_by_part(sizes, batch=1, length=4, levels=1)["matrix products"]
    20352
    """
    square = 2 * batch * sizes.width * sizes.width
    products = sizes.layers * square * (12 * length + 2 * coarse_length(length, levels))
    products += 2 * batch * length * sizes.width * sizes.vocabulary
    shape = (batch, sizes.heads, length, sizes.width // sizes.heads)
    forward = sizes.layers * causal_attention_flops(shape, levels)
    both = sizes.layers * causal_attention_flops(shape, levels, backward=True)
    return {
        "attention forward": forward,
        "attention backward": both - forward,
        "matrix products": 3 * products,
    }


def downsampling_bytes(sizes: DecoderSizes, batch: int, length: int, levels: int) -> int:
    """What the downsampling of a training step must read and write in float32.

    Forward: the input, and the coarse levels. Backward: both again with their gradients, and the
    sum of the gradients. Its few products cost nothing beside that.

    >>> sizes = DecoderSizes(width=8, heads=2, layers=1, vocabulary=10)
    >>> downsampling_bytes(sizes, batch=1, length=4, levels=2)
    704
    """
    coarse = coarse_length(length, levels)
    rows = 4 * length + 3 * coarse if coarse else 0
    return 4 * sizes.layers * batch * rows * sizes.width


def bytes_per_token(model: Any, context: int) -> int:
    """What generating a token must read on average: all weights, the keys of every level, values.

    The keys of level l are read once in `2**l` tokens; the scores made of them are kept.
    """
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters())
    keys = sum(level_length(context, level) // 2**level for level in range(config.levels))
    scores = level_length(context, 1) if config.levels > 1 else 0
    read = config.hidden_size * (context + keys) + config.num_attention_heads * scores
    return 4 * (weights + config.num_hidden_layers * read)


def coarse_length(length: int, levels: int) -> int:
    """The entries of all levels but the first.

    >>> coarse_length(8, 3)
    6
    """
    return sum(level_length(length, level) for level in range(1, levels))

"""Causal filters over time by torch: the definition.

`y[i] = sum_k W[k] x[stride * i - k]`; what precedes the start counts as zero. So `y[i]` sees
nothing later than `x[stride * i]`. Downsampling is one such filter of stride 2 per level.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polyscale.ops.layout import PackedLayout
from polyscale.ops.rows import gather_rows


class FilterTaps(NamedTuple):
    """The taps of one filter, the newest first."""

    width: int
    weight: Tensor | None  # [width, C] or [width, C in, C out]; None: 1 / width each


def downsample_reference(
    x: Tensor, filters: Sequence[FilterTaps], packed: PackedLayout | None = None
) -> tuple[Tensor, Tensor]:
    """`x` itself, and at every coarse level, one after the other: `[B, T_1 + T_2 + .., C]`."""
    levels = [x]
    for level, taps in enumerate(filters):
        if packed is None:
            levels.append(filter_sequence(levels[-1], taps, 2))
        else:
            sequence, number = packed.level_position(level + 1)
            index = packed.level_starts[level][sequence] + 2 * number
            levels.append(filter_at(levels[-1], taps, index[None], 2 * number[None]))
    return x, torch.cat(levels[1:], dim=1)


def filter_sequence(x: Tensor, taps: FilterTaps, stride: int) -> Tensor:
    """Filter whole sequences that start at column 0: `[B, ceil(T / stride), C]`."""
    history = taps.width - 1
    padded = F.pad(x, (0, 0, history, 0))
    return filter_slide(padded, taps, stride, history, -(-x.shape[1] // stride))


def filter_slide(x: Tensor, taps: FilterTaps, stride: int, first: int, count: int) -> Tensor:
    """Filter where the newest taps are `x[:, first + stride * i]` for `i < count`.

    `first` is at least `width - 1`, so that the older taps exist as well.
    """
    reach = stride * (count - 1) + 1 if count else 0
    newest = range(first, first - taps.width, -1)
    return _weighted_sum([x[:, start : start + reach : stride] for start in newest], taps)


def filter_at(x: Tensor, taps: FilterTaps, index: Tensor, position: Tensor | None = None) -> Tensor:
    """Filter where the newest tap is `x[b, index[b, n]]`: `[B, N, C]`.

    `position` is the position of that tap in its own sequence, so that taps before the sequence
    count as zero.
    """
    rows = []
    for tap in range(taps.width):
        row = gather_rows(x, (index - tap).clamp(min=0))
        if position is not None and tap > 0:
            row = row.masked_fill((position < tap)[..., None], 0.0)
        rows.append(row)
    return _weighted_sum(rows, taps)


def _weighted_sum(rows: list[Tensor], taps: FilterTaps) -> Tensor:
    weight = taps.weight
    if weight is None:
        return torch.stack(rows).mean(0)
    if weight.dim() == 3:
        return torch.matmul(torch.cat(rows, dim=-1), weight.flatten(0, 1))
    total = rows[0] * weight[0]
    for row, tap in zip(rows[1:], weight[1:], strict=True):
        total = torch.addcmul(total, row, tap)
    return total

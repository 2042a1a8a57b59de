"""How an HKT layer goes on after what its cache has seen.

Rows that hold equally many tokens go on together: which levels gain an entry is then known without
looking at a tensor. Rows of different lengths (padded prompts) take the general way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polyscale.layers.hkt_cache import HKTCache
from polyscale.layers.projections import project
from polyscale.ops.hkt.decode import hkt_decode

if TYPE_CHECKING:
    from polyscale.layers.hkt import HKTAttention, Levels


def start_cache(
    layer: HKTAttention,
    cache: HKTCache,
    x: Tensor,
    inputs: list[Tensor],
    levels: Levels,
    value: Tensor,
    lengths: Tensor | None,
) -> None:
    """Remember a whole prompt `[B, T, C]`: its levels' inputs and what was made of them."""
    count = _all_of(x) if lengths is None else lengths
    cache.together = lengths is None
    cache.write(levels.keys, value, count)
    cache.tails = layer.hierarchy.tail(x, inputs, count)
    for level in range(1, layer.levels):
        newest = cache.seen(level) - 1
        kept = [levels.queries[level], *levels.values[level : level + 1]]
        cache.current.append([_pick(entry, newest[:, None]) for entry in kept])


def continue_together(layer: HKTAttention, x: Tensor, cache: HKTCache) -> Tensor:
    """Attention of new tokens over the cache and themselves, `[B, H, Q, D]`."""
    batch, length = x.shape[:2]
    seen = cache.columns
    entries, tails = layer.hierarchy.advance(x, cache.tails, seen)
    opened = [cache.opened(level) for level in range(layer.levels)]
    positions = [
        torch.arange(opened[level] << level, (opened[level] + new.shape[1]) << level, 1 << level)
        for level, new in enumerate(entries)
    ]
    positions = [position.to(x.device) for position in positions]
    levels = _project(layer, entries, positions)
    queries, values = levels.queries[:1], levels.values[:1]
    for level in range(1, layer.levels):
        kept = cache.current[level - 1]
        if level < len(entries):
            fresh = [levels.queries[level], *([levels.values[level]] if kept[1:] else [])]
            cache.current[level - 1] = [entry[:, :, -1:] for entry in fresh]
            if length > 1:
                # The block of the first new tokens may have been opened by an earlier call.
                block = (positions[0] >> level) - (opened[level] - 1)
                both = [torch.cat(pair, dim=2) for pair in zip(kept, fresh, strict=True)]
                fresh = [entry[:, :, block] for entry in both]
        else:
            fresh = [entry.expand(-1, -1, length, -1) for entry in kept]
        queries.append(fresh[0])
        values += fresh[1:]
    cache.write_together(levels.keys, layer.merge_values(values))
    cache.tails = tails
    return _attend(layer, queries, cache, positions[0].expand(batch, -1), changed=len(entries))


def continue_ragged(
    layer: HKTAttention, x: Tensor, cache: HKTCache, lengths: Tensor | None
) -> Tensor:
    """The same for rows that hold different numbers of tokens, or gain different numbers."""
    assert cache.lengths is not None
    count = _all_of(x) if lengths is None else lengths
    inputs, numbers, tails = layer.hierarchy.extend(x, cache.tails, cache.lengths, count)
    levels = _project(layer, inputs, [number << level for level, number in enumerate(numbers)])
    position = numbers[0]  # [B, Q]
    queries, values = levels.queries[:1], levels.values[:1]
    current: list[list[Tensor]] = []
    for level in range(1, layer.levels):
        # The block a new token lies in may have been opened by an earlier call.
        index = (position >> level) - (cache.seen(level)[:, None] - 1)
        total = (cache.lengths + count + (2**level - 1)) >> level
        newest = (total - cache.seen(level))[:, None]
        kept = cache.current[level - 1]
        fresh = [levels.queries[level], *([levels.values[level]] if kept[1:] else [])]
        both = [torch.cat(pair, dim=2) for pair in zip(kept, fresh, strict=True)]
        current.append([_pick(entry, newest) for entry in both])
        index = index.clamp(max=both[0].shape[2] - 1)
        queries.append(_pick(both[0], index))
        values += [_pick(entry, index) for entry in both[1:]]
    cache.together = False
    cache.write(levels.keys, layer.merge_values(values), count)
    cache.tails, cache.current = tails, current
    real = torch.arange(x.shape[1], device=x.device) < count[:, None]
    return _attend(layer, queries, cache, torch.where(real, position, -1))


def _project(layer: HKTAttention, inputs: list[Tensor], positions: list[Tensor]) -> Levels:
    """All projections of a few rows per level: one product each, unless levels have their own."""
    sizes = [x.shape[1] for x in inputs]
    if layer.shared_projections:
        every = inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=1)
        projected = project(every, layer.projections(0, values=True), layer.fused)
    else:
        made = [
            project(x, layer.projections(level, True), layer.fused)
            for level, x in enumerate(inputs)
        ]
        projected = torch.cat(made, dim=1)
    return layer.split(projected, sizes, positions)


def _attend(
    layer: HKTAttention,
    queries: list[Tensor],
    cache: HKTCache,
    position: Tensor,
    changed: int | None = None,
) -> Tensor:
    keys, value = cache.filled()
    return hkt_decode(
        queries,
        keys,
        value,
        layer.level_weights,
        position=position,
        scale=layer.head_dim**-0.5,
        relative_bias=list(layer.relative_bias) or None,
        kept=None if changed is None else cache.scores,
        changed=changed or 0,
        impl=layer.impl,
    )


def _all_of(x: Tensor) -> Tensor:
    return torch.full((x.shape[0],), x.shape[1], device=x.device)


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """`x[b, :, index[b, n]]` for `[B, H, T, D]` and `[B, N]`; an index of -1 takes the first."""
    index = index.clamp(min=0)[:, None, :, None]
    return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))

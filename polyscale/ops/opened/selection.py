"""The choice on any device in memory linear in N: the reference's, some query blocks at a time."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from polyscale.ops.opened.places import Places
from polyscale.ops.opened.reference import Choice, choose
from polyscale.ops.opened.settings import Settings

QUERIES_AT_ONCE = 1024


@torch.no_grad()
def choose_in_parts(query: Tensor, key: Tensor, places: Places, settings: Settings) -> Choice:
    """What `choose` finds. A prompt in parts that start at query blocks is the whole prompt.

    Padded and packed rows are chosen for at once.
    """
    queries, keys = query.shape[2], key.shape[2]
    step = max(settings.block, QUERIES_AT_ONCE // settings.block * settings.block)
    if places.has_padding or places.boundaries is not None or queries <= step:
        return choose(query, key, places, settings)
    # In strict mode a group looks back at the samples of the groups before it, too.
    back = settings.block - settings.unit
    offset = keys - queries
    parts = []
    for begin in range(offset // step * step, keys, step):
        start, end = max(offset, begin - back), min(begin + step, keys)
        own = Places.of_rows(len(query), end - start, end, None, query.device)
        own = replace(own, sinks=places.sinks[:, :end])
        part = choose(query[:, :, start - offset : end - offset], key[:, :, :end], own, settings)
        parts.append(_without(part, begin, start, end, offset, keys, settings))
    rows, columns, opened = (
        torch.cat([getattr(part, name) for part in parts], dim)
        for name, dim in (("rows", 1), ("columns", 1), ("opened", 2))
    )
    kept, log_sum, kl = (
        torch.cat([getattr(part, name) for part in parts], 2) for name in ("kept", "log_sum", "kl")
    )
    return Choice(opened, rows, columns, kept, log_sum, kl)


def _without(
    part: Choice, begin: int, start: int, end: int, offset: int, keys: int, settings: Settings
) -> Choice:
    """A part without what is another part's, and without what it alone takes for the last row."""
    first = max(begin, offset)
    mine = part.rows[0] >= first
    if not settings.strict and end < keys:
        mine &= (part.rows[0] + 1) % settings.sample == 0
    skipped = first // settings.unit - start // settings.unit
    opened = part.opened[:, :, skipped:]
    room = (keys + settings.key_block - 1) // settings.key_block - opened.shape[3]
    return Choice(
        torch.nn.functional.pad(opened, (0, room)),
        part.rows[:, mine],
        part.columns[:, mine] + start - offset,
        part.kept[..., mine],
        part.log_sum[..., mine],
        part.kl[..., mine],
    )

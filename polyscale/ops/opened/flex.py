"""`impl="flex"`: the choice as a `BlockMask` for torch's compiled `flex_attention`.

Meant for GPUs, where no time has been taken. On a CPU it has no backward pass.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from polyscale.ops.opened.places import Places
from polyscale.ops.opened.reference import Choice, view_of
from polyscale.ops.opened.selection import choose_in_parts
from polyscale.ops.opened.settings import Settings
from polyscale.ops.tracing import has_values

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

TILE = 128  # queries and keys: what flex_attention's kernels are made for


def opened_attention_flex(
    query: Tensor, key: Tensor, value: Tensor, places: Places, settings: Settings
) -> tuple[Tensor, Choice]:
    """The attended values `[B, H, N, Dv]`, and what was chosen and lost."""
    choice = choose_in_parts(query.detach(), key.detach(), places, settings)
    mask = block_mask(choice.opened, query.shape[1], places, settings)
    if places.has_padding:  # which may hold anything, and its own output is zero
        real = places.real[:, None, :, None]
        key, value = key.masked_fill(~real, 0.0), value.masked_fill(~real, 0.0)
    output = _compiled()(
        query,
        key,
        value,
        block_mask=mask,
        scale=settings.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if places.has_padding:
        output = output.masked_fill(~places.of_queries(places.real)[:, None, :, None], 0.0)
    return output, choice


def why_no_flex(
    query: Tensor, key: Tensor, value: Tensor, places: Places, settings: Settings
) -> str | None:
    """Why flex_attention cannot take these arguments; None if it can."""
    if settings.rest == "pool":
        return "it drops the rest, got rest='pool'"
    if not has_values(query, key, value):
        return "it looks at the choice, got tensors without numbers (meta, fake or traced)"
    wants_gradients = any(x.requires_grad for x in (query, key, value))
    if query.device.type == "cpu" and torch.is_grad_enabled() and wants_gradients:
        return "flex_attention has no backward pass on the CPU"
    return None


def block_mask(opened: Tensor, heads: int, places: Places, settings: Settings) -> BlockMask:
    """Which tiles of queries and keys hold a pair that is seen, and which pairs of them are."""
    from torch.nn.attention.flex_attention import BlockMask

    key_block = places.key_blocks(settings)[0].clamp(min=0)
    query_block = places.query_blocks(settings)[0].clamp(min=0)
    key_position, sequence = places.position, places.sequence
    position = places.of_queries(key_position)
    own_sequence = places.of_queries(sequence)
    sinks, group = places.sinks, heads // opened.shape[1]
    # Closed over as tensors: a compiled mask takes these from where it runs.
    unit, near, causal = settings.unit, settings.near, settings.causal
    last_query, last_key = position.shape[1] - 1, key_position.shape[1] - 1

    def seen(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        # Tiles at the end reach beyond the tensors.
        inside = (q <= last_query) & (k <= last_key)
        q, k = q.clamp(max=last_query), k.clamp(max=last_key)
        at, other = position[b, q], key_position[b, k]
        first = at // unit * unit
        close = (other >= first - near) & (other < first + unit + near)
        view = close | sinks[b, k] | opened[b, h // group, query_block[b, q], key_block[b, k]]
        real = (at >= 0) & (other >= 0) & (own_sequence[b, q] == sequence[b, k])
        return view & real & inside & (other <= at) if causal else view & real & inside

    tiles = _tiles(opened, places, settings).repeat_interleave(group, dim=1)  # [B, H, Q', K']
    order = tiles.to(torch.int32).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return BlockMask.from_kv_blocks(
        tiles.sum(-1).to(torch.int32),
        order,
        BLOCK_SIZE=(TILE, TILE),
        mask_mod=seen,
        seq_lengths=(places.queries, key_position.shape[1]),
    )


def _tiles(opened: Tensor, places: Places, settings: Settings) -> Tensor:
    """Tiles with a pair that is seen: bool `[B, Hk, ceil(N / TILE), ceil(M / TILE)]`."""
    view = view_of(opened, places, settings)  # [B, Hk, Q, M]
    block = places.query_blocks(settings)[0].clamp(min=0)
    position, sequence = places.of_queries(places.position), places.of_queries(places.sequence)
    keys = view.shape[3]
    rows = []
    for begin in range(0, places.queries, TILE):  # so that no matrix of all pairs is made
        mine = slice(begin, begin + TILE)
        at = position[:, mine, None]  # [B, TILE, 1]
        visible = (at >= 0) & (sequence[:, mine, None] == places.sequence[:, None])
        visible &= places.position[:, None] >= 0
        if settings.causal:
            visible &= places.position[:, None] <= at
        index = block[:, None, mine, None].expand(-1, view.shape[1], -1, keys)
        pairs = view.gather(2, index) & visible[:, None]
        seen = torch.nn.functional.pad(pairs.any(2), (0, -keys % TILE))
        rows.append(seen.unflatten(-1, (-1, TILE)).any(-1))
    return torch.stack(rows, 2)


@cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)

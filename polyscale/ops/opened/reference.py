"""Opened attention as it is defined: dense, plain, in any floating dtype. This file is the
specification; every other implementation is tested against its values and its gradients.

A query block of `block` positions shares a view. It sees

    itself, the keys near it, the sinks, and its heavy key blocks,

those with the greatest mass: softmax over all keys a row may see, summed over the key block, the
sampled rows of the query block, and the heads that share the key head. A row is softmax over the
keys that are in the view and that it may see; with `rest="pool"` over these and the means of what
is unseen of each key block, weighted by their number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from polyscale.ops.numerics import accumulation_dtype, masked_softmax
from polyscale.ops.opened.places import Places
from polyscale.ops.opened.settings import Settings
from polyscale.ops.tracing import without_autocast


@dataclass(frozen=True)
class Choice:
    """What a selection found."""

    opened: Tensor  # bool [B, Hk, Q, C]: the heavy key blocks of each query block
    rows: Tensor  # [B, R] positions of the sampled rows, -1 where there are fewer
    columns: Tensor  # [B, R] where they stand among the N queries, -1 likewise
    kept: Tensor  # [B, H, R] their softmax mass that the view keeps as single keys
    log_sum: Tensor  # [B, H, R] log Z of softmax over all keys they may see
    kl: Tensor  # [B, H, R] KL(row || softmax), nats


def opened_attention_reference(
    query: Tensor, key: Tensor, value: Tensor, places: Places, settings: Settings
) -> tuple[Tensor, Choice]:
    """The attended values `[B, H, N, Dv]`, and what was chosen and lost."""
    if places.has_padding:  # which may hold anything
        real = places.real[:, None, :, None]
        query = query.masked_fill(~places.of_queries(places.real)[:, None, :, None], 0.0)
        key, value = key.masked_fill(~real, 0.0), value.masked_fill(~real, 0.0)
    with torch.no_grad():
        choice = choose(query, key, places, settings)
    output, log_sum = attend(query, key, value, choice.opened, places, settings)
    return output, with_pooled_kl(choice, log_sum.detach(), settings)


def choose(query: Tensor, key: Tensor, places: Places, settings: Settings) -> Choice:
    """Which key blocks each query block opens, and how much its sampled rows keep."""
    with without_autocast(query.device):
        columns = places.sampled(settings)  # [B, R]
        picked = _take(query, columns, dim=2)
        visible = _take(visible_keys(places, settings), columns, dim=1)  # [B, R, M]
        visible = visible & (columns >= 0)[..., None]
        scores = _scores(picked, key, settings.scale)  # [B, H, R, M]
        probability = masked_softmax(scores, visible[:, None])
        log_sum = _log_sum(scores, visible[:, None])

        chooses = _choosing_rows(columns, places, settings).to(scores.dtype)  # [B, Q, R]
        by_row = probability.unflatten(1, (key.shape[1], -1)).sum(2)  # [B, Hk, R, M]
        mass = torch.einsum("bqr,bhrm->bhqm", chooses, by_row)  # [B, Hk, Q, M]
        seen = seen_keys(places, settings)[:, None]  # [B, 1, Q, M]
        block_mass = _sum_blocks(mass, places, settings)  # [B, Hk, Q, C]
        unseen = candidates(places, settings)[:, None].to(scores.dtype)
        has_unseen = _sum_blocks(unseen, places, settings) > 0
        opened = pick(
            block_mass.masked_fill(~has_unseen, 0.0),
            _sum_blocks(mass * ~seen, places, settings),
            (mass * seen).sum(-1),
            mass.sum(-1),
            settings,
        )
        view = view_of(opened, places, settings)  # [B, Hk, Q, M]
        view = view.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        block = _take(places.query_blocks(settings)[0], columns, dim=1)  # [B, R]
        rows_view = _take_rows(view, block.clamp(min=0))  # [B, H, R, M]
        kept = (probability * rows_view).sum(-1)
    rows = _take(places.of_queries(places.position), columns, dim=1)
    rows = torch.where(columns >= 0, rows, -1)
    kl = -kept.clamp(max=1.0).log()
    there = (columns >= 0)[:, None]
    return Choice(opened, rows, columns, kept, log_sum, torch.where(there, kl, 0.0))


def pick(mass: Tensor, unseen: Tensor, seen: Tensor, total: Tensor, settings: Settings) -> Tensor:
    """Which blocks are heavy, bool `[..., C]`: by number, or as few as keep the share.

    Args:
        mass: `[..., C]` of each block, 0 if it cannot be chosen.
        unseen: `[..., C]` what opening it would add.
        seen: `[...]` what is seen anyway.
        total: `[...]`.
        settings: `heavy` or `mass`.
    """
    count = mass.shape[-1]
    # Stable, from the last block to the first: ties go to the later block.
    order = mass.flip(-1).sort(dim=-1, descending=True, stable=True).indices
    order = count - 1 - order
    rank = torch.arange(count, device=mass.device)
    if settings.mass is None:
        taken = (rank < settings.heavy // settings.key_block).expand_as(order)
    else:
        added = unseen.gather(-1, order)
        before = seen[..., None] + added.cumsum(-1) - added  # kept without this block
        taken = before < settings.mass * total[..., None]
    return torch.zeros_like(mass, dtype=torch.bool).scatter(-1, order, taken) & (mass > 0)


def attend(
    query: Tensor, key: Tensor, value: Tensor, opened: Tensor, places: Places, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Softmax over the views: the output `[B, H, N, Dv]` and the log of each row's sum `[B, H, N]`.

    `opened` is a constant; everything else is differentiable.
    """
    with without_autocast(query.device):
        view = view_of(opened, places, settings)  # [B, Hk, Q, M]
        block, _ = places.query_blocks(settings)
        group = query.shape[1] // key.shape[1]
        by_query = _take_rows(view, block.clamp(min=0)).repeat_interleave(group, dim=1)
        allowed = by_query & visible_keys(places, settings)[:, None]  # [B, H, N, M]
        scores = _scores(query, key, settings.scale)
        wide_value = value.to(scores.dtype).repeat_interleave(group, dim=1)
        if settings.rest == "drop":
            output = masked_softmax(scores, allowed) @ wide_value
            return output.to(value.dtype), _log_sum(scores, allowed)

        pooled_key, pooled_value, count = pooled_rest(key, value, view, places, settings)
        # Each query's own block's means: [B, H, N, C, D].
        index = block.clamp(min=0)
        pooled_key, pooled_value, count = (
            _take_rows(x, index).repeat_interleave(group, dim=1)
            for x in (pooled_key, pooled_value, count)
        )
        coarse = torch.einsum("bhnd,bhncd->bhnc", query.to(scores.dtype), pooled_key)
        coarse = coarse * settings.scale + count.clamp(min=1).to(scores.dtype).log()
        real = places.of_queries(places.real)[:, None, :, None]
        joined = torch.cat((scores, coarse), -1)
        allowed = torch.cat((allowed, (count > 0) & real), -1)
        weights = masked_softmax(joined, allowed)
        leaves, nodes = weights.split((scores.shape[-1], coarse.shape[-1]), -1)
        output = leaves @ wide_value + torch.einsum("bhnc,bhncd->bhnd", nodes, pooled_value)
        return output.to(value.dtype), _log_sum(joined, allowed)


def pooled_rest(
    key: Tensor, value: Tensor, view: Tensor, places: Places, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean key and value of what is unseen of each key block, and its number.

    `[B, Hk, Q, C, D]`, `[B, Hk, Q, C, Dv]`, `[B, Hk, Q, C]`; causal: of the key blocks before the
    query block.
    """
    dtype = accumulation_dtype(key.dtype)
    members = _members(places, settings)  # [B, M, C]
    unseen = ~view & _same_sequence(places, settings)[:, None]  # [B, Hk, Q, M]
    if settings.causal:
        end = (places.position // settings.key_block + 1) * settings.key_block  # [B, M]
        before = end[:, None] <= _first_positions(places, settings)[..., None]  # [B, Q, M]
        unseen = unseen & before[:, None]
    parts = unseen[..., None] & members[:, None, None]  # [B, Hk, Q, M, C]
    count = parts.sum(-2)  # [B, Hk, Q, C]
    parts = parts.to(dtype) / count.clamp(min=1)[..., None, :]
    means = [torch.einsum("bhqmc,bhmd->bhqcd", parts, x.to(dtype)) for x in (key, value)]
    return means[0], means[1], count


def with_pooled_kl(choice: Choice, log_sum: Tensor, settings: Settings) -> Choice:
    """The choice with the KL of rows that keep the rest pooled: `log Z` less their own log-sum."""
    if settings.rest == "drop":
        return choice
    there = (choice.columns >= 0)[:, None]
    own = _take(log_sum, choice.columns, dim=2)
    return replace(choice, kl=torch.where(there, choice.log_sum - own, 0.0))


def visible_keys(places: Places, settings: Settings) -> Tensor:
    """What each query may see: bool `[B, N, M]`, its own sequence, up to itself if causal."""
    query = places.of_queries(places.position)[:, :, None]
    key = places.position[:, None, :]
    visible = (query >= 0) & (key >= 0)
    sequence = places.sequence
    visible = visible & (places.of_queries(sequence)[:, :, None] == sequence[:, None, :])
    return visible & (key <= query) if settings.causal else visible


def seen_keys(places: Places, settings: Settings) -> Tensor:
    """What each query block sees whatever is heavy: bool `[B, Q, M]`; later keys not cut off."""
    first = _first_positions(places, settings)[..., None]  # [B, Q, 1]
    end = first + settings.unit
    position = places.position[:, None, :]
    near = (position >= first - settings.near) & (
        position < (end if settings.causal else end + settings.near)
    )
    return (near | places.sinks[:, None, :]) & _same_sequence(places, settings)


def candidates(places: Places, settings: Settings) -> Tensor:
    """Keys that opening would add to a block's view: bool `[B, Q, M]`."""
    unseen = ~seen_keys(places, settings) & _same_sequence(places, settings)
    if settings.causal:
        end = _first_positions(places, settings)[..., None] + settings.unit
        unseen = unseen & (places.position[:, None, :] < end)
    return unseen


def view_of(opened: Tensor, places: Places, settings: Settings) -> Tensor:
    """Everything each query block sees: bool `[B, Hk, Q, M]`; later keys not cut off."""
    number, _ = places.key_blocks(settings)  # [B, M]
    index = number.clamp(min=0)[:, None, None, :].expand(*opened.shape[:3], -1)
    heavy = opened.gather(-1, index) & _same_sequence(places, settings)[:, None]
    return heavy | seen_keys(places, settings)[:, None]


def _first_positions(places: Places, settings: Settings) -> Tensor:
    """The position at which each query block begins: `[B, Q]`; any number if there is none."""
    block, count = places.query_blocks(settings)
    position = places.of_queries(places.position) // settings.unit * settings.unit  # [B, N]
    found = position.new_full((position.shape[0], count), -(1 << 40))
    index = torch.where(block >= 0, block, 0)
    value = torch.where(block >= 0, position, -(1 << 40))
    return found.scatter_reduce(1, index, value, reduce="amax")


def _same_sequence(places: Places, settings: Settings) -> Tensor:
    """Real keys of a query block's sequence: bool `[B, Q, M]`."""
    block, count = places.query_blocks(settings)
    sequence = places.of_queries(places.sequence)
    found = sequence.new_full((sequence.shape[0], count), -1)
    index = torch.where(block >= 0, block, 0)
    value = torch.where(block >= 0, sequence, -1)
    found = found.scatter_reduce(1, index, value, reduce="amax")
    return (found[..., None] == places.sequence[:, None, :]) & places.real[:, None, :]


def _choosing_rows(columns: Tensor, places: Places, settings: Settings) -> Tensor:
    """Which sampled rows choose for a query block: bool `[B, Q, R]`."""
    block, count = places.query_blocks(settings)
    block = torch.where(columns >= 0, _take(block, columns, dim=1), -(1 << 40))  # [B, R]
    sequence = _take(places.of_queries(places.sequence), columns, dim=1)  # [B, R]
    number = torch.arange(count, device=columns.device)[None, :, None]
    if not settings.strict:
        return number == block[:, None, :]
    # A group's own row and those of the groups before it, in the same sequence.
    age = number - block[:, None, :]
    own = places.of_queries(places.sequence)
    index = torch.where(places.query_blocks(settings)[0] >= 0, places.query_blocks(settings)[0], 0)
    of_block = own.new_zeros(own.shape[0], count).scatter_reduce(1, index, own, reduce="amax")
    return (age >= 0) & (age < settings.samples) & (of_block[..., None] == sequence[:, None, :])


def _members(places: Places, settings: Settings) -> Tensor:
    """Which keys make a key block: bool `[B, M, C]`."""
    number, count = places.key_blocks(settings)
    return one_hot(number.clamp(min=0), count).bool() & places.real[..., None]


def _sum_blocks(x: Tensor, places: Places, settings: Settings) -> Tensor:
    """Sums over the keys of each key block: `[B, H, Q, M]` to `[B, H, Q, C]`."""
    number, count = places.key_blocks(settings)
    x = x.masked_fill(~places.real[:, None, None], 0.0)
    index = number.clamp(min=0)[:, None, None].expand_as(x)
    return x.new_zeros(*x.shape[:3], count).scatter_add(-1, index, x)


def _scores(query: Tensor, key: Tensor, scale: float) -> Tensor:
    dtype = accumulation_dtype(query.dtype)
    key = key.to(dtype).repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    return query.to(dtype) @ key.transpose(-2, -1) * scale


def _log_sum(scores: Tensor, allowed: Tensor) -> Tensor:
    """log-sum-exp over the allowed keys; 0 where there are none, so that nothing is infinite."""
    none = ~allowed.any(-1)
    total = scores.masked_fill(~allowed, -torch.inf).masked_fill(none[..., None], 0.0)
    return torch.logsumexp(total, -1).masked_fill(none, 0.0)


def _take(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Entries of `x` `[B, ...]` along `dim` by `index` `[B, R]`; the first where it is negative."""
    index = index.clamp(min=0)
    shape = [1] * x.dim()
    shape[0], shape[dim] = index.shape
    size = list(x.shape)
    size[dim] = index.shape[1]
    return x.gather(dim, index.view(shape).expand(size))


def _take_rows(x: Tensor, index: Tensor) -> Tensor:
    """`x[b, h, index[b, n]]`: `[B, H, Q, ...]` by `[B, N]` to `[B, H, N, ...]`."""
    shape = [index.shape[0], 1, index.shape[1]] + [1] * (x.dim() - 3)
    size = [*x.shape[:2], index.shape[1], *x.shape[3:]]
    return x.gather(2, index.view(shape).expand(size))

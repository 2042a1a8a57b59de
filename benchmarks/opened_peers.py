"""Other ways to choose heavy key blocks, on the same kernel: what is compared is the choice alone.

Each gives a score to every key block of every query block, `[B, Hk, Q, C]`; as many of the best are
opened as by `opened_attention` itself. Dense in the number of query blocks or queries: for
comparison, not for speed. Causal, no padding, block-aligned; queries and keys of one length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from polyscale.ops.opened.fused import attend_to_choice
from polyscale.ops.opened.places import Places, sink_columns
from polyscale.ops.opened.reference import choose
from polyscale.ops.opened.selection import choose_in_parts
from polyscale.ops.opened.settings import Settings, check_settings

Chooser = Callable[[Tensor, Tensor, Settings], Tensor]


def settings_of(width: int, **changes: object) -> Settings:
    """The defaults of `opened_attention`, causal."""
    options: dict = {
        "causal": True,
        "block": 64,
        "key_block": 16,
        "near": 64,
        "heavy": 512,
        "mass": None,
        "sample": 8,
        "rest": "drop",
        "strict": False,
        "scale": width**-0.5,
    }
    return check_settings(**{**options, **changes})


def places_of(query: Tensor, sinks: int = 16) -> Places:
    """Positions of a whole prompt."""
    batch, _, length, _ = query.shape
    places = Places.of_rows(batch, length, length, None, query.device)
    return replace(places, sinks=sink_columns(places, sinks))


def true_mass(query: Tensor, key: Tensor, settings: Settings) -> Tensor:
    """Softmax of all queries: the limit of every way to choose."""
    return _softmax_mass(_exact(query, key, settings), query, key, settings)


def sampled_mass(query: Tensor, key: Tensor, settings: Settings) -> Tensor:
    """Softmax of every `sample`-th query: ours."""
    rows = torch.arange(settings.sample - 1, query.shape[2], settings.sample)
    scores = _exact(query[:, :, rows], key, settings)
    return _softmax_mass(scores, query, key, settings, rows)


def quest_bounds(query: Tensor, key: Tensor, settings: Settings) -> Tensor:
    """Softmax over upper bounds: the largest dot product that a block's minima and maxima allow."""
    blocks = _blocks(key, settings)  # [B, Hk, C, kb, D]
    low, high = (_heads(x, query) for x in (blocks.amin(3), blocks.amax(3)))
    scores = query.clamp(min=0) @ high.mT + query.clamp(max=0) @ low.mT
    return _coarse_mass(scores * settings.scale, query, key, settings)


def pooled_means(query: Tensor, key: Tensor, settings: Settings) -> Tensor:
    """Softmax over mean keys, as MInference's block-sparse heads and MoBA score blocks."""
    means = _heads(_blocks(key, settings).mean(3), query)
    return _coarse_mass(query @ means.mT * settings.scale, query, key, settings)


def antidiagonal_sums(query: Tensor, key: Tensor, settings: Settings, stride: int = 8) -> Tensor:
    """Sums over every antidiagonal of stride 8, softmax over these (XAttention)."""
    length = query.shape[2]
    rows = length // stride
    folded_query = query[:, :, : rows * stride].unflatten(2, (rows, stride)).flip(3).flatten(3)
    folded_key = _heads(key, query)[:, :, : rows * stride].unflatten(2, (rows, stride)).flatten(3)
    scores = folded_query @ folded_key.mT * (settings.scale / stride)
    causal = torch.ones(rows, rows, dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    weights = weights.repeat_interleave(stride, dim=-1) / stride  # to single keys
    weights = torch.nn.functional.pad(weights, (0, length - rows * stride))
    return _sum_up(weights, key, settings, torch.arange(rows) * stride)


CHOOSERS: dict[str, Chooser] = {
    "sampled mass (ours)": sampled_mass,
    "true mass (limit)": true_mass,
    "antidiagonal sums (XAttention)": antidiagonal_sums,
    "pooled means (MInference, MoBA)": pooled_means,
    "min/max bounds (Quest)": quest_bounds,
}


def open_by(chooser: Chooser, query: Tensor, key: Tensor, settings: Settings) -> Tensor:
    """The choice, bool `[B, Hk, Q, C]`: the best blocks that are not seen anyway."""
    scores = chooser(query, key, settings)
    queries, blocks = scores.shape[2:]
    first = torch.arange(queries) * settings.block
    begin = torch.arange(blocks) * settings.key_block
    outside = begin[None] + settings.key_block <= first[:, None] - settings.near
    outside &= begin[None] >= 16  # sinks
    scores = scores.masked_fill(~outside, -torch.inf)
    count = min(settings.heavy // settings.key_block, blocks)
    best = scores.topk(count, -1)
    opened = torch.zeros_like(scores, dtype=torch.bool)
    return opened.scatter(-1, best.indices, best.values > 0)


def kept_by(opened: Tensor, query: Tensor, key: Tensor, settings: Settings) -> Tensor:
    """The softmax mass that each query keeps with a choice, `[B, H, N]`."""
    places = places_of(query)
    value = key[..., :1].contiguous()
    _, own = attend_to_choice(query, key, value, opened, places, settings)
    everything = torch.ones_like(opened)
    _, all_keys = attend_to_choice(query, key, value, everything, places, settings)
    return (own - all_keys).exp().clamp(max=1.0)


def streaming(settings: Settings) -> Settings:
    """Near keys and sinks only, as many as others see in all."""
    return replace(settings, near=settings.near + settings.heavy, heavy=0)


def audit_of(query: Tensor, key: Tensor, settings: Settings) -> Tensor:
    """What `choose` opens: to see that `sampled_mass` here is what the operation does."""
    places = places_of(query)
    if query.shape[2] <= 256:
        return choose(query, key, places, settings).opened
    return choose_in_parts(query, key, places, settings).opened


def _heads(x: Tensor, query: Tensor) -> Tensor:
    return x.repeat_interleave(query.shape[1] // x.shape[1], dim=1)


def _blocks(key: Tensor, settings: Settings) -> Tensor:
    rest = -key.shape[2] % settings.key_block
    last = key[:, :, -1:].expand(-1, -1, rest, -1)  # a short block repeats its last key
    return torch.cat((key, last), 2).unflatten(2, (-1, settings.key_block))


def _exact(query: Tensor, key: Tensor, settings: Settings) -> Tensor:
    return query @ _heads(key, query).mT * settings.scale


def _softmax_mass(
    scores: Tensor, query: Tensor, key: Tensor, settings: Settings, rows: Tensor | None = None
) -> Tensor:
    if rows is None:
        rows = torch.arange(query.shape[2])
    later = torch.arange(key.shape[2]) > rows[:, None]
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return _sum_up(weights, key, settings, rows)


def _coarse_mass(scores: Tensor, query: Tensor, key: Tensor, settings: Settings) -> Tensor:
    """From scores of key blocks `[B, H, N, C]`: softmax over those that begin before the query."""
    rows = torch.arange(query.shape[2])
    later = torch.arange(scores.shape[-1]) * settings.key_block > rows[:, None]
    weights = scores.masked_fill(later, -torch.inf).softmax(-1)
    return _by_query_block(_grouped(weights, key), settings, rows)


def _sum_up(weights: Tensor, key: Tensor, settings: Settings, rows: Tensor) -> Tensor:
    """Weights of single keys, `[B, H, R, N]`, over the key blocks, query blocks and groups."""
    rest = -weights.shape[-1] % settings.key_block
    blocks = torch.nn.functional.pad(weights, (0, rest)).unflatten(-1, (-1, settings.key_block))
    return _by_query_block(_grouped(blocks.sum(-1), key), settings, rows)


def _grouped(weights: Tensor, key: Tensor) -> Tensor:
    return weights.unflatten(1, (key.shape[1], -1)).sum(2)


def _by_query_block(weights: Tensor, settings: Settings, rows: Tensor) -> Tensor:
    block = rows // settings.block
    count = int(block[-1]) + 1
    shape = (*weights.shape[:2], count, weights.shape[3])
    return weights.new_zeros(shape).index_add_(2, block, weights)

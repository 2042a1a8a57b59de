"""Other ways to read prompts and to keep caches, for comparison in quality; none of them is fast.

Prompts: other choices of key blocks (`benchmarks/opened_peers.py`), on opened attention's kernel.
Caches: what decoding sees if the rest is dropped, and caches in fewer bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, QuantizedCache
from transformers.cache_utils import Cache, DynamicLayer
from transformers.masking_utils import sdpa_mask

import polyscale as ps
from benchmarks.opened_peers import CHOOSERS, open_by, places_of, settings_of
from polyscale.ops.opened.audit import Audit
from polyscale.ops.opened.fused import attend_to_choice

NAME = "polyscale_long_context_peer"
PAGE = 16  # keys of which Quest keeps the bounds
AT_ONCE = 128  # tokens after a prompt that go in one call: what quantized caches keep whole


class Peer:
    """An attention function: `how` chooses, `options` say how much.

    `shares` are the shares of query-key pairs computed, one for each layer that read a prompt.
    """

    def __init__(self, how: str, **options: Any) -> None:
        self.how, self.options = how, options
        self.shares: list[float] = []

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
        """Attend `[B, H, N, D]` to `[B, Hk, M, D]`, causal."""
        if query.shape[2] < key.shape[2]:
            return drop(query, key, value, scale, self.how, **self.options)
        if self.how == "opened":
            output, audit = ps.opened_attention(
                query, key, value, causal=True, scale=scale, return_audit=True, **self.options
            )
            self.shares.append(audit.share)
            return output
        settings = settings_of(query.shape[3], scale=scale, **self.options)
        places = places_of(query)
        opened = open_by(CHOOSERS[self.how], query, key, settings)
        empty = torch.empty(0)
        audit = Audit(empty, empty, empty, opened, query.shape[1], places, settings)
        self.shares.append(audit.share)
        return attend_to_choice(query, key, value, opened, places, settings)[0]


def drop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    how: str,
    *,
    near: int = 64,
    sinks: int = 16,
    heavy: int = 0,
) -> Tensor:
    """Attend to near, first and heavy keys and leave the rest out; heads that share keys agree.

    `how`: `"top"` takes the keys of greatest softmax mass, exactly (the limit of every choice of
    single keys); `"pages"` the pages of 16 with the greatest bounds (Quest).

    >>> query, key, value = torch.randn(3, 1, 2, 100, 8)
    >>> drop(query[:, :, -3:], key, value, 0.3, "top", heavy=10).shape
    torch.Size([1, 2, 3, 8])
    """
    queries, keys = query.shape[2], key.shape[2]
    grouped = query.unflatten(1, (key.shape[1], -1))  # [B, Hk, G, N, D]
    scores = grouped @ key[:, :, None].mT * scale
    own = torch.arange(keys - queries, keys)[:, None]
    place = torch.arange(keys)
    scores = scores.masked_fill(place > own, -torch.inf)
    kept = (place > own - near) | (place < sinks)
    kept = kept.expand(*key.shape[:2], -1, -1)
    if heavy and how == "top":
        mass = scores.softmax(-1).sum(2).masked_fill(kept | (place > own), -1.0)
        best = mass.topk(min(heavy, keys), -1)
        kept = kept.scatter(-1, best.indices, best.values >= 0) | kept
    elif heavy:
        kept = kept | _pages(grouped, key, kept, own, heavy // PAGE)
    weights = scores.masked_fill(~kept[:, :, None], -torch.inf).softmax(-1)
    return (weights @ value[:, :, None]).flatten(1, 2)


def _pages(grouped: Tensor, key: Tensor, kept: Tensor, own: Tensor, count: int) -> Tensor:
    """The keys of the pages with the greatest bounds, `[B, Hk, N, M]`, of whole pages not seen."""
    keys = key.shape[2]
    whole = keys // PAGE
    pages = key[:, :, : whole * PAGE].unflatten(2, (whole, PAGE))
    low, high = pages.amin(3)[:, :, None], pages.amax(3)[:, :, None]
    bound = grouped.clamp(min=0) @ high.mT + grouped.clamp(max=0) @ low.mT  # [B, Hk, G, N, P]
    later = torch.arange(whole) * PAGE + PAGE - 1 > own
    seen = kept[..., : whole * PAGE].unflatten(-1, (whole, PAGE)).all(-1)
    bound = bound.amax(2).masked_fill(seen | later, -torch.inf)
    best = bound.topk(min(count, whole), -1)
    chosen = torch.zeros_like(bound, dtype=torch.bool)
    chosen = chosen.scatter(-1, best.indices, best.values > -torch.inf)
    chosen = chosen.repeat_interleave(PAGE, dim=-1)
    return torch.nn.functional.pad(chosen, (0, keys - whole * PAGE))


class RoundedLayer(DynamicLayer):
    """Keys and values rounded to bfloat16, computed with in the dtype of the model."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Add tokens as bfloat16 has them."""
        rounded = [x.bfloat16().to(x.dtype) for x in (key_states, value_states)]
        return super().update(rounded[0], rounded[1], *args, **kwargs)


def peer_cache(kind: str, cache: DynamicCache, config: Any, options: dict[str, Any]) -> Cache:
    """Return a cache of another kind that holds the prompt an ordinary cache holds.

    `"bfloat16"`, or a back end of transformers' `QuantizedCache`.
    """
    if kind == "bfloat16":
        found: Cache = Cache(layers=[RoundedLayer() for _ in cache.layers])
    else:
        found = QuantizedCache(kind, config, **options)
    for number, layer in enumerate(cache.layers):
        found.update(layer.keys, layer.values, number)
    return found


def peer_of(choice: tuple[str, dict[str, Any]] | None) -> Peer | None:
    """Return the attention function of `read_by` or `decoded_by` of a setting."""
    return None if choice is None else Peer(choice[0], **choice[1])


_current: list[Peer] = []


def _forward(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    return _current[-1](query, key, value, scale).transpose(1, 2), None


@contextmanager
def attended_by(model: Any, peer: Peer | None) -> Iterator[None]:
    """The model with a peer's attention in every layer inside the block; causal, no padding."""
    if peer is None:
        yield
        return
    before = model.config._attn_implementation
    _current.append(peer)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        _current.pop()


AttentionInterface.register(NAME, _forward)
AttentionMaskInterface.register(NAME, sdpa_mask)

"""A peer of `LevelCache` on its own kernel: the tokens kept exact are chosen once, for good.

As MiKV chooses: tokens that the prompt's own queries attended to most, summed over them and over
the heads that share keys, stay exact; the rest is in few bits, and nothing is dropped. What differs
from a `LevelCache` is thus the choice alone: by the prompt, not by every query.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

import polyscale as ps
from polyscale.inject import injected_layers
from polyscale.inject.level_layer import LevelLayer

NAME = "polyscale_accumulating"
CHUNK = 256  # queries whose scores are held at once

_masses: list[dict[int, Tensor]] = []


def accumulated_attention(
    model: Any, ids: Tensor, chunk: int = CHUNK
) -> tuple[DynamicCache, list[Tensor]]:
    """Read a prompt `[B, N]` without padding; return its cache and what each token attracted.

    That is `[B, Hk, N]` for each layer: softmax weights summed over all queries and over the heads
    that share keys.
    """
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), _accumulating(model) as found:
        for part in ids.split(chunk, 1):
            model(part, past_key_values=cache, logits_to_keep=1)
    return cache, [found[number] for number in sorted(found)]


def accumulated_cache(
    model: Any,
    ids: Tensor,
    cache: DynamicCache | None = None,
    masses: list[Tensor] | None = None,
    *,
    heavy: int = 64,
    sinks: int = 16,
    **options: Any,
) -> ps.LevelCache:
    """Return the cache of a prompt `[B, N]`, for a model with `inject_opened`, with a fixed choice.

    A token's place in a store does not matter to those that come later, and the first `sinks` of a
    store are always read exactly: so the first tokens stand there, then the `heavy` that were
    attended to most by each head of keys, then the rest in order. The near ones are exact as ever.

    Args:
        model: that read the prompt, not injected yet.
        ids: the prompt.
        cache: what softmax attention made of it; None takes what is read here.
        masses: of `accumulated_attention`; None finds them.
        heavy: tokens of each head that stay exact besides near and first ones.
        sinks: first tokens that do.
        options: others of `LevelCache`: `near`, `bits`, `exact`.
    """
    if masses is None:
        read, masses = accumulated_attention(model, ids)
        cache = cache or read
    if cache is None:
        raise ValueError("cache must be the prompt's where masses are given, got None")
    tokens = cache.get_seq_length()
    heavy = max(min(heavy, tokens - sinks), 0)
    found = ps.LevelCache(model.config, sinks=sinks + heavy, heavy=0, dense=0, **options)
    for layer, own, mass in zip(cache.layers, found.layers, masses, strict=True):
        assert isinstance(own, LevelLayer)
        order = chosen_first(mass, heavy, sinks)[..., None]
        key, value = (
            x.gather(2, order.expand(-1, -1, -1, x.shape[3])) for x in (layer.keys, layer.values)
        )
        own.append(key, value)
    return found


def chosen_first(mass: Tensor, heavy: int, sinks: int) -> Tensor:
    """The order of tokens `[B, Hk, N]`: the first ones, those of the greatest mass, the others.

    >>> chosen_first(torch.tensor([[[9.0, 1.0, 3.0, 2.0, 5.0]]]), heavy=2, sinks=1).tolist()
    [[[0, 2, 4, 1, 3]]]
    """
    ranked = mass.clone()
    ranked[..., :sinks] = torch.inf
    kept = ranked.topk(min(sinks + heavy, mass.shape[-1]), -1).indices
    rest = torch.ones_like(mass, dtype=torch.int8).scatter(-1, kept, 0)
    return torch.argsort(rest, dim=-1, stable=True)


@contextmanager
def _accumulating(model: Any) -> Iterator[dict[int, Tensor]]:
    """The model by softmax, taking down what its keys attract in every layer."""
    if injected_layers(model):
        raise ValueError(
            "model must be read by softmax attention, got one with injected layers; "
            "polyscale.restore(model) first"
        )
    before = model.config._attn_implementation
    _masses.append({})
    model.set_attn_implementation(NAME)
    try:
        yield _masses[-1]
    finally:
        model.set_attn_implementation(before)
        _masses.pop()


def _forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    number: Any = module.layer_idx
    queries, keys = query.shape[2], key.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    grouped = query.unflatten(1, (key.shape[1], -1))  # [B, Hk, G, N, D]
    scores = grouped @ key[:, :, None].mT * scale
    later = torch.arange(keys) > torch.arange(keys - queries, keys)[:, None]
    mass = scores.masked_fill(later, -torch.inf).softmax(-1).sum((2, 3))  # [B, Hk, M]
    found = _masses[-1]
    if number in found:
        mass[..., : found[number].shape[-1]] += found[number]
    found[number] = mass
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, scaling=scaling, **kwargs
    )


AttentionInterface.register(NAME, _forward)
AttentionMaskInterface.register(NAME, sdpa_mask)

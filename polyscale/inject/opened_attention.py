"""The attention function of layers with opened attention, under a name of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.utils import output_capturing

from polyscale.inject.level_layer import LevelLayer
from polyscale.inject.masks import read_mask
from polyscale.inject.opened_settings import OpenedSettings
from polyscale.ops.opened import Audit, opened_attention

NAME = "polyscale_opened"
RECORD = "_polyscale_opened"  # attribute of an injected attention module

# Keyword arguments of attention functions that change the attention, and why they are refused.
REFUSED = {
    "softcap": "its scores are soft-capped",
    "s_aux": "it has learned attention sinks (s_aux) in its softmax",
    "position_bias": "it adds a position bias to its scores",
    "head_mask": "head_mask is not supported",
    "cu_seq_lens_q": "packed sequences are not supported; pad them",
    "block_table": "a paged cache is not supported; use generate with its own cache",
    "cache": "a paged cache is not supported; use generate with its own cache",
    "indices": "its attention is sparse by an index of its own",
    "block_indices": "its attention is sparse by an index of its own",
    "key_value_states": "cross-attention is not supported",
    "encoder_hidden_states": "cross-attention is not supported",
}


@dataclass(frozen=True)
class TextRead:
    """One call in which a layer read a text, or the next part of a prompt."""

    layer: int
    queries: int  # of a row, padding included
    keys: int
    rows: int
    causal: bool
    audit: Audit | None  # None if it was read densely


@dataclass
class OpenedLayer:
    """What an injected attention module carries."""

    settings: OpenedSettings
    number: int
    config: PreTrainedConfig  # the module's own, as it was
    causal: bool = True  # False in encoders
    handles: list[Any] = field(default_factory=list)
    warned: bool = False  # that a loss in the serving mode flatters
    exact: bool = False  # for now everything is read densely, over the cache's exact level
    listener: Callable[[TextRead], None] | None = None  # hears of every text that is read


def opened_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    level_layer: LevelLayer | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend `[B, H, N, D]` to `[B, N, H, D]`: opened, from levels, or densely."""
    layer: OpenedLayer | None = getattr(module, RECORD, None)
    if layer is None:
        raise ValueError(
            f'attn_implementation must not be chosen by name if it is "{NAME}"; call '
            "polyscale.inject_opened(model)"
        )
    settings = layer.settings
    queries = query.shape[2]
    past = key.shape[2] - queries if level_layer is None else level_layer.get_seq_length()
    _refuse(layer, kwargs, dropout, is_causal, past + queries)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    decoding = past > 0 and queries <= settings.at_once
    dense = past + queries <= settings.dense
    real, causal = None, layer.causal
    if level_layer is not None or not (decoding or dense):
        sees_back = layer.causal if is_causal is None else is_causal
        mask = read_mask(attention_mask, len(query), queries, past + queries, sees_back)
        causal = mask.causal if queries > 1 else layer.causal
        if layer.causal and not causal:
            raise ValueError(
                f"attention_mask must be causal in layer {layer.number} of a decoder, got one by "
                "which earlier tokens see later ones"
            )
        real = mask.real  # [B, M]
    if level_layer is not None:
        level_layer.append(key, value, real)
        if decoding and not level_layer.is_whole and not layer.exact:
            return level_layer.attend(query, scale).transpose(1, 2), None
        if past:
            key, value = level_layer.exact(query.dtype)
    if decoding or dense or layer.exact:
        if layer.listener is not None and not decoding:
            _tell(layer, query, past + queries, causal, None)
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal
        )
    output = _opened(layer, query, key, value, real, causal, scale)
    return output.transpose(1, 2), None


def _opened(
    layer: OpenedLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """Read a text `[B, H, N, D]` of which `real` `[B, M]` is no padding by opened attention."""
    settings, keys = layer.settings, key.shape[2]
    dtype = value.dtype
    if len({query.dtype, key.dtype, dtype}) > 1:  # autocast leaves rotated queries and keys wide
        wide = torch.promote_types(torch.promote_types(query.dtype, key.dtype), dtype)
        query, key, value = query.to(wide), key.to(wide), value.to(wide)
    # Products are taken in the dtype of the tensors, not in the sixteen bits of autocast.
    with torch.autocast(query.device.type, enabled=False):
        if real is None:
            lengths = torch.full((len(query),), keys, device=query.device)
        else:
            lengths = real.sum(1)
        output, audit = opened_attention(
            query,
            key,
            value,
            causal=causal,
            strict=settings.strict,
            key_padding_mask=None if real is None else ~real,
            scale=scale,
            return_audit=True,
            **settings.reading(lengths),
        )
        if layer.listener is not None:
            _tell(layer, query, keys, causal, audit)
        if settings.ending and not settings.strict:
            output = read_ending(output, query, key, value, real, scale, settings.ending)
    return output.to(dtype)


def _tell(layer: OpenedLayer, query: Tensor, keys: int, causal: bool, audit: Audit | None) -> None:
    assert layer.listener is not None
    rows, _, queries, _ = query.shape
    layer.listener(TextRead(layer.number, queries, keys, rows, causal, audit))


def read_ending(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    scale: float,
    count: int,
) -> Tensor:
    """Return `output` `[B, H, N, Dv]` with the last `count` rows of each text read densely.

    They are few, so that this costs next to nothing, and they matter most: a prompt's question
    stands there, and what follows attends to them more than to any others.
    """
    batch, heads, queries, _ = query.shape
    keys, device = key.shape[2], query.device
    if real is None:
        last = torch.full((batch, 1), keys - 1, device=device)
    else:
        place = torch.arange(keys, device=device)
        last = torch.where(real, place, -1).amax(1, keepdim=True)  # [B, 1]
    count = min(count, queries)
    column = last - torch.arange(count - 1, -1, -1, device=device)  # [B, E] of the keys
    column = column.clamp(min=keys - queries)
    seen = torch.arange(keys, device=device) <= column[..., None]  # [B, E, M]
    if real is not None:
        seen = seen & (real[:, None] | (column[..., None] == torch.arange(keys, device=device)))
    row = (column - (keys - queries))[:, None, :, None]  # [B, 1, E, 1] of the queries
    asked = query.gather(2, row.expand(-1, heads, -1, query.shape[3]))
    exact = F.scaled_dot_product_attention(
        asked, *repeated(key, value, heads), attn_mask=seen[:, None], scale=scale
    )
    if real is not None:  # rows of padding stay zeros
        there = real.gather(1, column)[:, None, :, None]
        exact = exact.masked_fill(~there, 0.0)
    return output.scatter(2, row.expand(-1, heads, -1, output.shape[3]), exact)


def repeated(key: Tensor, value: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return keys and values for every query head."""
    groups = heads // key.shape[1]
    if groups == 1:
        return key, value
    return key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)


def _refuse(
    layer: OpenedLayer,
    kwargs: dict[str, Any],
    dropout: float,
    is_causal: bool | None,
    keys: int,
) -> None:
    where = f"layer {layer.number} cannot be served by opened attention"
    for name, reason in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{where}: {reason}")
    window = kwargs.get("sliding_window")
    if window is not None and keys > window:
        raise ValueError(
            f"{where}: it attends within a sliding window of {window} tokens, got {keys}; leave "
            "it out of layers"
        )
    if layer.causal and is_causal is False:
        raise ValueError(f"{where}: is_causal must be True, got False")
    if dropout > 0:
        raise ValueError(
            f"{where} in training with attention dropout {dropout}: there is no matrix to drop "
            "from; call model.eval(), or set the dropout to 0"
        )
    wanted = kwargs.get("output_attentions")
    if wanted is None:
        wanted = getattr(layer.config, "output_attentions", False)
    collected = output_capturing._active_collector.get()
    if wanted or (collected is not None and "attentions" in collected):
        raise ValueError(
            "output_attentions must be False for a model with opened attention, which has no "
            "matrix of weights; restore(model) first"
        )


AttentionInterface.register(NAME, opened_attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)

"""The attention function that injected layers call, under a name of its own in transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import sdpa_mask
from transformers.utils import output_capturing

from polyscale.inject.hierarchical_cache import WatchedCache, decode, start_cache
from polyscale.inject.layout import Layout, Tokens, find_layout
from polyscale.inject.masks import read_mask
from polyscale.inject.settings import HSASettings
from polyscale.ops.hsa import hsa_attention, hsa_matrix
from polyscale.trees import SignalTree

NAME = "polyscale_hsa"
RECORD = "_polyscale_hsa"  # attribute of an injected attention module

# Keyword arguments of attention functions that change the attention, and why they are refused.
REFUSED = {
    "softcap": "its scores are soft-capped, and HSA pools the scores of a block before any cap",
    "s_aux": "it has learned attention sinks (s_aux) in its softmax, which no leaf stands for",
    "position_bias": "it adds a position bias to its scores, which a pooled key has no value of",
    "head_mask": "head_mask is not supported",
    "cu_seq_lens_q": "packed sequences are not supported: pad them instead",
    "block_table": "a paged cache is not supported: use generate with its own cache",
    "cache": "a paged cache is not supported: use generate with its own cache",
    "indices": "its attention is sparse by an index of its own",
    "block_indices": "its attention is sparse by an index of its own",
    "key_value_states": "cross-attention is not supported: HSA is self-attention",
    "encoder_hidden_states": "cross-attention is not supported: HSA is self-attention",
}


@dataclass(frozen=True)
class Attended:
    """The queries and keys of one call, heads written out."""

    layer: int
    query: Tensor  # [B, H, N, D]
    key: Tensor  # [B, H, N, D]
    real: Tensor | None  # [B, N]
    causal: bool
    scale: float
    tokens: Tokens | None
    groups: int = 1  # query heads per key head, whose keys are repeated


Probe = Callable[[Attended], None]


@dataclass
class InjectedLayer:
    """What an injected attention module carries."""

    settings: HSASettings
    number: int
    config: PreTrainedConfig  # the module's own, as it was
    everywhere: bool = False  # every attention layer of the model is injected
    handles: list[Any] = field(default_factory=list)
    probe: Probe | None = None  # looks at what is attended, for the planner


def hsa_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    hsa_tokens: Tokens | None = None,
    hsa_tree: Any = None,
    hsa_cache: WatchedCache | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """HSA in place of softmax attention: `[B, H, N, D]` to `[B, N, H, D]`, and the weights."""
    layer: InjectedLayer | None = getattr(module, RECORD, None)
    if layer is None:
        raise ValueError(
            f'attn_implementation: "{NAME}" is set by polyscale.inject_hsa(model, ...), which also '
            "says what the hierarchy is; it cannot be chosen by name alone"
        )
    settings = layer.settings
    if hsa_tree is not None:
        if not isinstance(hsa_tree, SignalTree):
            raise TypeError(f"hsa_tree must be a SignalTree, got {type(hsa_tree).__name__}")
        settings = replace(settings, hierarchy=hsa_tree, sinks=(), sink_ids=(), sentence_ends=())
    causal_flag = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    cache = None if hsa_cache is None else hsa_cache.next_state(key, value)
    past = 0 if cache is None else cache.get_seq_length()
    queries, keys = query.shape[2], past + key.shape[2]
    _refuse(layer, kwargs, dropout, queries, key.shape[2], keys)
    mask = read_mask(attention_mask, len(query), queries, keys, bool(causal_flag))
    wants_weights = _wants_weights(layer, kwargs)
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    if cache is not None:
        # One new token sees all before it either way, so its mask does not tell.
        new = queries if mask.real is None else int(mask.real[:, -queries:].sum(1).max())
        if new > 1 and not mask.causal:
            raise ValueError(
                "past_key_values: a layer that is not causal cannot use a cache: earlier tokens "
                "would have to see later ones; pass use_cache=False"
            )
        if past:
            if wants_weights:
                raise ValueError(
                    "output_attentions: the cache keeps blocks, not tokens, so weights on tokens "
                    "are not known while decoding; pass use_cache=False"
                )
            output = decode(settings, cache, query, key, value, mask.real, scale, hsa_tokens)
            return output.transpose(1, 2).contiguous(), None
    causal = mask.causal or cache is not None
    if causal and settings.tie == "blocks":
        raise ValueError(
            f'tie: layer {layer.number} is causal and takes tie="columns"; with tie="blocks" the '
            "rows of a block share the mean of their queries, so later tokens would be seen"
        )
    layout = find_layout(settings, mask.real, query, causal, hsa_tokens)
    if cache is not None:
        start_cache(settings, cache, layout, key, value, hsa_tokens)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    if layer.probe is not None:
        layer.probe(
            Attended(layer.number, query, key, mask.real, causal, scale, hsa_tokens, groups)
        )
    # Products are taken in float32, not in the sixteen bits of autocast.
    with torch.autocast(query.device.type, enabled=False):
        output = attend(settings, layout, query, key, value, causal, scale)
        weights = matrix(settings, layout, query, key, causal, scale) if wants_weights else None
    # As the attention of transformers leaves it: some models view the heads as one dimension.
    return output.transpose(1, 2).contiguous(), weights


def attend(
    settings: HSASettings,
    layout: Layout,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    scale: float,
) -> Tensor:
    """Return the attention `[B, H, N, Dv]` of columns; padding gets zeros."""
    parts, dtype = (query, key, value), value.dtype
    if len({part.dtype for part in parts}) > 1:  # autocast leaves rotated queries and keys wide
        wide = torch.promote_types(torch.promote_types(query.dtype, key.dtype), dtype)
        parts = (query.to(wide), key.to(wide), value.to(wide))
    rows = [layout.to_rows(part) for part in parts]
    output = _hsa(settings, layout, rows, causal, scale)
    if exact_sinks(settings, layout, causal):
        weights = _sink_weights(layout, rows[0], rows[1], scale)
        sinks = (weights @ rows[2].to(weights.dtype)).to(output.dtype)
        output = torch.cat([sinks, output[:, :, layout.sinks :]], 2)
    return layout.to_columns(output).to(dtype)


def matrix(
    settings: HSASettings, layout: Layout, query: Tensor, key: Tensor, causal: bool, scale: float
) -> Tensor:
    """Return the weights `[B, H, N, N]` that `attend` applies; padding has zeros."""
    rows = [layout.to_rows(part) for part in (query, key)]
    weights = _hsa(settings, layout, rows, causal, scale)
    if exact_sinks(settings, layout, causal):
        sinks = _sink_weights(layout, rows[0], rows[1], scale).to(weights.dtype)
        weights = torch.cat([sinks, weights[:, :, layout.sinks :]], 2)
    weights = layout.to_columns(weights)  # [B, H, N, R]
    return layout.to_columns(weights.transpose(2, 3)).transpose(2, 3)


def applied_weights(settings: HSASettings, seen: Attended) -> Tensor:
    """Return the weights `[B, H, N, N]` that a layer with these settings applied to a call."""
    layout = find_layout(settings, seen.real, seen.query, seen.causal, seen.tokens)
    with torch.autocast(seen.query.device.type, enabled=False):
        return matrix(settings, layout, seen.query, seen.key, seen.causal, seen.scale)


def exact_sinks(settings: HSASettings, layout: Layout, causal: bool) -> bool:
    """Whether the rows of sinks are computed without any tie."""
    return not causal and layout.sinks > 0 and settings.sink_queries == "exact"


def _sink_weights(layout: Layout, query: Tensor, key: Tensor, scale: float) -> Tensor:
    """Return the softmax weights `[B, H, S, R]` of the sinks on all rows."""
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    scores = scale * query[:, :, : layout.sinks].to(wide) @ key.to(wide).transpose(2, 3)
    if layout.hidden is not None:
        scores = scores.masked_fill(layout.hidden[:, None, None], torch.finfo(wide).min)
    return F.softmax(scores, dim=-1)


def _hsa(
    settings: HSASettings, layout: Layout, rows: list[Tensor], causal: bool, scale: float
) -> Tensor:
    """Call `hsa_attention`, or `hsa_matrix` if there is no value, on rows `[B, H, R, D]`."""
    hidden = layout.hidden
    batch, _, length, _ = rows[0].shape
    if layout.forest:
        rows = [part.transpose(0, 1).flatten(1, 2) for part in rows]  # [H, B * R, D]
        hidden = None if hidden is None else hidden.flatten()
    options: dict[str, Any] = {"causal": causal, "key_padding_mask": hidden, "scale": scale}
    query, key = rows[:2]
    if len(rows) == 3:
        found = hsa_attention(query, key, rows[2], layout.tree, tie=settings.tie, **options)
    else:
        found = hsa_matrix(query, key, layout.tree, tie=settings.tie, **options)
    if not layout.forest:
        return found
    found = found.unflatten(1, (batch, length)).transpose(0, 1)  # [B, H, R, *]
    if len(rows) == 3:
        return found
    # Trees of a forest do not see each other: of [B, H, R, B * R] each keeps its own part.
    own = found.unflatten(3, (batch, length))
    return torch.stack([own[at, :, :, at] for at in range(batch)])


def _refuse(
    layer: InjectedLayer,
    kwargs: dict[str, Any],
    dropout: float,
    queries: int,
    new_keys: int,
    keys: int,
) -> None:
    where = f"layer {layer.number} cannot be served by HSA"
    for name, reason in REFUSED.items():
        if kwargs.get(name) is not None:
            raise ValueError(f"{where}: {reason}")
    window = kwargs.get("sliding_window")
    if window is not None and keys > window:
        raise ValueError(
            f"{where}: it attends within a sliding window of {window} tokens and got {keys}; HSA "
            "attends to all of them"
        )
    if dropout > 0 and layer.settings.dropout == "refuse":
        raise ValueError(
            f"{where} in training with attention dropout {dropout}: there is no matrix to drop "
            'from; call model.eval(), set the dropout to 0, or inject with dropout="off"'
        )
    if queries != new_keys:
        raise ValueError(
            f"key must have as many tokens as query in layer {layer.number}, {queries}, got "
            f"{new_keys}; cross-attention and caches other than DynamicCache are not supported by "
            "HSA"
        )


def _wants_weights(layer: InjectedLayer, kwargs: dict[str, Any]) -> bool:
    wanted = kwargs.get("output_attentions")
    if wanted is None:
        wanted = getattr(layer.config, "output_attentions", False)
    collected = output_capturing._active_collector.get()
    if not (wanted or (collected is not None and "attentions" in collected)):
        return False
    if not layer.everywhere and layer.config._attn_implementation != "eager":
        raise ValueError(
            "output_attentions: the layers that are not injected use "
            f'"{layer.config._attn_implementation}", which returns no weights, so the tuple would '
            'lack them; call model.set_attn_implementation("eager")'
        )
    return True


AttentionInterface.register(NAME, hsa_attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)

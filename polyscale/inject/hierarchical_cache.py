"""Decoding with injected layers: the cache keeps open windows and pooled closed ones.

An injected layer of a `DynamicCache` remembers the sinks, the tokens of the open window, and one
mean key and value for each closed window that is still seen on its own: for windows (w1, w2, ...)
over N tokens, w1 + w2 + ... + N / (w1 w2 ...) entries in place of N.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicLayer, DynamicSlidingWindowLayer

from polyscale.inject.layout import Layout, Tokens, check_prefix, check_tokens, find_layout
from polyscale.inject.settings import SENTENCES, HSASettings
from polyscale.layers.hsa_cache import HSACache
from polyscale.models.cache_layers import StateLayer
from polyscale.ops.hsa import OpenFamily, hsa_decode
from polyscale.trees import SignalTree
from polyscale.trees.growth import closes_by_tokens, closes_by_windows


class SinkCache(HSACache):
    """The open families of the text, and the sinks before it, which stay leaves for ever."""

    sinks: OpenFamily | None = None

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        super()._change(change)
        if self.sinks is not None:
            self.sinks = OpenFamily(*(change(part) for part in vars(self.sinks).values()))

    @property
    def size(self) -> int:
        """Entries kept per row, sinks and all levels together."""
        return super().size + (0 if self.sinks is None else int(self.sinks.filled.max()))


class HierarchicalLayer(StateLayer[SinkCache]):
    """One injected layer's part of a `DynamicCache`."""

    state_class = SinkCache
    state: SinkCache

    def __init__(self, past: DynamicLayer | None = None) -> None:
        super().__init__()
        # What an ordinary layer had kept, until the first call pools it.
        self.keys: Tensor | None = None if past is None else past.keys
        self.values: Tensor | None = None if past is None else past.values
        self.settings: HSASettings | None = None  # of the layer that filled it
        self.others: list[HierarchicalLayer] = []  # of a module that attends more than once
        self.expected = False  # an injected layer is about to call update

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new tokens alone: the attention function adds them, for it has the mask."""
        if not self.expected:
            raise ValueError(
                "past_key_values: was filled by an injected layer, whose pooled windows a layer "
                "without HSA cannot read; start with an empty cache after restore(model)"
            )
        self.expected = False
        return key_states, value_states

    def get_seq_length(self) -> int:
        """Tokens fed so far, padding included."""
        return self.state.columns if self.keys is None else self.keys.shape[2]

    def reset(self) -> None:
        """Forget everything."""
        super().reset()
        self.keys = self.values = self.settings = None
        self.others = []

    def _plain(self, change: Callable[[Tensor], Tensor]) -> None:
        if self.keys is not None:
            assert self.values is not None
            self.keys, self.values = change(self.keys), change(self.values)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows of the beams that go on."""
        super().reorder_cache(beam_idx)
        for other in self.others:
            other.reorder_cache(beam_idx)
        self._plain(lambda kept: kept.index_select(0, beam_idx.to(kept.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        super().batch_repeat_interleave(repeats)
        for other in self.others:
            other.batch_repeat_interleave(repeats)
        self._plain(lambda kept: kept.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        super().batch_select_indices(indices)
        for other in self.others:
            other.batch_select_indices(indices)
        self._plain(lambda kept: kept[indices])


class WatchedCache(Cache):
    """A cache as one forward pass of an injected module gets it: which layer of it is updated.

    A module may keep its keys in another layer than the one of its number, pass by pass (recurrent
    depth), and may attend more than once to the same keys: each time has a state of its own.
    """

    def __init__(self, cache: Cache) -> None:
        if (
            getattr(cache, "layers", None) is None
        ):  # one for self-attention, one for cross-attention
            raise ValueError(
                f"past_key_values must be a DynamicCache for injected layers, "
                f"got {type(cache).__name__}"
            )
        self._cache = cache
        self._layer: HierarchicalLayer | None = None
        self._new: tuple[Tensor, Tensor] | None = None
        self._past = self._calls = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """As `DynamicCache.update`, with a hierarchical layer in the place of an ordinary one."""
        number: Any = layer_idx
        if number is None:
            raise ValueError("past_key_values: this layer has no number (layer_idx)")
        layer = _own_layer(self._cache, number)
        layer.expected = True
        self._layer, self._past, self._calls = layer, layer.get_seq_length(), 0
        self._new = self._cache.update(key_states, value_states, layer_idx, *args, **kwargs)
        return self._new

    def next_state(self, key: Tensor, value: Tensor) -> HierarchicalLayer:
        """Return the state of the next time that the module attends, to these new tokens."""
        layer = self._layer
        if layer is None or self._new is None or key.shape[2] != self._new[0].shape[2]:
            raise ValueError(
                "past_key_values: this layer attends to other keys than those it has just cached "
                "(of another layer, or not in a cache at all); pass use_cache=False"
            )
        if layer.keys is not None and not (_same(key, self._new[0]) and _same(value, self._new[1])):
            raise ValueError(
                "past_key_values: was filled before the injection, and this layer attends to "
                "something made of its keys and values, not to them; start with an empty cache"
            )
        place, self._calls = self._calls, self._calls + 1
        if place == 0:
            return layer
        if place > len(layer.others):
            layer.others.append(HierarchicalLayer())
        state = layer.others[place - 1]
        if state.get_seq_length() != self._past:
            raise ValueError(
                f"past_key_values: this layer attends for the {place + 1}. time to its keys, of "
                f"which that time has seen {state.get_seq_length()} of {self._past}; pass "
                "use_cache=False"
            )
        return state


def _same(one: Tensor, other: Tensor) -> bool:
    return one is other or (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _own_layer(cache: Cache, number: int) -> HierarchicalLayer:
    layers = cache.layers
    if getattr(cache, "offloading", False):
        raise ValueError("past_key_values must not be offloaded, got offloading=True")
    if cache.layer_class_to_replicate is not None:
        while len(layers) <= number:
            layers.append(cache.layer_class_to_replicate())
    layer = layers[number]
    if isinstance(layer, HierarchicalLayer):
        return layer
    sliding = isinstance(layer, DynamicSlidingWindowLayer)
    if type(layer) is not DynamicLayer and not sliding:
        raise ValueError(
            "past_key_values must be a DynamicCache for injected layers, "
            f"got a {type(cache).__name__} of {type(layer).__name__}"
        )
    if sliding and layer.get_seq_length():
        raise ValueError(
            "past_key_values must be empty at first if it has a sliding window, got one that was "
            "filled before the injection"
        )
    layers[number] = HierarchicalLayer(layer if layer.get_seq_length() else None)
    return layers[number]


def closes_before(settings: HSASettings, position: Tensor, previous: Tensor | None) -> Tensor:
    """Return how many levels close right before tokens at these positions after the sinks."""
    if settings.hierarchy == SENTENCES:
        assert previous is not None
        return closes_by_tokens(previous, [settings.sentence_ends])
    assert isinstance(settings.hierarchy, tuple)
    return closes_by_windows(position, settings.hierarchy)


def start_cache(
    settings: HSASettings,
    cache: HierarchicalLayer,
    layout: Layout,
    key: Tensor,
    value: Tensor,
    tokens: Tokens | None,
) -> None:
    """Fill an empty cache with prompts `[B, H, N, D]`."""
    if isinstance(settings.hierarchy, SignalTree):
        raise ValueError(
            "past_key_values: a given SignalTree does not say how it grows, so it goes without a "
            "cache: pass use_cache=False"
        )
    cache.settings = settings
    batch, columns = len(key), key.shape[2]
    key, value = layout.to_rows(key), layout.to_rows(value)
    filled = torch.ones(batch, key.shape[2], dtype=torch.bool, device=key.device)
    if layout.hidden is not None:
        filled = ~layout.hidden
    state, sinks = cache.state, layout.sinks
    state.sinks = OpenFamily(
        key[:, :, :sinks],
        value[:, :, :sinks],
        torch.ones(batch, 1, sinks, 1, dtype=torch.int64, device=key.device),
        filled[:, :sinks].sum(1),
    )
    lengths = filled[:, sinks:].sum(1)  # [B]
    rest = key.shape[2] - sinks
    if rest:
        previous = None
        if settings.hierarchy == SENTENCES:
            assert tokens is not None
            ids = tokens.ids if layout.index is None else _take_ids(tokens.ids, layout.index)
            ids = ids[:, sinks:]
            previous = torch.cat([torch.full_like(ids[:, :1], -1), ids[:, :-1]], 1)
            newest = ids.gather(1, (lengths - 1).clamp(min=0)[:, None])[:, 0]
            state.last_token = torch.where(lengths > 0, newest, -1)
        position = torch.arange(rest, device=key.device).expand(batch, -1)
        closes = closes_before(settings, position, previous)
        state.start(key[:, :, sinks:], value[:, :, sinks:], closes, lengths)
    else:
        state.families = [OpenFamily.empty(key, value)]
        state.lengths, state.device = lengths, key.device
        if settings.hierarchy == SENTENCES:
            state.last_token = torch.full_like(lengths, -1)
    state.columns = columns


def _take_ids(ids: Tensor, index: Tensor) -> Tensor:
    return ids.gather(1, index.expand(len(ids), -1))


def decode(
    settings: HSASettings,
    cache: HierarchicalLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    real: Tensor | None,
    scale: float,
    tokens: Tokens | None,
) -> Tensor:
    """Return the attention `[B, H, T, D]` of T new tokens, one after the other."""
    if isinstance(settings.hierarchy, SignalTree):
        raise ValueError("past_key_values: a given SignalTree goes without a cache")
    check_prefix(settings)
    batch, _, length, _ = key.shape
    if settings.needs_tokens:
        check_tokens(tokens, batch, length)
    if cache.keys is not None:
        _pool_past(settings, cache, real)
    if cache.settings != settings:
        raise ValueError(
            "past_key_values: was filled by a layer injected with other settings; start with an "
            "empty cache"
        )
    state = cache.state
    state.check_batch(batch)
    new = torch.ones(batch, length, dtype=torch.bool, device=key.device)
    if real is not None:
        new = real[:, -length:]
    outputs = []
    columns = state.columns + length
    for step in range(length):
        now = slice(step, step + 1)
        parts = query[:, :, now], key[:, :, now], value[:, :, now]
        ids = None if tokens is None else tokens.ids[:, step]
        outputs.append(_step(settings, state, *parts, new[:, step], scale, ids))
    state.columns = columns
    output = torch.cat(outputs, 2)
    return output if real is None else output.masked_fill(~new[:, None, :, None], 0.0)


def _pool_past(settings: HSASettings, cache: HierarchicalLayer, real: Tensor | None) -> None:
    """Turn what an ordinary cache layer had kept into open and closed windows."""
    if settings.needs_tokens:
        raise ValueError(
            "past_key_values: was filled before the injection, and sentences cannot be found in "
            "keys and values alone; start with an empty cache"
        )
    assert cache.keys is not None
    assert cache.values is not None
    key, value = cache.keys, cache.values
    past = None if real is None else real[:, : key.shape[2]]
    layout = find_layout(settings, past, key, True, None)
    cache.keys = cache.values = None
    start_cache(settings, cache, layout, key, value, None)


def _step(
    settings: HSASettings,
    state: SinkCache,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    rows: Tensor,
    scale: float,
    ids: Tensor | None,
) -> Tensor:
    """One token in the given rows `[B]`: close what is due, attend, remember."""
    assert state.lengths is not None
    assert state.sinks is not None
    as_sink = rows & (state.sinks.filled < len(settings.sinks))
    as_text = rows & ~as_sink
    closes = closes_before(settings, state.lengths, state.last_token)
    state.step(closes, key, value, as_text)
    families = (state.sinks, *state.families)
    output = hsa_decode(query, key, value, families, scale=scale)
    if bool(as_sink.any()):
        one = torch.ones(len(key), 1, 1, 1, dtype=torch.int64, device=key.device)
        state.sinks = state.sinks.add(key, value, one, as_sink)
    state.add(key, value, as_text)
    if settings.hierarchy == SENTENCES:
        assert ids is not None
        assert state.last_token is not None
        state.last_token = torch.where(as_text, ids, state.last_token)
    return output

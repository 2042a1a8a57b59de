"""One injected layer's part of a cache with levels of precision."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from polyscale.checks import check_integer, check_number
from polyscale.ops.levels import (
    LevelSettings,
    LevelStore,
    exact_level,
    level_attention,
    level_audit,
)

BLOCK = 64  # tokens of a row that are packed together
DENSE = 1024  # up to so many tokens whole keys are as fast


@dataclass(frozen=True)
class LevelOptions:
    """How the layers of a `LevelCache` keep and read their tokens."""

    near: int = 64
    sinks: int = 16
    heavy: int = 64
    mass: float | None = None
    bits: tuple[int, int] = (4, 4)
    exact: str = "model"
    audit_every: int = 0
    dense: int = DENSE
    impl: str = "auto"

    def __post_init__(self) -> None:
        check_integer("near", self.near, least=0)
        check_integer("heavy", self.heavy, least=0)
        check_integer("dense", self.dense, least=0)
        check_integer("audit_every", self.audit_every, least=0, hint="0 is never")
        if self.mass is not None:
            check_number("mass", self.mass, least=0, most=1)
        self.settings()

    def settings(self) -> LevelSettings:
        """Return how the store rounds."""
        return LevelSettings(self.bits, self.exact, self.sinks)

    def opening(self) -> dict[str, Any]:
        """Return what a query opens."""
        return {"near": self.near, "heavy": self.heavy, "mass": self.mass}

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {**asdict(self), "bits": list(self.bits)}


class LevelLayer(CacheLayerMixin):
    """Keys and values of one layer; the attention function fills and reads them.

    They are whole, `keys` and `values` `[B, Hk, columns, D]`, while they are few; then they move
    into a `store` of levels for good.
    """

    is_sliding = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, options: LevelOptions) -> None:
        super().__init__()
        self.options = options
        self.expected = False  # an injected layer is about to call update
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.keys: Tensor | None = None
        self.values: Tensor | None = None
        self.store: LevelStore | None = None
        self.columns = 0  # tokens fed, padding included
        self.real: Tensor | None = None  # [B, columns], None if there is no padding
        self.new: Tensor | None = None  # [B, N] of the last call, likewise
        self.decoded = 0  # tokens of a row
        self.opened = 0.0  # tokens read exactly, summed over the decoded ones that were counted
        self.seen = 0.0  # tokens there were, likewise
        self.counted = 0  # of the decoded ones: all, or with `mass` those that were audited
        self.audits: list[tuple[float, float, int]] = []  # KL, error of the output, rows

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Make an empty store of levels for these keys and values."""
        batch, heads, _, width = key_states.shape
        self.store = LevelStore.empty(
            batch,
            heads,
            width,
            value_states.shape[3],
            settings=self.options.settings(),
            dtype=key_states.dtype,
            device=key_states.device,
        )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the new tokens alone: the attention function adds them, for it has the mask."""
        if not self.expected:
            raise ValueError(
                "past_key_values must be a cache of whole keys for a model that is not injected, "
                "got a LevelCache; call polyscale.inject_opened(model) first, or pass a "
                "DynamicCache"
            )
        self.expected = False
        return key_states, value_states

    def append(self, key: Tensor, value: Tensor, real: Tensor | None = None) -> None:
        """Add tokens `[B, Hk, N, D]`; `real` `[B, columns + N]` is False for padding."""
        batch = self.batch
        if batch not in (None, len(key)):
            raise ValueError(
                f"past_key_values must be a cache of {len(key)} rows, got {batch}; select rows "
                "with batch_select_indices or repeat them"
            )
        past, self.new = self.columns, None
        if real is not None:
            self._check_past(real[:, :past])
            self.new = None if bool(real[:, past:].all()) else real[:, past:]
        elif self.real is not None:
            raise ValueError(
                "attention_mask must mark the padding of the tokens in the cache, got none; pass "
                "the mask of all tokens so far"
            )
        self.columns, self.real = past + key.shape[2], real
        new = self.new
        if self.store is None:
            if self.keys is not None:
                assert self.values is not None
                key = torch.cat([self.keys, key.to(self.keys.dtype)], 2)
                value = torch.cat([self.values, value.to(self.values.dtype)], 2)
            if self.columns <= self.options.dense:
                self.keys, self.values = key, value
                return
            self.keys, self.values, new = None, None, real
            self.lazy_initialization(key, value)
        assert self.store is not None
        key, value = key.to(self.store.dtype), value.to(self.store.dtype)
        self.store.append(key, value, new, impl=self.options.impl)

    @property
    def batch(self) -> int | None:
        """Rows, None before any came."""
        if self.store is not None:
            return self.store.batch
        return None if self.keys is None else len(self.keys)

    @property
    def is_whole(self) -> bool:
        """Whether all keys are whole still, so that they are attended densely."""
        return self.store is None

    def _check_past(self, past: Tensor) -> None:
        same = bool(past.all()) if self.real is None else torch.equal(past, self.real)
        if not same:
            raise ValueError(
                "attention_mask must hide the same tokens as when they came into the cache, got "
                "another padding; start with a new cache"
            )

    def attend(self, query: Tensor, scale: float) -> Tensor:
        """Return the attention `[B, H, N, Dv]` of the N newest columns; padding gets zeros."""
        assert self.store is not None
        order = None
        if self.new is not None:  # a row's queries stand at its end, as its tokens do
            order = torch.argsort(self.new.to(torch.uint8), dim=1, stable=True)[:, None, :, None]
            query = query.gather(2, order.expand_as(query))
        count, every = query.shape[2], self.options.audit_every
        self._count(count)
        options = {**self.options.opening(), "scale": scale}
        query = query.to(self.store.dtype)
        output = level_attention(query, self.store, impl=self.options.impl, **options)
        if every and self.decoded // every > (self.decoded - count) // every:
            self._audit(query, options)
        if order is None:
            return output
        place = order.expand(-1, output.shape[1], -1, output.shape[3])
        output = torch.zeros_like(output).scatter(2, place, output)
        assert self.new is not None
        return output.masked_fill(~self.new[:, None, :, None], 0.0)

    def _count(self, count: int) -> None:
        """Note what the newest tokens read, of a row without padding.

        With `mass` nobody knows before the query is there; the audit counts what it opened.
        """
        options = self.options
        self.decoded += count
        if options.mass is not None:
            return
        for length in range(self.columns - count + 1, self.columns + 1):
            newest = max(length % BLOCK, options.near)
            self.seen += length
            self.opened += min(length, newest + options.sinks + options.heavy)
        self.counted += count

    def _audit(self, query: Tensor, options: dict[str, Any]) -> None:
        """Compare the due rows among the newest with exact attention."""
        assert self.store is not None
        every, count = self.options.audit_every, query.shape[2]
        numbers = range(self.decoded - count + 1, self.decoded + 1)
        due = [at for at, number in enumerate(numbers) if number % every == 0]
        audit = level_audit(query, self.store, **options)
        if self.options.mass is not None:
            self.opened += float(audit.opened[:, :, due].double().mean((0, 1)).sum())
            self.seen += float(audit.seen[:, due].double().mean(0).sum())
            self.counted += len(due)
        there = (audit.seen[:, due] > 0)[:, None].expand(-1, query.shape[1], -1)
        for divergence, error in zip(
            audit.divergence[:, :, due].unbind(2), audit.error[:, :, due].unbind(2), strict=True
        ):
            real = there[:, :, 0]
            self.audits.append(
                (float(divergence[real].sum()), float(error[real].sum()), int(real.sum()))
            )

    def exact(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return all keys and values `[B, Hk, columns, D]` by the exact level; padding is zeros."""
        if self.store is None:
            assert self.keys is not None
            assert self.values is not None
            return self.keys.to(dtype), self.values.to(dtype)
        key, value = exact_level(self.store, dtype)
        if self.real is None:
            return key, value
        place = (self.real.cumsum(1) - 1).clamp(min=0)[:, None, :, None]
        hidden = ~self.real[:, None, :, None]
        parts = []
        for part in (key, value):
            index = place.expand(-1, part.shape[1], -1, part.shape[3])
            parts.append(part.gather(2, index).masked_fill(hidden, 0.0))
        return parts[0], parts[1]

    def get_seq_length(self) -> int:
        """Tokens fed so far, padding included."""
        return self.columns

    def get_max_length(self) -> int:
        """No maximum."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that a mask has, and the first of them."""
        return self.columns + query_length, 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the newest tokens; a negative number says how many."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"tokens_to_remove must be negative, got {tokens_to_remove}; -n removes n tokens"
            )
        kept = max(self.columns + tokens_to_remove, 0)
        if self.real is not None:
            self.real = self.real[:, :kept]
        if self.store is not None:
            self.store.crop(kept if self.real is None else self.real.sum(1))
        elif self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys[:, :, :kept], self.values[:, :, :kept]
        self.columns = kept

    def _select(self, rows: Tensor) -> None:
        if self.store is not None:
            self.store.select(rows)
        elif self.keys is not None and self.values is not None:
            rows = rows.to(self.keys.device)
            self.keys, self.values = self.keys[rows], self.values[rows]
        if self.real is not None:
            self.real = self.real[rows.to(self.real.device)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Take the rows of the beams that go on."""
        self._select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row `repeats` times."""
        if self.batch is not None:
            self._select(torch.arange(self.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows."""
        self._select(indices)

    def offload(self) -> None:
        """Move to the CPU."""
        if self.store is not None:
            self.store = self.store.to("cpu")
        elif self.keys is not None and self.values is not None:
            self.keys, self.values = self.keys.to("cpu"), self.values.to("cpu")

    def prefetch(self) -> None:
        """Do nothing: the layer computes where its tokens are."""

    def bytes(self) -> dict[str, int | None]:
        """Return bytes held, allocated, read for a token of a row, and read for it densely.

        Those read are None where tokens were decoded but nobody counted what they opened.
        """
        if self.store is None:
            if self.keys is None or self.values is None:
                return dict.fromkeys(("held", "allocated", "read", "dense"), 0)
            held = self.keys.nbytes + self.values.nbytes
            read = held // max(len(self.keys), 1)
            return {"held": held, "allocated": held, "read": read, "dense": read}
        store = self.store
        opened = round(self.opened / self.counted) if self.counted else 0
        unknown = self.decoded > 0 and not self.counted
        width = store.width + store.value_width
        return {
            "held": store.bytes_held(),
            "allocated": store.bytes_allocated(),
            "read": None if unknown else store.heads * sum(store.bytes_read(opened).values()),
            "dense": store.heads * store.longest * width * store.dtype.itemsize,
        }

    def state(self) -> dict[str, Tensor]:
        """Return all there is as tensors."""
        found = {} if self.store is None else self.store.state()
        if self.keys is not None and self.values is not None:
            found = {"whole_keys": self.keys.clone(), "whole_values": self.values.clone()}
        if self.real is not None:
            found["real"] = self.real.clone()
        return found

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Take what `state` gave."""
        if not state:
            return
        state = dict(state)
        real = state.pop("real", None)
        if "whole_keys" in state:
            keys, values = state["whole_keys"], state.get("whole_values")
            if values is None or keys.dim() != 4 or keys.shape[:3] != values.shape[:3]:
                raise ValueError("whole_values must stand beside whole_keys, for as many tokens")
            if real is not None and real.shape != keys.shape[::2]:
                raise ValueError("real must mark the padding of all columns of whole_keys")
            self.keys, self.values, tokens = keys, values, keys.shape[2]
        else:
            self.store = LevelStore.from_state(state)
            tokens = self.store.longest
            if real is not None and not torch.equal(real.sum(1), self.store.lengths):
                raise ValueError("real must mark as many tokens of each row as lengths says")
        self.real, self.columns = real, tokens if real is None else real.shape[1]
        self.is_initialized = self.store is not None

"""Attention over a store of levels as it is defined: dense, with no tricks, in any precision."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from polyscale.ops.levels.blocks import coarse_level, exact_level
from polyscale.ops.levels.packing import BLOCK
from polyscale.ops.levels.store import LevelStore
from polyscale.ops.numerics import accumulation_dtype


@dataclass(frozen=True)
class Opening:
    """Which tokens a query reads exactly.

    Args:
        near: so many tokens up to the query's own, besides those that are not packed yet.
        heavy: the tokens with the greatest coarse mass among the rest.
        mass: in place of `heavy`, as few as make this share of the coarse mass with the others.
    """

    near: int = 64
    heavy: int = 64
    mass: float | None = None

    @cached_property
    def numbers(self) -> tuple[int, int, float]:
        """All three, a negative share for none."""
        return self.near, self.heavy, -1.0 if self.mass is None else self.mass


@dataclass(frozen=True)
class Rows:
    """Everything about the rows of attention `[B, Hk, G, Q, T]`; G query heads share a key head."""

    output: Tensor  # [B, H, Q, Dv]
    weights: Tensor
    exact_scores: Tensor  # of all tokens, with -inf where a query does not see
    exact_value: Tensor  # [B, Hk, 1, T, Dv]
    opened: Tensor  # [B, Hk, Q, T] bool


def level_attention_reference(
    query: Tensor,
    store: LevelStore,
    opening: Opening,
    scale: float,
    opened: Tensor | None = None,
) -> Tensor:
    """Attended values `[B, H, Q, Dv]`. `opened` `[B, Hk, Q, T]` takes the choice away."""
    return attention_rows(query, store, opening, scale, opened).output


def attention_rows(
    query: Tensor,
    store: LevelStore,
    opening: Opening,
    scale: float,
    opened: Tensor | None = None,
) -> Rows:
    """The rows of attention and what they are made of."""
    dtype = accumulation_dtype(query.dtype)
    _batch, heads, count, _ = query.shape
    grouped = query.to(dtype).unflatten(1, (store.heads, heads // store.heads))  # [B, Hk, G, Q, D]
    coarse_key, coarse_value = (x.unsqueeze(2) for x in coarse_level(store, dtype))
    exact_key, exact_value = (x.unsqueeze(2) for x in exact_level(store, dtype))
    seen, always = _always_opened(store, opening.near, count)  # [B, 1, Q, T]
    hidden = ~seen[:, :, None]
    coarse = (grouped @ coarse_key.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)
    exact = (grouped @ exact_key.transpose(-1, -2) * scale).masked_fill(hidden, -torch.inf)
    if opened is None:
        mass = _softmax(torch.where(always[:, :, None], exact, coarse)).sum(2)  # [B, Hk, Q, T]
        opened = always | _heaviest(mass, seen & ~always, opening)
    is_open = opened[:, :, None]  # [B, Hk, 1, Q, T]
    weights = _softmax(torch.where(is_open, exact, coarse))
    output = torch.where(is_open, weights, 0.0) @ exact_value
    output = output + torch.where(is_open, 0.0, weights) @ coarse_value
    return Rows(output.flatten(1, 2).to(query.dtype), weights, exact, exact_value, opened)


def query_positions(store: LevelStore, count: int) -> Tensor:
    """Where the newest `count` tokens of each row stand, `[B, Q]`; negative before its first."""
    ahead = torch.arange(count, device=store.lengths.device) - count
    return store.lengths[:, None] + ahead


def _always_opened(store: LevelStore, near: int, count: int) -> tuple[Tensor, Tensor]:
    position = query_positions(store, count)[:, :, None]  # [B, Q, 1]
    place = torch.arange(store.longest, device=position.device)
    seen = place <= position
    # A query opens what was not packed when its own token came.
    packed = (position + 1) // BLOCK * BLOCK
    newest = torch.minimum(packed, position + 1 - near)
    always = seen & ((place < store.settings.sinks) | (place >= newest))
    return seen[:, None], always[:, None]


def _softmax(scores: Tensor) -> Tensor:
    """Over the last axis; zeros where a query sees nothing."""
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)


def _heaviest(mass: Tensor, allowed: Tensor, opening: Opening) -> Tensor:
    """The tokens to open among those allowed; of equal ones the first."""
    ranked = mass.masked_fill(~allowed, -1.0)
    order = torch.sort(ranked, dim=-1, descending=True, stable=True).indices
    place = torch.arange(mass.shape[-1], device=mass.device)
    if opening.mass is None:
        taken = (place < opening.heavy).expand_as(order)
    else:
        sorted_mass = ranked.gather(-1, order).clamp(min=0.0)
        before = sorted_mass.cumsum(-1) - sorted_mass
        missing = opening.mass * mass.sum(-1, keepdim=True)
        missing = missing - mass.masked_fill(allowed, 0.0).sum(-1, keepdim=True)
        taken = before < missing
    return torch.zeros_like(taken).scatter(-1, order, taken) & allowed

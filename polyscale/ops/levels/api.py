"""`level_attention`: every token is read in few bits, the tokens that matter exactly."""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from polyscale.checks import check_integer, check_number
from polyscale.ops.backends import Backend, Operation
from polyscale.ops.levels.append import APPEND
from polyscale.ops.levels.native import op
from polyscale.ops.levels.native.build import LIBRARY
from polyscale.ops.levels.reference import (
    Opening,
    attention_rows,
    level_attention_reference,
)
from polyscale.ops.levels.store import LevelStore
from polyscale.ops.native.backend import native_backend

_REFERENCE = "dense, any dtype and device"

ATTENTION = Operation(
    "level_attention",
    (
        Backend("reference", level_attention_reference, _REFERENCE),
        native_backend(LIBRARY, op.attend, "fused, CPU, float32 and bfloat16", op.why_not_attend),
    ),
    preferred=("native", "reference"),
)
OPERATIONS = (ATTENTION, APPEND)


def level_attention(
    query: Tensor,
    store: LevelStore,
    *,
    near: int = 64,
    heavy: int = 64,
    mass: float | None = None,
    scale: float | None = None,
    impl: str = "auto",
) -> Tensor:
    """Attention of the newest tokens over a store of levels, `[B, H, Q, Dv]`.

    A query scores all tokens it sees by their codes; it opens its near tokens, the first ones
    (`store.settings.sinks`) and the heaviest: their scores and values are exact. The output is the
    softmax over all scores, coarse and exact, times the values. Nothing is dropped.

    Args:
        query: `[B, H, Q, D]`, those of the Q newest tokens, which the store holds already. Each
            sees the tokens up to its own, and opens what it would have opened had they come one by
            one. Where a row holds fewer than Q tokens the first outputs are zeros. H is a multiple
            of the store's heads, and heads that share keys share the choice.
        store: the cached keys and values.
        near: tokens up to the query's own that are opened, besides those not packed yet.
        heavy: tokens that are opened besides, those with the greatest share of the softmax over
            coarse scores, summed over the heads that share keys.
        mass: in place of `heavy`, open as few tokens as hold this share of it.
        scale: factor of the scores; `1 / sqrt(D)` by default.
        impl: `"auto"`, `"reference"` or `"native"`.

    Example:
        >>> store = LevelStore.empty(1, 2, 64)
        >>> store.append(torch.randn(1, 2, 500, 64), torch.randn(1, 2, 500, 64))
        >>> level_attention(torch.randn(1, 6, 1, 64), store, heavy=32).shape
        torch.Size([1, 6, 1, 64])
    """
    opening, scale = _checked(query, store, near, heavy, mass, scale)
    return ATTENTION.choose(impl, query, store, opening, scale).run(query, store, opening, scale)


@dataclass(frozen=True)
class LevelAudit:
    """What rows of level attention lose, measured against the exact level of all tokens."""

    output: Tensor  # [B, H, Q, Dv]
    divergence: Tensor  # [B, H, Q] KL(row || exact row), in nats
    error: Tensor  # [B, H, Q] largest difference of the output over the largest exact entry
    opened: Tensor  # [B, Hk, Q] tokens read exactly
    seen: Tensor  # [B, Q] tokens in all


def level_audit(
    query: Tensor,
    store: LevelStore,
    *,
    near: int = 64,
    heavy: int = 64,
    mass: float | None = None,
    scale: float | None = None,
) -> LevelAudit:
    """What `level_attention` computes, and how far from exact attention it is; reads everything.

    Example:
        >>> store = LevelStore.empty(1, 1, 64)
        >>> store.append(torch.randn(1, 1, 500, 64), torch.randn(1, 1, 500, 64))
        >>> bool(level_audit(torch.randn(1, 1, 1, 64), store).divergence < 0.05)
        True
    """
    opening, scale = _checked(query, store, near, heavy, mass, scale)
    rows = attention_rows(query, store, opening, scale)
    exact = torch.log_softmax(rows.exact_scores, -1)
    weights = rows.weights
    terms = weights * (weights.log() - exact)
    divergence = terms.masked_fill(weights == 0, 0.0).sum(-1).flatten(1, 2).clamp(min=0.0)
    sure = exact.exp().nan_to_num(0.0) @ rows.exact_value  # [B, Hk, G, Q, Dv]
    sure = sure.flatten(1, 2)
    size = sure.abs().amax(-1).clamp(min=torch.finfo(sure.dtype).tiny)
    error = (rows.output.to(sure.dtype) - sure).abs().amax(-1) / size
    count = query.shape[2]
    ahead = torch.arange(count, device=query.device) - count + 1
    seen = (store.lengths[:, None] + ahead).clamp(min=0)
    return LevelAudit(rows.output, divergence, error, rows.opened.sum(-1), seen)


def _checked(
    query: Tensor,
    store: LevelStore,
    near: int,
    heavy: int,
    mass: float | None,
    scale: float | None,
) -> tuple[Opening, float]:
    shape = query.shape
    if len(shape) != 4 or shape[0] != store.batch or shape[3] != store.width:
        raise ValueError(
            f"query must be [{store.batch}, H, Q, {store.width}] like the store, got {list(shape)}"
        )
    if shape[1] % store.heads or not shape[1]:
        raise ValueError(
            f"query must have a multiple of the store's {store.heads} heads, got {shape[1]}"
        )
    # The kernel's view is of a store on the CPU; devices take long to compare.
    if not (query.is_cpu and store.native is not None) and query.device != store.lengths.device:
        raise ValueError(
            f"query must be on {store.lengths.device} like the store, got {query.device}"
        )
    # Checked once: this runs for every token of every layer. A tracer cannot follow a cache.
    opening = (_opening if torch.compiler.is_compiling() else _kept_opening)(near, heavy, mass)
    if scale is None:
        return opening, 1.0 / math.sqrt(store.width)
    return opening, check_number("scale", scale)


def _opening(near: int, heavy: int, mass: float | None) -> Opening:
    check_integer("near", near, least=0)
    check_integer("heavy", heavy, least=0)
    if mass is not None:
        check_number("mass", mass, least=0.0, most=1.0)
    return Opening(near, heavy, mass)


_kept_opening = lru_cache(maxsize=256, typed=True)(_opening)

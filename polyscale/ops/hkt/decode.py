"""HKT attention of a few new tokens against cached keys, one cache per level."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polyscale.ops.backends import Backend, Operation
from polyscale.ops.hkt.native.decode import MAX_QUERIES, decode_native, why_unsupported
from polyscale.ops.hkt.native.library import LIBRARY
from polyscale.ops.hkt.reference import relative_term
from polyscale.ops.hkt.sdpa import call_sdpa, upsample_blocks
from polyscale.ops.native.backend import native_backend
from polyscale.ops.numerics import accumulation_dtype, masked_softmax
from polyscale.ops.tracing import without_autocast

WIDEST_VECTOR = 16  # floats


class CoarseScores:
    """Scores of the coarse levels.

    A coarse query serves `2**l` tokens, and so do its scores: the keys of level `l` are read once
    in `2**l` tokens. Rows of the batch come first and may be reordered.
    """

    def __init__(self) -> None:
        self.levels: list[Tensor] = []  # of levels 1 and up, [B, H, 2, room]
        self.valid = False  # whether they are those of the last token
        self.gained = 0  # how many levels, from the finest on, have gained an entry since

    def reserve(self, keys: Sequence[Tensor]) -> None:
        """Make room for as many scores per level above 0 as it has keys, and a vector more."""
        for number, key in enumerate(keys[1:]):
            batch, heads, length = key.shape[:3]
            if number == len(self.levels):
                self.levels.append(key.new_empty(batch, heads, 2, 0, dtype=torch.float32))
            missing = length + WIDEST_VECTOR - self.levels[number].shape[3]
            if missing > 0:
                self.levels[number] = F.pad(self.levels[number], (0, missing + length // 2))


class NewTokens(NamedTuple):
    """The arguments of `hkt_decode`, which says what they mean, as every backend takes them."""

    queries: Sequence[Tensor]  # per level [B, H, Q, D]
    keys: Sequence[Tensor]  # per level [B, H, T_l, D]
    value: Tensor  # [B, H, T, Dv]
    level_weights: Tensor  # [L] or [H, L]
    position: Tensor  # [B, Q]
    scale: float
    relative_bias: Sequence[Tensor] | None = None  # per level [H, 2 R - 1]
    coarse_scores: CoarseScores | None = None


def hkt_decode(
    queries: Sequence[Tensor],
    keys: Sequence[Tensor],
    value: Tensor,
    level_weights: Tensor,
    *,
    position: Tensor,
    scale: float,
    relative_bias: Sequence[Tensor] | None = None,
    coarse_scores: CoarseScores | None = None,
    impl: str = "auto",
) -> Tensor:
    """Causal attention of new tokens over everything up to them, `[B, H, Q, Dv]`.

    Args:
        queries: per level the query that each new token uses, `[B, H, Q, D]`.
        keys: per level the cached keys including the new ones, `[B, H, T_l, D]`, counted from
            each row's own first token. Rows may fill different numbers of them.
        value: cached values, `[B, H, T, Dv]`.
        level_weights: `[L]` or `[H, L]`.
        position: `[B, Q]`, each new token's position in its own row; -1 for padding (gives zeros).
        scale: factor of the dot products.
        relative_bias: per level `[H, 2 R - 1]`.
        coarse_scores: scores of the last token where all rows hold equally many; they are updated.
        impl: as in `hkt_attention`; Triton has no kernel for this. `"auto"` is the native kernel
            for a few tokens on a CPU without gradients, and the reference otherwise.
    """
    tokens = NewTokens(
        queries, keys, value, level_weights, position, scale, relative_bias, coarse_scores
    )
    return DECODE.run(impl, tokens)


def decode_reference(tokens: NewTokens) -> Tensor:
    """The definition. Coarse keys are not repeated, only their scores."""
    queries, keys, value, level_weights, position, scale, relative_bias, coarse_scores = tokens
    _forget(coarse_scores)
    length, device = value.shape[2], value.device
    dtype = accumulation_dtype(value.dtype)
    weights = level_weights.to(dtype).expand(value.shape[1], -1)  # [H, L]
    column = torch.arange(length, device=device)
    with without_autocast(device):
        merged = torch.zeros((), dtype=dtype, device=device)
        for level, (query, key) in enumerate(zip(queries, keys, strict=True)):
            score = (query.to(dtype) * scale) @ key.to(dtype).transpose(-2, -1)  # [B, H, Q, T_l]
            score = score.repeat_interleave(2**level, dim=-1)[..., :length]
            if relative_bias is not None:
                bias = relative_term(relative_bias[level], position >> level, column >> level)
                score = score + bias.to(dtype)
            merged = merged + weights[:, level, None, None] * score
        allowed = (column <= position[..., None])[:, None]  # [B, 1, Q, T]
        attention = masked_softmax(merged, allowed)
        return (attention @ value.to(dtype)).to(value.dtype)


def decode_sdpa(tokens: NewTokens) -> Tensor:
    """One call of `scaled_dot_product_attention`; coarse keys are repeated."""
    queries, keys, value, level_weights, position, scale, relative_bias, coarse_scores = tokens
    _forget(coarse_scores)
    length, value_width = value.shape[-2:]
    weights = level_weights.expand(value.shape[1], -1)[..., None, None]  # [H, L, 1, 1]
    query = torch.cat(
        [(weights[:, level] * q).to(q.dtype) for level, q in enumerate(queries)], dim=-1
    )
    key = torch.cat([upsample_blocks(k, level, length) for level, k in enumerate(keys)], dim=-1)
    width = max(query.shape[-1], value_width)
    query, key, value = (F.pad(x, (0, width - x.shape[-1])) for x in (query, key, value))
    column = torch.arange(length, device=value.device)
    # Padding keeps one key, so that nothing becomes NaN; it is zeroed below.
    mask = (column <= position.clamp(min=0)[..., None])[:, None]  # [B, 1, Q, T]
    if relative_bias is not None:
        terms = [
            weights[:, level] * relative_term(table, position >> level, column >> level)
            for level, table in enumerate(relative_bias)
        ]
        mask = sum(terms, torch.zeros_like(terms[0])).to(query.dtype).masked_fill(~mask, -torch.inf)
    output = call_sdpa(query, key, value, mask, False, scale)
    return output[..., :value_width].masked_fill((position < 0)[:, None, :, None], 0.0)


def _forget(coarse_scores: CoarseScores | None) -> None:
    """The native kernel alone keeps them up to date."""
    if coarse_scores is not None:
        coarse_scores.valid = False


def _preferred(tokens: NewTokens) -> Iterator[str]:
    if tokens.queries[0].shape[2] <= MAX_QUERIES:
        yield "native"
    yield "reference"


DECODE = Operation(
    "hkt_decode",
    (
        Backend("reference", decode_reference, "scores at each level's own resolution"),
        Backend("sdpa", decode_sdpa, "coarse keys repeated"),
        native_backend(
            LIBRARY,
            decode_native,
            "one call over all levels; CPU, float32 and bfloat16, no gradients",
            why_unsupported,
        ),
    ),
    preferred=_preferred,
)

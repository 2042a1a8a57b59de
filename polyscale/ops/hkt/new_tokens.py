"""What decoding reads: new tokens, and the cache of every level."""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from polyscale.ops.hkt.coarse_scores import CoarseScores


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

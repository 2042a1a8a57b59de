"""The scores of an HKT layer at any number of levels."""

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polyscale.layers.filters import CausalFilter
from polyscale.layers.hkt import HKTAttention
from polyscale.layers.positions import rotate
from polyscale.ops.hkt.api import relative_term

LEVELS = 6  # the error analysis goes from one level to this many


@dataclass(frozen=True)
class LevelScores:
    """The scores of one layer on one sequence of T tokens, before the mask, in float64."""

    scores: list[Tensor]  # per level [H, T_l, T_l]
    logits: Tensor  # [H, levels]: the weights of the first k levels are the softmax of the first k
    trained: int  # levels that the layer has; those beyond it are means
    causal: bool

    @property
    def length(self) -> int:
        return self.scores[0].shape[-1]

    def weights(self, levels: int) -> Tensor:
        """The convex weights of the first levels, `[H, levels]`."""
        if not self.can_merge(levels):
            raise ValueError(f"levels: the first {levels} have no weight, so they have no merge")
        return torch.softmax(self.logits[:, :levels], -1)

    def can_merge(self, levels: int) -> bool:
        """Whether the first levels have any weight: fixed weights may be 0."""
        return bool((self.logits[:, :levels] > -torch.inf).any(-1).all())

    def merged(self, levels: int, rows: Tensor | None = None) -> Tensor:
        """The merged scores of the first levels at full length, `[H, Q, T]`."""
        return merge(self.scores[:levels], self.weights(levels), rows)

    def allowed(self, rows: Tensor | None = None) -> Tensor:
        """Which keys the rows may see, `[Q, T]`."""
        position = torch.arange(self.length)
        rows = position if rows is None else rows
        if not self.causal:
            return torch.ones(len(rows), self.length, dtype=torch.bool)
        return rows[:, None] >= position


def upsample(score: Tensor, level: int, length: int, rows: Tensor | None = None) -> Tensor:
    """A level's scores `[..., T_l, T_l]` at full length, `[..., Q, T]`; `rows` chooses queries."""
    if rows is not None:
        score = score[..., rows >> level, :]
    if not level:
        return score
    times = 2**level
    wide = score.unsqueeze(-1).expand(*score.shape, times).flatten(-2)[..., :length]
    if rows is not None:
        return wide
    tall = wide.unsqueeze(-2).expand(*wide.shape[:-1], times, length)
    return tall.flatten(-3, -2)[..., :length, :]


def merge(scores: Sequence[Tensor], weights: Tensor, rows: Tensor | None = None) -> Tensor:
    """`sum_l weight_l up_l(S_l)` for scores `[H, T_l, T_l]` and weights `[H, L]`: `[H, Q, T]`."""
    length = scores[0].shape[-1]
    merged: Tensor | None = None
    for level, score in enumerate(scores):
        term = upsample(weights[:, level, None, None] * score, level, length, rows)
        merged = term if merged is None else merged.add_(term)
    if merged is None:
        raise ValueError("scores must hold at least one level, got none")
    return merged


def with_levels(layer: HKTAttention, levels: int) -> HKTAttention:
    """A copy of a layer that has this many levels.

    Levels beyond those of the layer are means of two of the level before; they use the coarsest
    level's projections and relative term, and its weight before all weights are normalised again.
    With fewer levels the finest are kept, and their weights normalised again.

    >>> with_levels(HKTAttention(8, num_heads=1, levels=2), 4).level_weights.tolist()
    [[0.25, 0.25, 0.25, 0.25]]
    """
    if not isinstance(layer, HKTAttention):
        raise TypeError(f"layer must be an HKTAttention, got {type(layer).__name__}")
    if levels < 1:
        raise ValueError(f"levels must be at least 1, got {levels}")
    copy = deepcopy(layer)
    extra = levels - layer.levels
    copy.levels = copy.hierarchy.levels = levels
    filters = list(copy.hierarchy.downsamplers)[: levels - 1]
    filters += [CausalFilter(layer.d_model, 2, 2, "mean") for _ in range(extra)]
    copy.hierarchy.downsamplers = nn.ModuleList(filters)
    if not layer.shared_projections:
        copy.q_proj = nn.ModuleList(_resized(list(copy.q_proj), levels))
        if layer.kernel == "dot":
            copy.k_proj = nn.ModuleList(_resized(list(copy.k_proj), levels))
    copy.relative_bias = nn.ParameterList(_resized(list(copy.relative_bias), levels))
    for name in ("level_logits", "value_logits"):
        logits = getattr(copy, name)
        if logits is not None:
            setattr(copy, name, nn.Parameter(_stretched(logits.detach(), levels)))
    if copy.fixed_level_weights is not None:
        stretched = _stretched(copy.fixed_level_weights, levels)
        if float(stretched.sum()) <= 0:
            raise ValueError(
                f"levels: the first {levels} fixed level weights are all 0, so they have no merge"
            )
        copy.fixed_level_weights = stretched / stretched.sum()
    return copy


def _resized(items: list[Any], levels: int) -> list[Any]:
    """The first items, or all with the last one repeated; an empty list stays empty."""
    if not items:
        return items
    return items[:levels] + [items[-1]] * (levels - len(items))


def _stretched(values: Tensor, levels: int) -> Tensor:
    kept = values[..., :levels]
    missing = levels - kept.shape[-1]
    return torch.cat((kept, kept[..., -1:].expand(*kept.shape[:-1], missing)), -1)


def _scores(layer: HKTAttention, level: int, x: Tensor) -> Tensor:
    """The scores of one level `[H, T_l, T_l]` from its input `[T_l, C]`.

    The layer returns them too (`return_details`), but only together with the full attention matrix.
    """
    number = torch.arange(len(x))
    projection = 0 if layer.shared_projections else level

    def heads(projected: Tensor) -> Tensor:
        return projected.unflatten(-1, (layer.num_heads, -1)).transpose(0, 1)  # [H, T_l, D]

    def rotated(part: Tensor) -> Tensor:
        return rotate(part[None], number * 2**level)[0] if layer.rotary else part

    query = heads(layer.q_proj[projection](x))
    if layer.kernel == "psd":
        quarter = layer.head_dim // 4
        a, b, c = (rotated(part) for part in query.split((2 * quarter, quarter, quarter), -1))
        scores = a @ a.mT + b @ c.mT - c @ b.mT
    else:
        scores = rotated(query) @ rotated(heads(layer.k_proj[projection](x))).mT
    scores = scores * layer.head_dim**-0.5
    if len(layer.relative_bias):
        scores = scores + relative_term(layer.relative_bias[level], number, number)
    return scores


def level_scores(layer: HKTAttention, x: Tensor, levels: int | None = None) -> LevelScores:
    """The scores of a layer on one sequence `[T, C]`, computed in float64 from its weights.

    Example:
        >>> found = level_scores(HKTAttention(8, 2, levels=2), torch.randn(5, 8), levels=3)
        >>> [list(score.shape) for score in found.scores]
        [[2, 5, 5], [2, 3, 3], [2, 2, 2]]
    """
    if not isinstance(x, Tensor) or x.dim() != 2 or not len(x):
        got = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x must be one sequence [T, C] with T >= 1, got {got}")
    wanted = max(layer.levels, levels or layer.levels)
    copy = with_levels(layer, wanted).double().cpu().eval()
    with torch.no_grad():
        inputs = copy.hierarchy(x.detach().double().cpu()[None])
        scores = [_scores(copy, level, entry[0]) for level, entry in enumerate(inputs)]
    if layer.level_logits is not None:
        logits = layer.level_logits.detach().double().cpu()
    else:
        logits = layer.level_weights.detach().double().cpu().log()  # a weight of 0 is -inf
    return LevelScores(
        scores=scores,
        logits=_stretched(logits, wanted),
        trained=layer.levels,
        causal=layer.causal,
    )

"""From the input of every level to its queries, keys and values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from polyscale.layers.positions import rotate
from polyscale.ops.linear.api import linear_together

# For fewer rows, concatenating the weights would take longer than the products.
_MANY_ROWS = 64


class Levels(NamedTuple):
    """Queries and keys per level, and values of the levels that have any, `[B, H, T_l, D]`."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]


@dataclass(frozen=True)
class LevelProjections:
    """The projections of all levels, and by which implementation of `ops.linear` they run.

    Args:
        query: one for all levels, or one each.
        key: likewise; none with the psd kernel, which makes queries and keys from one projection.
        value: of level 0, and of the others if their values are merged.
        merges_values: whether all levels have values.
        impl: `"auto"` or a name.
    """

    query: Sequence[nn.Module]
    key: Sequence[nn.Module]
    value: nn.Module
    merges_values: bool
    impl: str

    def of(self, level: int, values: bool) -> list[nn.Module]:
        """What makes the queries, keys and, if asked for, values of a level."""
        number = level if len(self.query) > 1 else 0
        found = [self.query[number], *self.key[number : number + 1]]
        return [*found, self.value] if values else found

    def whole(
        self, fine: Tensor, coarse: Tensor | None, sizes: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Project level 0 `[B, T, C]`, and the levels above it, which are concatenated."""
        everything = self.of(0, values=True)
        if coarse is None:
            return project(fine, everything, self.impl), None
        if len(self.query) == 1:
            shared = len(self.of(1, self.merges_values))
            return project_together(fine, coarse, everything, shared, self.impl)
        above = [
            project(x, self.of(level, self.merges_values), self.impl)
            for level, x in enumerate(coarse.split(sizes, dim=1), start=1)
        ]
        return project(fine, everything, self.impl), torch.cat(above, dim=1)

    def rows(self, levels: list[Tensor]) -> Tensor:
        """Project a few rows per level, concatenated: one product if levels share projections."""
        if len(self.query) == 1:
            rows = levels[0] if len(levels) == 1 else torch.cat(levels, dim=1)
            return project(rows, self.of(0, values=True), self.impl)
        projected = [project(x, self.of(level, True), self.impl) for level, x in enumerate(levels)]
        return torch.cat(projected, dim=1)


@dataclass(frozen=True)
class Heads:
    """How projections split into heads, and heads into queries, keys and values.

    Args:
        number: H.
        width: D.
        kernel: `"dot"` or `"psd"`.
        rotary: whether queries and keys are rotated by position.
    """

    number: int
    width: int
    kernel: str
    rotary: bool

    def split(self, projected: Tensor, sizes: list[int], positions: Sequence[Tensor]) -> Levels:
        """Split the projections `[B, N, ..]` of some levels, which are concatenated.

        Args:
            projected: as `LevelProjections` returns it.
            sizes: the length of each of the levels.
            positions: of the first token of every entry, `[T_l]` or `[B, T_l]` per level.
        """
        parts = projected.unflatten(-1, (-1, self.number, self.width))
        parts = parts.transpose(1, 3)  # [B, H, parts, N, D]
        scored = 2 if self.kernel == "dot" else 1
        rotated = parts[:, :, :scored]
        if self.rotary:
            # Each part of the psd kernel is rotated by itself: one remains a Gram matrix and the
            # other antisymmetric.
            widths = (self.width,) if self.kernel == "dot" else self._psd_widths()
            position = torch.cat(list(positions), dim=-1)
            pieces = [rotate(piece, position) for piece in rotated.split(widths, dim=-1)]
            rotated = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)
        if self.kernel == "dot":
            query, key = rotated.unbind(2)
        else:
            # q_i . k_j = a_i . a_j + b_i . c_j - c_i . b_j
            a, b, c = rotated[:, :, 0].split(self._psd_widths(), dim=-1)
            query, key = torch.cat((a, b, -c), dim=-1), torch.cat((a, c, b), dim=-1)
        values = [value.split(sizes, dim=2) for value in parts[:, :, scored:].unbind(2)]
        return Levels(
            list(query.split(sizes, dim=2)),
            list(key.split(sizes, dim=2)),
            [piece for value in values for piece in value],
        )

    def _psd_widths(self) -> tuple[int, int, int]:
        quarter = self.width // 4
        return 2 * quarter, quarter, quarter


def merge_values(values: list[Tensor], weights: Tensor | None) -> Tensor:
    """Convex combination of the levels' values, `[B, H, T, D]`.

    Args:
        values: per level, with one entry for every two of the finer level, or one for each.
        weights: `[H, L]`, rows sum to 1; None for the values of level 0 alone.
    """
    if weights is None:
        return values[0]
    weights = weights[..., None, None]  # [H, L, 1, 1]
    merged = weights[:, -1] * values[-1]
    for level in reversed(range(len(values) - 1)):
        length = values[level].shape[2]
        if merged.shape[2] < length:
            merged = _upsample(merged, length)
        merged = (weights[:, level] * values[level]).add_(merged)
    return merged.to(values[0].dtype)


def _upsample(x: Tensor, length: int) -> Tensor:
    """Each of the entries `[B, H, T_l, D]` twice, cut to `length`."""
    if torch.compiler.is_compiling():
        # Whether a slice is contiguous would specialise the graph to even or to odd lengths.
        return x.index_select(2, torch.arange(length, device=x.device) >> 1)
    return x.repeat_interleave(2, dim=2)[:, :, :length]


def project(x: Tensor, projections: Sequence[nn.Module], impl: str = "auto") -> Tensor:
    """The projections of `[B, T, C]`, concatenated along the last axis.

    Args:
        x: `[B, T, C]`.
        projections: usually linear layers.
        impl: implementation of the product, see `ops.linear`.

    Example:
        >>> project(torch.randn(1, 5, 8), [nn.Linear(8, 8), nn.Linear(8, 4)]).shape
        torch.Size([1, 5, 12])
    """
    return project_together(x, None, projections, 0, impl)[0]


def project_together(
    x: Tensor,
    other: Tensor | None,
    projections: Sequence[nn.Module],
    shared: int,
    impl: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """`project` of `x`, and of another input by the first `shared` of the projections.

    Their gradients are summed in one pass over both inputs.
    """
    plain = [projection for projection in projections if _is_plain(projection)]
    rows = sum(each.shape[0] * each.shape[1] for each in (x, other) if each is not None)
    # A compiled graph serves every number of rows.
    few = not torch.compiler.is_compiling() and rows < _MANY_ROWS
    if len(plain) < len(projections) or few:
        projected = _one_by_one(x, projections)
        return projected, None if other is None else _one_by_one(other, projections[:shared])
    weight = torch.cat(tuple(projection.weight for projection in plain))
    biases = tuple(projection.bias for projection in plain if projection.bias is not None)
    bias = torch.cat(biases) if biases else None
    outputs = sum(projection.out_features for projection in plain[:shared])
    return linear_together(x, other, weight, bias, outputs, impl)


def _one_by_one(x: Tensor, projections: Sequence[nn.Module]) -> Tensor:
    return torch.cat([projection(x) for projection in projections], dim=-1)


def _is_plain(projection: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether its weight and bias define it: no adapter, no hook, nothing quantised."""
    hooks = projection._forward_hooks or projection._forward_pre_hooks
    return type(projection) is nn.Linear and not hooks

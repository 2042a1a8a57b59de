"""HKT self-attention as a layer."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from polyscale.layers.hierarchy import Hierarchy
from polyscale.layers.hkt_cache import HKTCache
from polyscale.layers.hkt_options import (
    check_cache,
    check_input,
    check_local_start,
    check_options,
    fixed_weights,
)
from polyscale.layers.hkt_steps import continue_ragged, continue_together, start_cache
from polyscale.layers.positions import rotate
from polyscale.layers.projections import project, project_together
from polyscale.ops.hkt.api import attend, attend_projected, implementation
from polyscale.ops.hkt.layout import PackedLayout, Padding, level_length
from polyscale.ops.hkt.reference import (
    accumulation_dtype,
    hkt_matrix,
    level_scores,
    relative_term,
)


class HKTDetails(NamedTuple):
    """What the layer did, for analysis."""

    level_weights: Tensor  # [H, L]
    level_scores: list[Tensor]  # per level [B, H, T_l, T_l], real tokens lined up at the start
    attention: Tensor  # [B, H, T, T], by column; rows and columns of padding are zero


class Levels(NamedTuple):
    """Queries and keys per level, and the values of levels that give any, `[B, H, T_l, D]`."""

    queries: list[Tensor]
    keys: list[Tensor]
    values: list[Tensor]


class HKTAttention(nn.Module):
    """Multi-head self-attention over L resolutions of its input, `[B, T, d_model]` to the same.

    Args:
        d_model: width of the input.
        num_heads: heads; each has `d_model / num_heads` channels.
        levels: L; 1 is standard attention.
        causal: whether a token sees only itself and what comes before. The downsampling is causal
            in every case.
        downsampling: `"depthwise"`, `"dense"` or `"mean"` (fixed).
        downsampling_width: taps of the downsampling filters.
        filter_width: taps of a causal filter of the input at level 0; 0 for none. It starts as
            the identity.
        values: `"fine"`, from the input itself, or `"merged"`, from a learned convex mix of all
            levels.
        shared_projections: whether all levels share one query and one key projection.
        level_weights: `"learned"`, or L fixed numbers that are not negative and sum to 1.
        relative_positions: R > 0 adds a learned term per head and level for the distance between
            blocks, up to R - 1; 0 for none.
        rotary: rotate queries and keys by position; level l uses the position of its block's start.
        local_start: with `rotary`, what the biases of queries and keys start at. All alike, they
            score by distance alone, so that above 0 training begins with attention to what is near.
        kernel: `"dot"`, or `"psd"`: scores whose symmetric part is positive semidefinite by
            construction.
        bias: whether the projections have a bias.
        impl: implementation of the attention, see `polyscale.hkt_attention`.

    Example:
        >>> layer = HKTAttention(64, num_heads=4, levels=3)
        >>> layer(torch.randn(2, 100, 64)).shape
        torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        levels: int = 3,
        *,
        causal: bool = True,
        downsampling: str = "depthwise",
        downsampling_width: int = 2,
        filter_width: int = 0,
        values: str = "fine",
        shared_projections: bool = True,
        level_weights: str | Sequence[float] = "learned",
        relative_positions: int = 0,
        rotary: bool = False,
        local_start: float = 0.0,
        kernel: str = "dot",
        bias: bool = True,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        check_options(
            d_model, num_heads, levels, downsampling, values, kernel, relative_positions, rotary
        )
        check_local_start(local_start, rotary and bias)
        implementation(impl)
        self.d_model, self.num_heads, self.levels = d_model, num_heads, levels
        self.head_dim = d_model // num_heads
        self.causal, self.rotary, self.kernel, self.impl = causal, rotary, kernel, impl
        self.merges_values = values == "merged" and levels > 1
        self.shared_projections = shared_projections

        self.hierarchy = Hierarchy(d_model, levels, downsampling, downsampling_width, filter_width)
        projections = 1 if shared_projections else levels
        self.q_proj = nn.ModuleList(nn.Linear(d_model, d_model, bias) for _ in range(projections))
        # The psd kernel makes queries and keys from one projection.
        self.k_proj = nn.ModuleList(
            nn.Linear(d_model, d_model, bias) for _ in range(projections if kernel == "dot" else 0)
        )
        self.local_start = local_start
        if local_start:
            self.start_locally()
        self.v_proj = nn.Linear(d_model, d_model, bias)
        self.out_proj = nn.Linear(d_model, d_model, bias)
        self.level_logits: nn.Parameter | None = None  # [H, L]
        self.register_buffer("fixed_level_weights", None)
        if isinstance(level_weights, str):
            if level_weights != "learned":
                raise ValueError(
                    f"level_weights must be 'learned' or {levels} numbers, got {level_weights!r}"
                )
            self.level_logits = nn.Parameter(torch.zeros(num_heads, levels))
        else:
            self.fixed_level_weights = fixed_weights(level_weights, levels)
        self.value_logits: nn.Parameter | None = None  # [H, L]
        if self.merges_values:
            self.value_logits = nn.Parameter(torch.zeros(num_heads, levels))
        self.relative_bias = nn.ParameterList(
            nn.Parameter(torch.zeros(num_heads, 2 * relative_positions - 1))
            for _ in range(levels if relative_positions else 0)
        )

    @torch.no_grad()
    def start_locally(self) -> None:
        """Set the biases of queries and keys to `local_start`."""
        for projection in (*self.q_proj, *self.k_proj):
            projection.bias.fill_(self.local_start)

    @property
    def fused(self) -> bool:
        """Whether native kernels may do what surrounds the attention."""
        return self.impl in ("auto", "native")

    @property
    def level_weights(self) -> Tensor:
        """The weight of every level in each head, `[H, L]`; rows sum to 1."""
        if self.level_logits is None:
            return self.fixed_level_weights.expand(self.num_heads, -1)
        return _convex(self.level_logits)

    def forward(
        self,
        x: Tensor,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        cache: HKTCache | None = None,
        return_details: bool = False,
        *,
        lengths: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, HKTDetails]:
        """Attend.

        Args:
            x: `[B, T, d_model]`; with a cache, the new tokens only.
            key_padding_mask: bool `[B, T]`, True for padding, on any side. Padding gives zeros.
            cu_seqlens: cumulative lengths of sequences packed in one row.
            cache: what earlier calls saw; it is extended by this one.
            return_details: also return level weights, scores and the attention matrix (dense).
            lengths: `[B]`, instead of a mask where all padding is on the right.
        """
        check_input(x, self.d_model, key_padding_mask, cu_seqlens, lengths)
        if cache is not None:
            check_cache(self.causal, cu_seqlens, return_details, self.impl)
        padding = None
        if key_padding_mask is not None:
            padding = Padding.from_mask(key_padding_mask)
            x, lengths = padding.line_up(x), padding.lengths
        elif lengths is not None:
            position = torch.arange(x.shape[1], device=x.device)
            x = x.masked_fill((position >= lengths[:, None])[..., None], 0.0)
        details = None
        if cache is not None and not cache.is_empty:
            cache.check_batch(x.shape[0])
            if cache.together and lengths is None:
                attended = continue_together(self, x, cache)
            else:
                attended = continue_ragged(self, x, cache, lengths)
        else:
            attended, details = self._whole(x, lengths, cu_seqlens, cache, return_details)
        output = self.out_proj(attended.transpose(1, 2).flatten(2))
        if lengths is not None:
            # The bias of the projection has no business at padding.
            position = torch.arange(x.shape[1], device=x.device)
            output = output.masked_fill((position >= lengths[:, None])[..., None], 0.0)
        if padding is not None:
            output = padding.put_back(output)
        if details is None:
            return output
        if padding is not None:
            by_row = padding.put_back(details.attention)
            by_column = padding.put_back(by_row.transpose(2, 3)).transpose(2, 3)
            details = details._replace(attention=by_column)
        return output, details

    def _whole(
        self,
        x: Tensor,
        lengths: Tensor | None,
        cu_seqlens: Tensor | None,
        cache: HKTCache | None,
        return_details: bool,
    ) -> tuple[Tensor, HKTDetails | None]:
        """Attention within sequences that start here: `[B, H, T, D]`."""
        packed = None
        if cu_seqlens is not None:
            packed = PackedLayout.from_cu_seqlens(cu_seqlens, self.levels)
        fine_input, coarse_input, sizes = self.hierarchy.fine_and_coarse(x, packed, self.fused)
        numbers, indices = _blocks(x, self.levels, packed)
        positions = [number * 2**level for level, number in enumerate(numbers)]
        fine, coarse = self._project(fine_input, coarse_input, sizes)
        levels = self.split(fine, [x.shape[1]], positions[:1])
        if coarse is not None:
            above = self.split(coarse, sizes, positions[1:])
            levels = Levels(*(low + high for low, high in zip(levels, above, strict=True)))
        values = levels.values
        if packed is not None and self.merges_values:
            values = [v[:, :, i] for v, i in zip(values, indices, strict=True)]
        value = self.merge_values(values)
        weights, bias = self.level_weights, list(self.relative_bias) or None
        masks: dict[str, Any] = {"causal": self.causal, "lengths": lengths, "packed": packed}
        if self.kernel == "psd" or self.rotary or self.merges_values or bias is not None:
            attended = attend(
                levels.queries,
                levels.keys,
                value,
                weights,
                relative_bias=bias,
                impl=self.impl,
                **masks,
            )
        else:
            attended = attend_projected(fine, coarse, sizes, weights, impl=self.impl, **masks)
        if cache is not None:
            inputs = [fine_input]
            inputs += [] if coarse_input is None else coarse_input.split(sizes, dim=1)
            start_cache(self, cache, x, inputs, levels, value, lengths)
        if not return_details:
            return attended, None
        scale = self.head_dim**-0.5
        scores = level_scores(levels.queries, levels.keys, scale)
        if bias is not None:
            scores = [
                score + relative_term(table, number, number).to(score.dtype)
                for score, table, number in zip(scores, bias, numbers, strict=True)
            ]
        matrix = hkt_matrix(
            levels.queries, levels.keys, weights, scale=scale, relative_bias=bias, **masks
        )
        return attended, HKTDetails(weights, scores, matrix)

    def projections(self, level: int, values: bool) -> list[nn.Module]:
        """What makes queries, keys (of the dot kernel) and values, if asked for, of a level."""
        number = 0 if self.shared_projections else level
        found = [self.q_proj[number], *self.k_proj[number : number + 1]]
        return [*found, self.v_proj] if values else found

    def _project(
        self, fine: Tensor, coarse: Tensor | None, sizes: list[int]
    ) -> tuple[Tensor, Tensor | None]:
        """Level 0, and all levels above it, one after the other."""
        everything = self.projections(0, values=True)
        if coarse is None:
            return project(fine, everything, self.fused), None
        if self.shared_projections:
            shared = len(self.projections(1, self.merges_values))
            return project_together(fine, coarse, everything, shared, self.fused)
        above = [
            project(x, self.projections(level, self.merges_values), self.fused)
            for level, x in enumerate(coarse.split(sizes, dim=1), start=1)
        ]
        return project(fine, everything, self.fused), torch.cat(above, dim=1)

    def split(self, projected: Tensor, sizes: list[int], positions: Sequence[Tensor]) -> Levels:
        """Projections `[B, N, ..]` of some levels, one after the other, as their parts.

        `positions` are those of the blocks' first tokens, `[T_l]` or `[B, T_l]`.
        """
        parts = projected.unflatten(-1, (-1, self.num_heads, self.head_dim))
        parts = parts.transpose(1, 3)  # [B, H, parts, N, D]
        scored = 2 if self.kernel == "dot" else 1
        rotated = parts[:, :, :scored]
        if self.rotary:
            # Of the psd kernel each part by itself: that keeps a Gram matrix and an
            # antisymmetric one.
            widths = (self.head_dim,) if self.kernel == "dot" else self._psd_widths()
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
        quarter = self.head_dim // 4
        return 2 * quarter, quarter, quarter

    def merge_values(self, values: list[Tensor]) -> Tensor:
        """Convex mix of the levels' values, `[B, H, T, D]`.

        A level may come with one entry for every two of the finer one, or one for each of them.
        """
        if self.value_logits is None:
            return values[0]
        weights = _convex(self.value_logits)[..., None, None]  # [H, L, 1, 1]
        merged = weights[:, -1] * values[-1]
        for level in reversed(range(len(values) - 1)):
            length = values[level].shape[2]
            if merged.shape[2] < length:
                merged = _upsample(merged, length)
            merged = (weights[:, level] * values[level]).add_(merged)
        return merged.to(values[0].dtype)

    def extra_repr(self) -> str:
        """Shown by print."""
        return (
            f"{self.d_model}, num_heads={self.num_heads}, levels={self.levels}, "
            f"causal={self.causal}, kernel={self.kernel!r}, impl={self.impl!r}"
        )


def _blocks(
    x: Tensor, levels: int, packed: PackedLayout | None
) -> tuple[list[Tensor], list[Tensor]]:
    """Per level the blocks' numbers in their sequence `[T_l]`, and each token's block `[T]`."""
    if packed is None:
        column = torch.arange(x.shape[1], device=x.device)
        numbers = [column[: level_length(x.shape[1], level)] for level in range(levels)]
        return numbers, [column >> level for level in range(levels)]
    numbers = [packed.level_position(level)[1] for level in range(levels)]
    indices = [
        packed.level_starts[level][packed.sequence] + (packed.position >> level)
        for level in range(levels)
    ]
    return numbers, indices


def _upsample(x: Tensor, length: int) -> Tensor:
    """Each of the entries `[B, H, T_l, D]` twice, cut to `length`."""
    if torch.compiler.is_compiling():
        # Whether a slice is contiguous would tie the graph to even lengths, or to odd ones.
        return x.index_select(2, torch.arange(length, device=x.device) >> 1)
    return x.repeat_interleave(2, dim=2)[:, :, :length]


def _convex(logits: Tensor) -> Tensor:
    return torch.softmax(logits.to(accumulation_dtype(logits.dtype)), dim=-1)

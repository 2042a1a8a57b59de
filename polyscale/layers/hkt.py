"""HKT self-attention as a layer."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyscale.checks import check_choice
from polyscale.layers.hierarchy import Hierarchy
from polyscale.layers.hkt_cache import HKTCache
from polyscale.layers.hkt_levels import Heads, LevelProjections, Levels, merge_values
from polyscale.layers.hkt_options import (
    check_cache,
    check_input,
    check_local_start,
    check_options,
    fixed_weights,
)
from polyscale.ops.hkt.api import (
    ATTENTION,
    AttentionMask,
    attend,
    attend_projected,
    hkt_decode,
    hkt_matrix,
    level_scores,
    relative_term,
)
from polyscale.ops.layout import PackedLayout, Padding, level_length
from polyscale.ops.numerics import accumulation_dtype


class HKTDetails(NamedTuple):
    """What a layer computed, for analysis."""

    level_weights: Tensor  # [H, L]
    level_scores: list[Tensor]  # per level [B, H, T_l, T_l], real tokens lined up at the start
    attention: Tensor  # [B, H, T, T], by column; rows and columns of padding are zero


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
        values: `"fine"`, from the input itself, or `"merged"`, a learned convex combination of the
            values of all levels.
        shared_projections: whether all levels share one query and one key projection.
        level_weights: `"learned"`, or L fixed numbers of at least 0 that sum to 1.
        relative_positions: R > 0 adds a learned term per head and level for the distance between
            blocks, up to R - 1; 0 for none.
        rotary: rotate queries and keys by position; level l uses the position of its block's start.
        local_start: with `rotary`, the initial value of the biases of queries and keys. Equal
            biases score by distance alone: above 0, training begins with attention to nearby
            tokens.
        kernel: `"dot"`, or `"psd"`: scores whose symmetric part is positive semidefinite by
            construction.
        bias: whether the projections have a bias.
        impl: implementation of the attention, see `polyscale.hkt_attention`. Projections and
            downsampling are native where they can be with `"auto"` and `"native"`, and by torch
            beside any other implementation.

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
        ATTENTION.check_name(impl)
        self.d_model, self.num_heads, self.levels = d_model, num_heads, levels
        self.head_dim = d_model // num_heads
        self.causal, self.rotary, self.kernel, self.impl = causal, rotary, kernel, impl
        self.merges_values = values == "merged" and levels > 1
        self.shared_projections = shared_projections
        self.heads = Heads(num_heads, self.head_dim, kernel, rotary)

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
            check_choice("level_weights", level_weights, ("learned",), f"or pass {levels} numbers")
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
    def level_weights(self) -> Tensor:
        """The weight of every level in each head, `[H, L]`; rows sum to 1."""
        if self.level_logits is None:
            return self.fixed_level_weights.expand(self.num_heads, -1)
        return _convex(self.level_logits)

    @property
    def value_weights(self) -> Tensor | None:
        """The weight of every level's values, `[H, L]`; None for the values of level 0 alone."""
        return None if self.value_logits is None else _convex(self.value_logits)

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
            cache: state of earlier calls, which this call extends.
            return_details: also return level weights, scores and the attention matrix (dense).
            lengths: `[B]`, instead of a mask if all padding is on the right.
        """
        check_input(x, self.d_model, key_padding_mask, cu_seqlens, lengths)
        if cache is not None:
            check_cache(self.causal, cu_seqlens, return_details, self.impl)
        padding = None
        if key_padding_mask is not None:
            padding = Padding.from_mask(key_padding_mask)
            x, lengths = padding.line_up(x), padding.lengths
        elif lengths is not None:
            x = _without_padding(x, lengths)
        details = None
        if cache is not None and not cache.is_empty:
            attended = self._decode(x, lengths, cache)
        else:
            attended, details = self._whole(x, lengths, cu_seqlens, cache, return_details)
        output = self.out_proj(attended.transpose(1, 2).flatten(2))
        if lengths is not None:
            output = _without_padding(output, lengths)  # which has the bias of the projection
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
        mask = AttentionMask(self.causal, lengths, packed)
        whole = self.hierarchy.whole(x, packed, self._companion_impl)
        fine, coarse = self.projections().whole(*whole)
        numbers = _block_numbers(x, self.levels, packed)
        levels = self._split_whole(fine, coarse, whole.sizes, numbers)
        values = levels.values
        if packed is not None and self.merges_values:
            blocks = packed.token_blocks()
            values = [value[:, :, block] for value, block in zip(values, blocks, strict=True)]
        value = merge_values(values, self.value_weights)
        weights, bias = self.level_weights, list(self.relative_bias) or None
        if self.kernel == "psd" or self.rotary or self.merges_values or bias is not None:
            attended = attend(
                levels.queries,
                levels.keys,
                value,
                weights,
                mask,
                relative_bias=bias,
                impl=self.impl,
            )
        else:
            attended = attend_projected(fine, coarse, whole.sizes, weights, mask, impl=self.impl)
        if cache is not None:
            count = torch.full((len(x),), x.shape[1], device=x.device)
            count = count if lengths is None else lengths
            cache.start(levels, value, self.hierarchy.tails(x, whole.levels, count), lengths)
        if not return_details:
            return attended, None
        return attended, self._details(levels, numbers, mask)

    def _decode(self, x: Tensor, lengths: Tensor | None, cache: HKTCache) -> Tensor:
        """Attention of new tokens over the cache and themselves, `[B, H, Q, D]`."""
        cache.check_batch(x.shape[0])
        batch, length = x.shape[:2]
        if cache.together and lengths is None:
            new = self.hierarchy.advance(x, cache.tails, cache.columns)
            position = new.positions[0].expand(batch, -1)
        else:
            assert cache.lengths is not None
            count = torch.full((batch,), length, device=x.device) if lengths is None else lengths
            new = self.hierarchy.advance_rows(x, cache.tails, cache.lengths, count)
            real = torch.arange(length, device=x.device) < count[:, None]
            position = torch.where(real, new.positions[0], -1)
        projected = self.projections().rows(new.levels)
        sizes = [level.shape[1] for level in new.levels]
        levels = self.heads.split(projected, sizes, new.positions)
        queries, values = cache.entries_of(levels, new.positions[0], lengths)
        value = merge_values(values, self.value_weights)
        cache.append(levels.keys, value, new.tails, lengths)
        return hkt_decode(
            queries,
            *cache.filled(),
            self.level_weights,
            position=position,
            scale=self.head_dim**-0.5,
            relative_bias=list(self.relative_bias) or None,
            coarse_scores=cache.scores if cache.together else None,
            impl=self.impl,
        )

    @property
    def _companion_impl(self) -> str:
        """The `impl` of projections and downsampling, which surround the attention.

        Their fast paths are for CPUs, as the native attention is; beside any other attention that
        is asked for by name they run by torch.
        """
        return "auto" if self.impl in ("auto", "native") else "reference"

    def projections(self) -> LevelProjections:
        """The projections of every level."""
        return LevelProjections(
            list(self.q_proj),
            list(self.k_proj),
            self.v_proj,
            self.merges_values,
            self._companion_impl,
        )

    def _split_whole(
        self, fine: Tensor, coarse: Tensor | None, sizes: list[int], numbers: list[Tensor]
    ) -> Levels:
        """Queries, keys and values of level 0 and of the levels above it."""
        positions = [number * 2**level for level, number in enumerate(numbers)]
        levels = self.heads.split(fine, [fine.shape[1]], positions[:1])
        if coarse is None:
            return levels
        above = self.heads.split(coarse, sizes, positions[1:])
        return Levels(*(low + high for low, high in zip(levels, above, strict=True)))

    def _details(self, levels: Levels, numbers: list[Tensor], mask: AttentionMask) -> HKTDetails:
        scale, bias = self.head_dim**-0.5, list(self.relative_bias) or None
        queries, keys, weights = levels.queries, levels.keys, self.level_weights
        scores = level_scores(queries, keys, scale)
        if bias is not None:
            scores = [
                score + relative_term(table, number, number).to(score.dtype)
                for score, table, number in zip(scores, bias, numbers, strict=True)
            ]
        return HKTDetails(weights, scores, hkt_matrix(queries, keys, weights, mask, scale, bias))

    def extra_repr(self) -> str:
        """Shown by print."""
        return (
            f"{self.d_model}, num_heads={self.num_heads}, levels={self.levels}, "
            f"causal={self.causal}, kernel={self.kernel!r}, impl={self.impl!r}"
        )


def _block_numbers(x: Tensor, levels: int, packed: PackedLayout | None) -> list[Tensor]:
    """Per level the number of each block in its sequence, `[T_l]`."""
    if packed is not None:
        return [packed.level_position(level)[1] for level in range(levels)]
    column = torch.arange(x.shape[1], device=x.device)
    return [column[: level_length(x.shape[1], level)] for level in range(levels)]


def _without_padding(x: Tensor, lengths: Tensor) -> Tensor:
    """`[B, T, C]` with zeros after each row's own length `[B]`."""
    position = torch.arange(x.shape[1], device=x.device)
    return x.masked_fill((position >= lengths[:, None])[..., None], 0.0)


def _convex(logits: Tensor) -> Tensor:
    return torch.softmax(logits.to(accumulation_dtype(logits.dtype)), dim=-1)

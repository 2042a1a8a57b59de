"""HKT self-attention as a layer."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from polyscale.layers.hierarchy import Hierarchy
from polyscale.layers.hkt_cache import HKTCache
from polyscale.layers.hkt_options import check_options, fixed_weights
from polyscale.layers.positions import rotate
from polyscale.ops.hkt.api import attend, check_cu_seqlens, check_padding_mask, implementation
from polyscale.ops.hkt.decode import hkt_decode
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
        kernel: str = "dot",
        bias: bool = True,
        impl: str = "auto",
    ) -> None:
        super().__init__()
        check_options(
            d_model, num_heads, levels, downsampling, values, kernel, relative_positions, rotary
        )
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
        self._check_input(x, cache, return_details, key_padding_mask, cu_seqlens, lengths)
        padding = None
        if key_padding_mask is not None:
            padding = Padding.from_mask(key_padding_mask)
            x, lengths = padding.line_up(x), padding.lengths
        elif lengths is not None:
            position = torch.arange(x.shape[1], device=x.device)
            x = x.masked_fill((position >= lengths[:, None])[..., None], 0.0)
        details = None
        if cache is not None and not cache.is_empty:
            attended = self._continue(x, cache, lengths)
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
        inputs = self.hierarchy(x, packed)
        numbers, indices = _blocks(x, self.levels, packed)
        queries, keys = self._queries_and_keys(inputs, numbers)
        values = self._values(inputs)
        coarse = [v[:, :, i] for v, i in zip(values[1:], indices[1 : len(values)], strict=True)]
        value = self._merge_values([values[0], *coarse])
        weights, bias = self.level_weights, list(self.relative_bias) or None
        attended = attend(
            queries,
            keys,
            value,
            weights,
            causal=self.causal,
            lengths=lengths,
            packed=packed,
            relative_bias=bias,
            impl=self.impl,
        )
        if cache is not None:
            self._start_cache(cache, x, inputs, queries, keys, values, value, lengths)
        if not return_details:
            return attended, None
        scale = self.head_dim**-0.5
        scores = level_scores(queries, keys, scale)
        if bias is not None:
            scores = [
                score + relative_term(table, number, number).to(score.dtype)
                for score, table, number in zip(scores, bias, numbers, strict=True)
            ]
        matrix = hkt_matrix(
            queries,
            keys,
            weights,
            causal=self.causal,
            lengths=lengths,
            packed=packed,
            scale=scale,
            relative_bias=bias,
        )
        return attended, HKTDetails(weights, scores, matrix)

    def _queries_and_keys(
        self, inputs: list[Tensor], numbers: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Per level `[B, H, T_l, D]`; `numbers` are the blocks' numbers in their own sequence."""
        queries = self._project(self.q_proj, inputs)
        keys = self._project(self.k_proj, inputs) if self.kernel == "dot" else queries
        pairs = []
        for level, (query, key) in enumerate(zip(queries, keys, strict=True)):
            position = numbers[level] * 2**level
            if self.kernel == "psd":
                pairs.append(self._psd_pair(query, position))
            elif self.rotary:
                pairs.append((rotate(query, position), rotate(key, position)))
            else:
                pairs.append((query, key))
        return [query for query, _ in pairs], [key for _, key in pairs]

    def _project(self, projections: nn.ModuleList, inputs: list[Tensor]) -> list[Tensor]:
        if self.shared_projections:
            sizes = [x.shape[1] for x in inputs]
            every = inputs[0] if len(inputs) == 1 else torch.cat(inputs, dim=1)
            return list(self._split_heads(projections[0](every)).split(sizes, dim=2))
        return [
            self._split_heads(projection(x))
            for projection, x in zip(projections, inputs, strict=True)
        ]

    def _psd_pair(self, projected: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """`q_i . k_j = a_i . a_j + b_i . c_j - c_i . b_j` from the three parts of a projection."""
        quarter = self.head_dim // 4
        a, b, c = projected.split((2 * quarter, quarter, quarter), dim=-1)
        if self.rotary:
            # Rotating each part by itself keeps a Gram matrix and an antisymmetric one.
            a, b, c = (rotate(part, position) for part in (a, b, c))
        return torch.cat((a, b, -c), dim=-1), torch.cat((a, c, b), dim=-1)

    def _values(self, inputs: list[Tensor]) -> list[Tensor]:
        """Values of the levels that give any, `[B, H, T_l, D]`."""
        used = inputs if self.merges_values else inputs[:1]
        return [self._split_heads(self.v_proj(x)) for x in used]

    def _merge_values(self, values: list[Tensor]) -> Tensor:
        """Convex mix of values brought to full length, `[B, H, T, D]`."""
        if self.value_logits is None:
            return values[0]
        weights = _convex(self.value_logits)[..., None, None]  # [H, L, 1, 1]
        terms = [weights[:, level] * value for level, value in enumerate(values)]
        return sum(terms[1:], terms[0]).to(values[0].dtype)

    def _split_heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.num_heads, self.head_dim)).transpose(1, 2)

    def _start_cache(
        self,
        cache: HKTCache,
        x: Tensor,
        inputs: list[Tensor],
        queries: list[Tensor],
        keys: list[Tensor],
        values: list[Tensor],
        value: Tensor,
        lengths: Tensor | None,
    ) -> None:
        """Remember a whole prompt."""
        batch, length = x.shape[:2]
        count = torch.full((batch,), length, device=x.device) if lengths is None else lengths
        cache.write(keys, value, count)
        cache.tails = self.hierarchy.tail(x, inputs, count)
        for level in range(1, self.levels):
            newest = cache.seen(level) - 1
            kept = [queries[level], *values[level : level + 1]]
            cache.current.append([_pick(entry, newest[:, None]) for entry in kept])

    def _continue(self, x: Tensor, cache: HKTCache, lengths: Tensor | None) -> Tensor:
        """Attention of new tokens over the cache and themselves, `[B, H, Q, D]`."""
        batch, length = x.shape[:2]
        assert cache.lengths is not None
        count = torch.full((batch,), length, device=x.device) if lengths is None else lengths
        cache.check_batch(batch)
        inputs, numbers, tails = self.hierarchy.extend(x, cache.tails, cache.lengths, count)
        queries, keys = self._queries_and_keys(inputs, numbers)
        values = self._values(inputs)

        position = numbers[0]  # [B, Q]
        queries_used, values_used = [queries[0]], [values[0]]
        current: list[list[Tensor]] = []
        for level in range(1, self.levels):
            # The block a new token lies in may have been opened by an earlier call.
            index = (position >> level) - (cache.seen(level)[:, None] - 1)
            total = (cache.lengths + count + (2**level - 1)) >> level
            newest = (total - cache.seen(level))[:, None]
            candidates = [
                torch.cat((kept, fresh), dim=2)
                for kept, fresh in zip(
                    cache.current[level - 1],
                    [queries[level], *values[level : level + 1]],
                    strict=True,
                )
            ]
            current.append([_pick(entry, newest) for entry in candidates])
            index = index.clamp(max=candidates[0].shape[2] - 1)
            queries_used.append(_pick(candidates[0], index))
            values_used += [_pick(entry, index) for entry in candidates[1:]]
        cache.write(keys, self._merge_values(values_used), count)
        cache.tails, cache.current = tails, current
        cached_keys, cached_values = cache.filled()
        real = torch.arange(length, device=x.device) < count[:, None]
        return hkt_decode(
            queries_used,
            cached_keys,
            cached_values,
            self.level_weights,
            position=torch.where(real, position, -1),
            scale=self.head_dim**-0.5,
            relative_bias=list(self.relative_bias) or None,
        )

    def _check_input(
        self,
        x: Tensor,
        cache: HKTCache | None,
        return_details: bool,
        key_padding_mask: Tensor | None,
        cu_seqlens: Tensor | None,
        lengths: Tensor | None,
    ) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise TypeError(
                f"x must be a floating tensor, got {getattr(x, 'dtype', type(x).__name__)}"
            )
        if x.dim() != 3 or x.shape[2] != self.d_model:
            raise ValueError(
                f"x must have shape [B, T, d_model] with d_model = {self.d_model}, "
                f"got {tuple(x.shape)}"
            )
        if x.shape[1] == 0:
            raise ValueError("x must have at least one position, got an empty sequence (T = 0)")
        given = [
            name
            for name, argument in (
                ("key_padding_mask", key_padding_mask),
                ("cu_seqlens", cu_seqlens),
                ("lengths", lengths),
            )
            if argument is not None
        ]
        if len(given) > 1:
            raise ValueError(f"pass one of key_padding_mask, cu_seqlens and lengths, got {given}")
        if key_padding_mask is not None:
            check_padding_mask(key_padding_mask, x.shape[0], x.shape[1], x.device)
        if cu_seqlens is not None:
            check_cu_seqlens(cu_seqlens, x.shape[0], x.shape[1])
        if lengths is not None and lengths.shape != (x.shape[0],):
            raise ValueError(
                f"lengths must have shape [B] = [{x.shape[0]}], got {list(lengths.shape)}"
            )
        if cache is not None:
            if not self.causal:
                raise ValueError("cache needs causal=True: later tokens change earlier ones else")
            if cu_seqlens is not None or return_details:
                raise ValueError("cache goes with neither cu_seqlens nor return_details")

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
        numbers = [column[: level_length(len(column), level)] for level in range(levels)]
        return numbers, [column >> level for level in range(levels)]
    numbers = [packed.level_position(level)[1] for level in range(levels)]
    indices = [
        packed.level_starts[level][packed.sequence] + (packed.position >> level)
        for level in range(levels)
    ]
    return numbers, indices


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """`x[b, :, index[b, n]]` for `[B, H, T, D]` and `[B, N]`; an index of -1 takes the first."""
    index = index.clamp(min=0)[:, None, :, None]
    return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))


def _convex(logits: Tensor) -> Tensor:
    return torch.softmax(logits.to(accumulation_dtype(logits.dtype)), dim=-1)

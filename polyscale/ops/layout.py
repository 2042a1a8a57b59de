"""Where the tokens of each sequence are: padding, packing, and the blocks of every level.

Blocks count from a sequence's own first token, never from a column of the batch. So padding is
handled once: real tokens are *lined up* at the start of their row, attention is computed there,
and the result is *put back*. In between, only the number of real tokens per row matters.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from polyscale.ops.rows import gather_rows
from polyscale.ops.tracing import is_cheap_to_read


def level_length(length: int, level: int) -> int:
    """Number of blocks of `2**level` positions that cover `length` positions."""
    # Not `-(-length // 2**level)`: torch.compile fails to simplify sums of that form.
    return (length + 2**level - 1) // 2**level


@dataclass(frozen=True)
class Padding:
    """A padding mask as indices: which column holds a row's i-th real token, and back."""

    column: Tensor  # [B, T] column of the i-th real token, then the columns of padding
    position: Tensor  # [B, T] position of a column's token in its own sequence
    real: Tensor  # [B, T]
    lengths: Tensor  # [B]
    is_lined_up: bool  # whether all padding is known to be on the right

    @classmethod
    def from_mask(cls, key_padding_mask: Tensor) -> "Padding":
        """From a bool mask `[B, T]`, True for padding, on either side or in between."""
        real = ~key_padding_mask
        return cls(
            column=torch.argsort(key_padding_mask.to(torch.uint8), dim=1, stable=True),
            position=(real.cumsum(1) - 1).clamp(min=0),
            real=real,
            lengths=real.sum(1),
            # Rows that are in order are not moved.
            is_lined_up=is_cheap_to_read(real) and bool((real[:, 1:] <= real[:, :-1]).all()),
        )

    def line_up(self, x: Tensor) -> Tensor:
        """Real tokens first, zeros after them. `x` is `[B, ..., T, C]`."""
        lined_up = x if self.is_lined_up else gather_rows(x, self.column)
        position = torch.arange(x.shape[-2], device=x.device)
        return _zero_elsewhere(lined_up, position < self.lengths[:, None])

    def put_back(self, x: Tensor) -> Tensor:
        """The inverse of `line_up`; zeros at the padding."""
        return _zero_elsewhere(x if self.is_lined_up else gather_rows(x, self.position), self.real)


@dataclass(frozen=True)
class PackedLayout:
    """Sequences concatenated in a single row."""

    sequence: Tensor  # [T] which sequence a token belongs to
    position: Tensor  # [T] its position there
    level_starts: tuple[Tensor, ...]  # per level: the first block of each sequence, [S]
    boundaries: tuple[tuple[int, ...], ...]  # per level: level_starts and the end, as numbers

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Tensor, levels: int) -> "PackedLayout":
        """From cumulative lengths `[S + 1]`, beginning with 0."""
        bounds = cu_seqlens.to(torch.int64)
        lengths = bounds.diff()
        total = int(bounds[-1])
        sequence = torch.repeat_interleave(lengths, output_size=total)
        position = torch.arange(total, device=bounds.device) - bounds[sequence]
        starts, boundaries = [], []
        for level in range(levels):
            blocks = (lengths + (2**level - 1)) >> level
            ends = blocks.cumsum(0)
            starts.append(ends - blocks)
            boundaries.append((0, *ends.tolist()))
        return cls(sequence, position, tuple(starts), tuple(boundaries))

    def token_blocks(self) -> list[Tensor]:
        """Per level the block of each token, `[T]`."""
        return [
            starts[self.sequence] + (self.position >> level)
            for level, starts in enumerate(self.level_starts)
        ]

    def level_position(self, level: int) -> tuple[Tensor, Tensor]:
        """For every block of a level its sequence, and its number there. `[T_l]` each."""
        ends = torch.tensor(self.boundaries[level], device=self.sequence.device)
        sequence = torch.repeat_interleave(ends.diff(), output_size=self.boundaries[level][-1])
        number = torch.arange(len(sequence), device=sequence.device) - ends[sequence]
        return sequence, number


def keep_used(levels: Sequence[Tensor], lengths: Tensor | None) -> list[Tensor]:
    """Levels `[B, H, T_l, C]` with zeros for entries beyond the real tokens, `[B]` in each row.

    No token uses these, but values there that are not finite would still reach gradients: 0 * inf.
    """
    if lengths is None:
        return list(levels)
    kept = []
    for level, x in enumerate(levels):
        first = torch.arange(x.shape[-2], device=x.device) << level
        kept.append(_zero_elsewhere(x, first < lengths[:, None]))
    return kept


def _zero_elsewhere(x: Tensor, real: Tensor) -> Tensor:
    """Zeros where `real` `[B, T]` is False, also where `x` is not finite there."""
    real = real.view(real.shape[0], *[1] * (x.dim() - 3), real.shape[1], 1)
    return x.masked_fill(~real, 0.0)

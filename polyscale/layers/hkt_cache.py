"""What one HKT attention layer remembers while it decodes, token by token.

Rows may hold different numbers of tokens (prompts of different lengths), so everything is indexed
by a token's own position in its row: level `l` of a row of `n` tokens holds `ceil(n / 2**l)` keys.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from polyscale.layers.hkt_levels import Levels
from polyscale.layers.row_cache import RowCache
from polyscale.ops.hkt.api import CoarseScores
from polyscale.ops.layout import level_length
from polyscale.ops.rows import append_columns, append_rows, gather_rows


class HKTCache(RowCache):
    """Keys per level, values, and the little state that continues every level.

    Pass one object per layer, empty at first, to `HKTAttention.forward(x, cache=cache)`.

    While all rows hold equally many tokens they are *together*: which levels gain an entry is then
    known without looking at a tensor. Rows of different lengths take a general path.
    """

    def __init__(self) -> None:
        self.together = True  # every row holds as many tokens as were fed
        self.keys: list[Tensor] = []  # per level [B, H, room, D]
        self.values: list[Tensor] = []  # one: [B, H, room, Dv]
        self.tails: list[Tensor] = []  # per filter: its last width - 1 inputs, [B, w - 1, C]
        self.current: list[list[Tensor]] = []  # per level >= 1: newest query (value), [B, H, 1, D]
        self.scores = CoarseScores()

    def seen(self, level: int) -> Tensor:
        """Entries each row has at a level, `[B]`."""
        assert self.lengths is not None
        return (self.lengths + (2**level - 1)) >> level

    def opened(self, level: int) -> int:
        """Entries every row has at a level, while the rows are together."""
        return level_length(self.columns, level)

    def start(
        self, levels: Levels, value: Tensor, tails: list[Tensor], lengths: Tensor | None
    ) -> None:
        """Fill with whole prompts.

        Args:
            levels: queries, keys and values of the prompts.
            value: merged over the levels, `[B, H, T, Dv]`.
            tails: the last inputs of every filter.
            lengths: `[B]` tokens of each row; None if all have T.
        """
        self.together = lengths is None
        self.keys, self.values, self.tails = list(levels.keys), [value], tails
        self.columns, self.device = value.shape[2], value.device
        self.lengths = self._count(value, lengths)
        self.current = []
        for level in range(1, len(levels.queries)):
            newest = (self.seen(level) - 1)[:, None]
            entries = [levels.queries[level], *levels.values[level : level + 1]]
            self.current.append([_pick(entry, newest) for entry in entries])

    def entries_of(
        self, new: Levels, position: Tensor, lengths: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The queries and values that each new token uses, per level `[B, H, Q, D]`.

        A token may use entries that an earlier call opened. The newest entries are remembered.

        Args:
            new: queries and values of the entries that the levels gain.
            position: of the new tokens in their rows, `[Q]`, or `[B, Q]` where rows differ.
            lengths: as in `append`, which comes next.
        """
        if self.together and lengths is None:
            return self._entries_together(new, position)
        return self._entries_by_row(new, position, lengths)

    def append(
        self, keys: list[Tensor], value: Tensor, tails: list[Tensor], lengths: Tensor | None
    ) -> None:
        """Add new entries.

        Args:
            keys: per level `[B, H, Q_l, D]`; levels that gain none may be missing while the rows
                are together. Entries beyond those a row gains are overwritten by the next call.
            value: merged over the levels, `[B, H, Q, Dv]`.
            tails: the last inputs of every filter.
            lengths: `[B]` new tokens of each row; None if all gain Q.
        """
        assert self.lengths is not None
        columns = self.columns + value.shape[2]
        self.together = self.together and lengths is None
        if self.together:
            for level, new in enumerate(keys):
                self.keys[level] = append_columns(self.keys[level], new, self.opened(level))
            self.values = [append_columns(self.values[0], value, self.columns)]
            self.lengths = self.lengths + value.shape[2]
            self.scores.gained = len(keys)
        else:
            # One more than needed: an unused entry of a row may be one block further.
            self.keys = [
                append_rows(old, new, self.seen(level), level_length(columns, level) + 1)
                for level, (old, new) in enumerate(zip(self.keys, keys, strict=True))
            ]
            self.values = [append_rows(self.values[0], value, self.lengths, columns + 1)]
            self.lengths = self.lengths + self._count(value, lengths)
            self.device = value.device
        self.columns, self.tails = columns, tails

    def filled(self) -> tuple[list[Tensor], Tensor]:
        """Keys per level and values, cut to the most that any row may have."""
        keys = [
            stored[:, :, : level_length(self.columns, level)]
            for level, stored in enumerate(self.keys)
        ]
        return keys, self.values[0][:, :, : self.columns]

    def _entries_together(self, new: Levels, position: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        queries, values = new.queries[:1], new.values[:1]
        for level in range(1, len(self.keys)):
            newest = self.current[level - 1]
            if level < len(new.queries):
                used = [new.queries[level], *([new.values[level]] if newest[1:] else [])]
                self.current[level - 1] = [entry[:, :, -1:] for entry in used]
                if len(position) > 1:
                    # The block of the first new tokens may have been opened by an earlier call.
                    block = (position >> level) - (self.opened(level) - 1)
                    both = [torch.cat(pair, dim=2) for pair in zip(newest, used, strict=True)]
                    used = [entry[:, :, block] for entry in both]
            else:
                used = [entry.expand(-1, -1, len(position), -1) for entry in newest]
            queries.append(used[0])
            values += used[1:]
        return queries, values

    def _entries_by_row(
        self, new: Levels, position: Tensor, lengths: Tensor | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        assert self.lengths is not None
        queries, values = new.queries[:1], new.values[:1]
        end = self.lengths + self._count(queries[0], lengths)
        for level in range(1, len(self.keys)):
            # The block of a new token may have been opened by an earlier call.
            index = (position >> level) - (self.seen(level)[:, None] - 1)
            last = (((end + (2**level - 1)) >> level) - self.seen(level))[:, None]
            newest = self.current[level - 1]
            gained = [new.queries[level], *([new.values[level]] if newest[1:] else [])]
            both = [torch.cat(pair, dim=2) for pair in zip(newest, gained, strict=True)]
            self.current[level - 1] = [_pick(entry, last) for entry in both]
            index = index.clamp(max=both[0].shape[2] - 1)
            queries.append(_pick(both[0], index))
            values += [_pick(entry, index) for entry in both[1:]]
        return queries, values

    def _count(self, entries: Tensor, lengths: Tensor | None) -> Tensor:
        """How many tokens of `[B, H, T, D]` each row has, `[B]`."""
        if lengths is not None:
            return lengths
        return torch.full((entries.shape[0],), entries.shape[2], device=entries.device)

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.keys = [change(stored) for stored in self.keys]
        self.values = [change(stored) for stored in self.values]
        self.tails = [change(stored) for stored in self.tails]
        self.current = [[change(stored) for stored in level] for level in self.current]
        self.scores.levels = [change(stored) for stored in self.scores.levels]


def _pick(x: Tensor, index: Tensor) -> Tensor:
    """`x[b, :, index[b, n]]` for `[B, H, T, D]` and `[B, N]`; an index of -1 takes the first."""
    return gather_rows(x, index.clamp(min=0))

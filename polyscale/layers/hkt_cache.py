"""What one HKT attention layer remembers while it writes, token by token.

Rows may hold different numbers of tokens (prompts of different lengths), so everything is kept by
a token's own position in its row: level `l` of a row with `n` tokens holds `ceil(n / 2**l)` keys.
"""

from collections.abc import Callable

from torch import Tensor

from polyscale.layers.cache import RowCache
from polyscale.ops.hkt.layout import level_length
from polyscale.ops.hkt.native.decode import CoarseScores
from polyscale.ops.rows import append_columns, append_rows


class HKTCache(RowCache):
    """Keys per level, values, and the little state that continues every level.

    Pass one object per layer, empty at first, to `HKTAttention.forward(x, cache=cache)`.
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

    def write_together(self, keys: list[Tensor], value: Tensor) -> None:
        """Append the same number of entries to every row; levels that gain none may be missing."""
        assert self.lengths is not None
        for level, new in enumerate(keys):
            self.keys[level] = append_columns(self.keys[level], new, self.opened(level))
        self.values = [append_columns(self.values[0], value, self.columns)]
        self.lengths = self.lengths + value.shape[2]
        self.columns += value.shape[2]

    def write(self, keys: list[Tensor], value: Tensor, count: Tensor) -> None:
        """Append to every row at its own end; then `count` `[B]` more tokens are in the cache.

        Entries past a row's count are overwritten by the next call.
        """
        columns = self.columns + value.shape[2]
        lengths = self.lengths
        if lengths is None:
            self.keys, self.values = list(keys), [value]
            self.lengths = count
        else:
            # One more than needed: a row's overwritable entry may lie one block further.
            self.keys = [
                append_rows(kept, new, self.seen(level), level_length(columns, level) + 1)
                for level, (kept, new) in enumerate(zip(self.keys, keys, strict=True))
            ]
            self.values = [append_rows(self.values[0], value, lengths, columns + 1)]
            self.lengths = lengths + count
        self.columns = columns
        self.device = value.device

    def filled(self) -> tuple[list[Tensor], Tensor]:
        """Keys per level and values, cut to what any row may have."""
        keys = [
            kept[:, :, : level_length(self.columns, level)] for level, kept in enumerate(self.keys)
        ]
        return keys, self.values[0][:, :, : self.columns]

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.keys = [change(kept) for kept in self.keys]
        self.values = [change(kept) for kept in self.values]
        self.tails = [change(kept) for kept in self.tails]
        self.current = [[change(kept) for kept in level] for level in self.current]
        self.scores.levels = [change(kept) for kept in self.scores.levels]

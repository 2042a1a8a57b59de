"""What one HKT attention layer remembers while it writes, token by token.

Rows may hold different numbers of tokens (prompts of different lengths), so everything is kept by
a token's own position in its row: level `l` of a row with `n` tokens holds `ceil(n / 2**l)` keys.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from polyscale.ops.hkt.layout import level_length


class HKTCache:
    """Keys per level, values, and the little state that continues every level.

    Pass one object per layer, empty at first, to `HKTAttention.forward(x, cache=cache)`.
    """

    def __init__(self) -> None:
        self._device: torch.device | None = None
        self.columns = 0  # tokens fed so far, padding included: no row has more
        self.lengths: Tensor | None = None  # [B] real tokens of each row
        self.keys: list[Tensor] = []  # per level [B, H, room, D]
        self.values: list[Tensor] = []  # one: [B, H, room, Dv]
        self.tails: list[Tensor] = []  # per filter: its last width - 1 inputs, [B, w - 1, C]
        self.current: list[
            list[Tensor]
        ] = []  # per level >= 1: newest query (and value), [B, H, 1, D]

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been fed yet."""
        return self.lengths is None

    def seen(self, level: int) -> Tensor:
        """Entries each row has at a level, `[B]`."""
        assert self.lengths is not None
        return (self.lengths + (2**level - 1)) >> level

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
                _append(kept, new, self.seen(level), level_length(columns, level) + 1)
                for level, (kept, new) in enumerate(zip(self.keys, keys, strict=True))
            ]
            self.values = [_append(self.values[0], value, lengths, columns + 1)]
            self.lengths = lengths + count
        self.columns = columns
        self._device = value.device

    def filled(self) -> tuple[list[Tensor], Tensor]:
        """Keys per level and values, cut to what any row may have."""
        keys = [
            kept[:, :, : level_length(self.columns, level)] for level, kept in enumerate(self.keys)
        ]
        return keys, self.values[0][:, :, : self.columns]

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change every tensor, all of which have the batch first."""
        if self.lengths is None:
            return
        self.lengths = change(self.lengths)
        self.keys = [change(kept) for kept in self.keys]
        self.values = [change(kept) for kept in self.values]
        self.tails = [change(kept) for kept in self.tails]
        self.current = [[change(kept) for kept in level] for level in self.current]

    def select(self, indices: Tensor) -> None:
        """Keep these rows, in this order (beam search)."""
        self.apply(lambda kept: kept.index_select(0, indices.to(kept.device)))

    def repeat(self, times: int) -> None:
        """Each row `times` times."""
        self.apply(lambda kept: kept.repeat_interleave(times, dim=0))

    @property
    def device(self) -> torch.device | None:
        """Where the layer computes; stays the same while the state is moved away."""
        return self._device

    def to(self, device: torch.device | str) -> None:
        """Move to a device."""
        self.apply(lambda kept: kept.to(device, non_blocking=True))


def _append(kept: Tensor, new: Tensor, start: Tensor, room: int) -> Tensor:
    """Write `new` `[B, H, N, D]` into `kept` at `start` `[B]`, making room where needed."""
    room = max(room, kept.shape[2])
    if room > kept.shape[2]:
        # Half as much again, so that growing costs a constant per token.
        kept = F.pad(kept, (0, 0, 0, room + room // 2 - kept.shape[2]))
    index = start[:, None] + torch.arange(new.shape[2], device=new.device)  # [B, N]
    index = index[:, None, :, None].expand_as(new)
    if torch.is_grad_enabled():
        return kept.scatter(2, index, new)
    return kept.scatter_(2, index, new)

"""What all decoding caches share: tensors with the batch first, changed row by row."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor


class RowCache(ABC):
    """The memory of one attention layer while it writes. Empty until the layer fills it."""

    columns = 0  # tokens fed so far, padding included: no row has more
    lengths: Tensor | None = None  # [B] real tokens of each row
    device: torch.device | None = None  # where the layer computes, also while the state is away

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been fed yet."""
        return self.lengths is None

    @abstractmethod
    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        """Replace every tensor but `lengths`."""

    def apply(self, change: Callable[[Tensor], Tensor]) -> None:
        """Change every tensor, all of which have the batch first."""
        if self.lengths is not None:
            self.lengths = change(self.lengths)
            self._change(change)

    def select(self, indices: Tensor) -> None:
        """Keep these rows, in this order (beam search)."""
        self.apply(lambda kept: kept.index_select(0, indices.to(kept.device)))

    def repeat(self, times: int) -> None:
        """Each row `times` times."""
        self.apply(lambda kept: kept.repeat_interleave(times, dim=0))

    def to(self, device: torch.device | str) -> None:
        """Move to a device."""
        self.apply(lambda kept: kept.to(device, non_blocking=True))

    def check_batch(self, batch: int) -> None:
        """Raise unless new tokens have as many rows as the cache."""
        if self.lengths is not None and batch != len(self.lengths):
            raise ValueError(
                f"x must have the batch size of the cache, {len(self.lengths)}, got {batch}"
            )


def append(kept: Tensor, new: Tensor, start: Tensor, room: int) -> Tensor:
    """Write `new` `[B, H, N, D]` into `kept` at `start` `[B]`, making room where needed."""
    kept = _with_room(kept, room)
    index = start[:, None] + torch.arange(new.shape[2], device=new.device)  # [B, N]
    index = index[:, None, :, None].expand_as(new)
    if torch.is_grad_enabled():
        return kept.scatter(2, index, new)
    return kept.scatter_(2, index, new)


def append_together(kept: Tensor, new: Tensor, start: int) -> Tensor:
    """The same where all rows start at one place: a plain copy."""
    end = start + new.shape[2]
    kept = _with_room(kept, end)
    if torch.is_grad_enabled():
        return torch.cat((kept[:, :, :start], new, kept[:, :, end:]), dim=2)
    kept[:, :, start:end] = new
    return kept


def _with_room(kept: Tensor, room: int) -> Tensor:
    if room <= kept.shape[2]:
        return kept
    # Half as much again, so that growing costs a constant per token.
    return F.pad(kept, (0, 0, 0, room + room // 2 - kept.shape[2]))

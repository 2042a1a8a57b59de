"""What all decoding caches share: tensors with the batch first, reordered row by row."""

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor


class RowCache(ABC):
    """The state of one attention layer while it decodes. Empty until the layer fills it."""

    columns = 0  # tokens fed so far, padding included: no row has more
    lengths: Tensor | None = None  # [B] real tokens of each row, padding excluded
    device: torch.device | None = None  # of the layer, also while the state is offloaded

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
        self.apply(lambda state: state.index_select(0, indices.to(state.device)))

    def repeat(self, times: int) -> None:
        """Each row `times` times."""
        self.apply(lambda state: state.repeat_interleave(times, dim=0))

    def to(self, device: torch.device | str) -> None:
        """Move to a device."""
        self.apply(lambda state: state.to(device, non_blocking=True))

    def check_batch(self, batch: int) -> None:
        """Raise unless new tokens have as many rows as the cache."""
        if self.lengths is not None and batch != len(self.lengths):
            raise ValueError(
                f"x must have the batch size of the cache, {len(self.lengths)}, got {batch}"
            )

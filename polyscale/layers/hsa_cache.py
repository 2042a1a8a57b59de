"""What one causal HSA layer remembers while it decodes: the newest token's ancestors and their
children. With families of at most b members that is O(b log_b N) entries for N tokens.

Level 0 holds the tokens of the open family; level k the closed nodes of height k in the family
that is open above them, each as its mean key, mean value and number of tokens. When a family
closes, its members become one node of the level above. Rows open and close families independently.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from polyscale.layers.row_cache import RowCache
from polyscale.ops.hsa import OpenFamily, add_token, close_families


class HSACache(RowCache):
    """The open families of every level. Pass one object per layer to `HSAAttention`."""

    def __init__(self) -> None:
        self.families: list[OpenFamily] = []  # from the tokens up
        self.last_token: Tensor | None = None  # [B], for structures that follow the text

    def _change(self, change: Callable[[Tensor], Tensor]) -> None:
        self.families = [
            OpenFamily(*(change(part) for part in vars(family).values()))
            for family in self.families
        ]
        if self.last_token is not None:
            self.last_token = change(self.last_token)

    @property
    def size(self) -> int:
        """Entries per row, of all levels together."""
        return sum(int(family.filled.max()) for family in self.families)

    def start(self, key: Tensor, value: Tensor, closes: Tensor, lengths: Tensor) -> None:
        """Fill with whole prompts `[B, H, T, D]`, real tokens first.

        `closes` `[B, T]` is how many levels close right before each token.
        """
        batch, _, length, _ = key.shape
        position = torch.arange(length, device=key.device)
        real = position < lengths[:, None]  # [B, T]
        levels = int(closes.max()) if closes.numel() else 0
        # Number of the node of each height that a token lies in; height 0 is the token.
        numbers = [position.expand(batch, -1)]
        numbers += [(closes >= height).cumsum(1) for height in range(1, levels + 1)]
        last = (lengths - 1).clamp(min=0)[:, None]
        self.families = []
        for height, number in enumerate(numbers):
            newest = number.gather(1, last)  # [B, 1] the node the last token lies in
            inside = real
            if height < levels:
                above = numbers[height + 1]
                inside = real & (above == above.gather(1, last))
            if height:
                inside = inside & (number < newest)  # the newest node is still open
            first = torch.where(inside, number, length).amin(1, keepdim=True)  # [B, 1]
            stop = newest + (1 if height == 0 else 0)
            filled = torch.where(inside.any(1), (stop - first)[:, 0], 0)
            room = int(filled.max()) if batch else 0
            # Members are summed at their place in the family, other tokens at the place after it.
            place = torch.where(inside, number - first, room)  # [B, T]
            self.families.append(OpenFamily.from_places(key, value, place, room, filled))
        self.lengths, self.columns, self.device = lengths, length, key.device

    def step(self, closes: Tensor, key: Tensor, value: Tensor, rows: Tensor) -> None:
        """Close `closes` `[B]` levels, from the bottom, in the given rows."""
        self.families = close_families(self.families, closes, key, value, rows)

    def take(self, families: list[OpenFamily], added: Tensor, columns: int = 1) -> None:
        """Keep families that have so many more tokens in each row `[B]`, of `columns` with padding.

        A row that has one more may be given as True.
        """
        self.families = families
        if self.lengths is None:
            self.lengths = torch.zeros_like(families[0].filled)
        self.lengths = self.lengths + added
        self.columns += columns
        self.device = added.device

    def add(self, key: Tensor, value: Tensor, rows: Tensor) -> None:
        """One more token, `[B, H, 1, D]`, in the given rows."""
        self.take(add_token(self.families, key, value, rows), rows)

"""Scores that decoding reuses from one token to the next."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

WIDEST_VECTOR = 16  # floats


class CoarseScores:
    """Scores of the coarse levels.

    A coarse query serves `2**l` tokens, and so do its scores: the keys of level `l` are read once
    in `2**l` tokens. Rows of the batch come first and may be reordered.
    """

    def __init__(self) -> None:
        self.levels: list[Tensor] = []  # of levels 1 and up, [B, H, 2, room]
        self.valid = False  # whether they are those of the last token
        self.gained = 0  # how many levels, from the finest on, have gained an entry since

    def reserve(self, keys: Sequence[Tensor]) -> None:
        """Make room for as many scores per level above 0 as it has keys, and a vector more."""
        for number, key in enumerate(keys[1:]):
            batch, heads, length = key.shape[:3]
            if number == len(self.levels):
                self.levels.append(key.new_empty(batch, heads, 2, 0, dtype=torch.float32))
            missing = length + WIDEST_VECTOR - self.levels[number].shape[3]
            if missing > 0:
                self.levels[number] = F.pad(self.levels[number], (0, missing + length // 2))

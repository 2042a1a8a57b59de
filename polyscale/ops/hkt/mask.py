"""Which keys a token may attend to."""

from dataclasses import dataclass

from torch import Tensor

from polyscale.ops.layout import PackedLayout


@dataclass(frozen=True)
class AttentionMask:
    """Which keys a token may attend to: real ones of its own sequence, and earlier ones if causal.

    Example:
        >>> AttentionMask(causal=True)
        AttentionMask(causal=True, lengths=None, packed=None)
    """

    causal: bool = True
    lengths: Tensor | None = None  # [B] real tokens, which come first in each row; None: all
    packed: PackedLayout | None = None  # sequences concatenated in one row

"""What HKT attention costs, counted while it runs on the meta device, which stores no data.

FLOPs are those of the matrix products; bytes are what these products read and write, each tensor
once. The bound of 4/3 holds for the score products; the whole operation adds the product of
attention and values, which is the same for any number of levels.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from polyscale.checks import check_integer
from polyscale.ops.hkt.api import AttentionMask, hkt_matrix, level_scores
from polyscale.ops.layout import level_length


@dataclass(frozen=True)
class Cost:
    """Of one attention with all its heads and batch entries."""

    flops: int
    bytes: int


@dataclass(frozen=True)
class AttentionCost:
    """Scores per level, standard attention's scores, and both whole operations."""

    levels: list[Cost]
    standard: Cost  # the scores of standard attention
    whole: Cost  # all levels' scores and the values
    standard_whole: Cost

    @property
    def ratio(self) -> float:
        """Score FLOPs over those of standard attention."""
        return sum(level.flops for level in self.levels) / self.standard.flops

    @property
    def whole_ratio(self) -> float:
        """FLOPs of the whole operation over those of standard attention."""
        return self.whole.flops / self.standard_whole.flops


def attention_cost(levels: int, length: int, head_dim: int, heads: int = 1) -> AttentionCost:
    """Count the products of HKT attention with these sizes, in float32.

    >>> found = attention_cost(levels=3, length=1024, head_dim=32, heads=8)
    >>> found.ratio, found.whole_ratio
    (1.3125, 1.15625)
    """
    for name, value in (
        ("levels", levels),
        ("length", length),
        ("head_dim", head_dim),
        ("heads", heads),
    ):
        check_integer(name, value, least=1)

    def inputs(count: int) -> list[torch.Tensor]:
        return [
            torch.empty(1, heads, level_length(length, at), head_dim, device="meta")
            for at in range(count)
        ]

    def whole(count: int) -> Cost:
        entries = inputs(count)
        weights = torch.empty(heads, count, device="meta")
        with _Counter() as counter:
            mask = AttentionMask(causal=False)
            matrix = hkt_matrix(entries, entries, weights, mask, scale=1.0)
            matrix @ entries[0]
        return counter.cost()

    per_level = []
    for entry in inputs(levels):
        with _Counter() as counter:
            level_scores([entry], [entry], 1.0)
        per_level.append(counter.cost())
    return AttentionCost(per_level, per_level[0], whole(levels), whole(1))


def score_flop_ratio(levels: int, length: int) -> float:
    """Score FLOPs of `levels` resolutions over those of standard attention: below 4/3.

    >>> score_flop_ratio(3, 1024)
    1.3125
    """
    return attention_cost(levels, length, head_dim=1).ratio


class _Counter:
    """FLOPs and bytes of the matrix products that run inside."""

    def __init__(self) -> None:
        self._flops = FlopCounterMode(display=False)
        self._bytes = _ProductBytes()

    def __enter__(self) -> "_Counter":
        self._flops.__enter__()
        self._bytes.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._bytes.__exit__(*error)
        self._flops.__exit__(*error)

    def cost(self) -> Cost:
        return Cost(self._flops.get_total_flops(), self._bytes.total)


class _ProductBytes(TorchDispatchMode):
    PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default)

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in self.PRODUCTS:
            self.total += sum(part.numel() * part.element_size() for part in (*args, result))
        return result

"""Where keys and queries stand: positions, blocks, sinks, and which rows are sampled.

Positions count from a row's first real token, or from a packed sequence's first. The queries are
the last N of M columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from polyscale.ops.opened.settings import Settings
from polyscale.ops.tracing import is_cheap_to_read


@dataclass(frozen=True)
class Places:
    """Of every column of the keys; the batch size is that of the tensors (1 if packed).

    Example:
        >>> Places.of_rows(1, 4, 6, None, torch.device("cpu")).position.tolist()
        [[0, 1, 2, 3, 4, 5]]
    """

    queries: int  # N
    position: Tensor  # [B, M], -1 for padding
    length: Tensor  # [B, M] of the sequence that the column belongs to
    first: Tensor  # [B, M] position of that sequence's first query
    sequence: Tensor  # [B, M] its number within the row
    boundaries: tuple[int, ...] | None  # of packed sequences, else None
    has_padding: bool
    sinks: Tensor  # bool [B, M]

    @classmethod
    def of_rows(
        cls, batch: int, queries: int, keys: int, padding: Tensor | None, device: torch.device
    ) -> Places:
        """Rows of one sequence each; `padding` is bool `[B, M]`, True for padding."""
        if padding is None:
            position = torch.arange(keys, device=device).expand(batch, keys)
            length = torch.full_like(position, keys)
            first = torch.full_like(position, keys - queries)
        else:
            real = ~padding
            position = torch.where(real, real.cumsum(1) - 1, -1)
            length = real.sum(1, keepdim=True).expand(batch, keys)
            first = real[:, : keys - queries].sum(1, keepdim=True).expand(batch, keys)
        nothing = torch.zeros_like(position, dtype=torch.bool)
        sequence = torch.zeros_like(position)
        return cls(queries, position, length, first, sequence, None, padding is not None, nothing)

    @classmethod
    def packed(cls, cu_seqlens: Tensor, device: torch.device) -> Places:
        """Sequences one after the other in one row; the boundaries are cumulative lengths."""
        bounds = cu_seqlens.to(device=device, dtype=torch.int64)
        boundaries = tuple(bounds.tolist())
        sequence = torch.repeat_interleave(bounds.diff(), output_size=boundaries[-1])
        position = torch.arange(boundaries[-1], device=device) - bounds[sequence]
        return cls(
            queries=boundaries[-1],
            position=position[None],
            length=bounds.diff()[sequence][None],
            first=torch.zeros_like(position)[None],
            sequence=sequence[None],
            boundaries=boundaries,
            has_padding=False,
            sinks=torch.zeros_like(position, dtype=torch.bool)[None],
        )

    @property
    def real(self) -> Tensor:
        """Columns that hold a token: bool `[B, M]`."""
        return self.position >= 0

    def of_queries(self, x: Tensor) -> Tensor:
        """The columns that are queries: `[B, M]` to `[B, N]`."""
        return x[:, x.shape[1] - self.queries :]

    def key_blocks(self, settings: Settings) -> tuple[Tensor, int]:
        """The number of each column's key block `[B, M]`, and how many there are."""
        return self._blocks(self.position, settings.key_block, 0)

    def query_blocks(self, settings: Settings) -> tuple[Tensor, int]:
        """The number of each query's block (in strict mode, group) `[B, N]`, and how many.

        They count from the block that the row's first query stands in.
        """
        unit, keys = settings.unit, self.position.shape[1]
        if self.boundaries is not None:
            return self._blocks(self.position, unit, 0)
        before = keys - self.queries
        blocks = (self.of_queries(self.position) // unit) - self.of_queries(self.first) // unit
        if self.has_padding and before:
            return blocks, (self.queries + unit - 2) // unit + 1  # wherever the first one stands
        return blocks, (keys + unit - 1) // unit - before // unit

    def _blocks(self, position: Tensor, size: int, before: int) -> tuple[Tensor, int]:
        if self.boundaries is None:
            return position // size - before, (self.position.shape[1] + size - 1) // size
        bounds = torch.tensor(self.boundaries, device=position.device)
        counts = (bounds.diff() + size - 1) // size
        return position // size + (counts.cumsum(0) - counts)[self.sequence], int(counts.sum())

    def sampled(self, settings: Settings) -> Tensor:
        """The columns of the sampled rows among the N queries: `[B, R]`, -1 where there are fewer.

        Positions p with p + 1 divisible by `sample` and the last of all; in strict mode the first
        of each group.
        """
        if self.boundaries is None and not self.has_padding:
            return self._sampled_of_rows(settings)
        position = self.of_queries(self.position)
        if settings.strict:
            first = self.of_queries(self.first)
            chosen = (position % settings.sample == 0) | (position == first)
        else:
            last = self.of_queries(self.length) - 1
            chosen = ((position + 1) % settings.sample == 0) | (position == last)
        chosen = chosen & (position >= 0)
        most = self._most_sampled(chosen, settings.sample)
        order = torch.argsort((~chosen).to(torch.uint8), dim=1, stable=True)[:, :most]
        return torch.where(chosen.gather(1, order), order, -1)

    def _sampled_of_rows(self, settings: Settings) -> Tensor:
        """Without padding they follow from the lengths alone, which may be symbols."""
        batch, keys = self.position.shape
        first, sample = keys - self.queries, settings.sample
        begin = first // sample
        group = torch.arange(begin, (keys + sample - 1) // sample, device=self.position.device)
        position = group * sample
        if settings.strict:
            position = position.clamp(min=first)
        else:
            position = (position + sample - 1).clamp(max=keys - 1)
        return (position - first).expand(batch, -1)

    def _most_sampled(self, chosen: Tensor, sample: int) -> int:
        if self.boundaries is not None:
            lengths = (end - begin for begin, end in pairwise(self.boundaries))
            return sum((length + sample - 1) // sample for length in lengths)
        if chosen.numel() and is_cheap_to_read(chosen):
            return int(chosen.sum(1).max())
        return min(self.queries, self.queries // sample + 2)


def sink_columns(places: Places, sinks: int | Tensor) -> Tensor:
    """Which columns are sinks, bool `[B, M]`: the first so many positions, or given ones.

    Given positions are `[P]` for all sequences or `[S, P]`, one row for each; -1 is none.
    """
    if not isinstance(sinks, Tensor):
        return places.real & (places.position < sinks)
    sinks = sinks.to(places.position.device)
    if places.boundaries is not None:
        rows = sinks.expand(len(places.boundaries) - 1, -1)[places.sequence[0]]  # [M, P]
        found = (places.position[0, :, None] == rows).any(-1)[None]
    else:
        batch, keys = places.position.shape
        rows = sinks.expand(batch, sinks.shape[-1])  # [B, P]
        # One more position, which holds what is not there: -1, and those beyond the last.
        inside = torch.where((rows >= 0) & (rows < keys), rows, keys)
        wanted = torch.zeros(batch, keys + 1, dtype=torch.bool, device=rows.device)
        wanted = wanted.scatter(1, inside, True)
        wanted[:, keys] = False
        found = wanted.gather(1, places.position.clamp(min=0))
    return found & places.real

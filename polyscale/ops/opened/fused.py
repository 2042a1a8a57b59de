"""`impl="native"`: lines padded rows up, and calls the kernel's operations."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from polyscale.ops.hkt.layout import Padding
from polyscale.ops.opened.native.op import attend, choose, why_not
from polyscale.ops.opened.places import Places
from polyscale.ops.opened.reference import Choice, with_pooled_kl
from polyscale.ops.opened.settings import Settings

__all__ = ["opened_attention_native", "why_not"]


def opened_attention_native(
    query: Tensor, key: Tensor, value: Tensor, places: Places, settings: Settings
) -> tuple[Tensor, Choice]:
    """The attended values `[B, H, N, Dv]`, and what was chosen and lost."""
    return _Lined(query, key, value, places, settings).run()


def attend_to_choice(
    query: Tensor, key: Tensor, value: Tensor, opened: Tensor, places: Places, settings: Settings
) -> tuple[Tensor, Tensor]:
    """Attention to a given choice, bool `[B, Hk, Q, C]`: the output and each row's log-sum."""
    return _Lined(query, key, value, places, settings).attend(opened)


class _Lined:
    """Tensors as the kernel takes them: real tokens first in each row."""

    def __init__(
        self, query: Tensor, key: Tensor, value: Tensor, places: Places, settings: Settings
    ) -> None:
        self.places, self.settings = places, settings
        self.padding: Padding | None = None
        self.spans: Tensor | None = None
        sinks = places.sinks
        if places.has_padding:
            keys = Padding.from_mask(~places.real)
            self.padding = Padding.from_mask(~places.of_queries(places.real))
            query, key, value = self.padding.line_up(query), keys.line_up(key), keys.line_up(value)
            sinks = keys.line_up(sinks.to(torch.uint8)[..., None])[..., 0]
            self.spans = torch.stack((keys.lengths, self.padding.lengths))
        elif places.boundaries is not None:
            self.spans = torch.tensor([places.boundaries])
        self.query, self.key, self.value, self.sinks = query, key, value, sinks.to(torch.uint8)
        self.numbers = [
            int(settings.causal),
            int(settings.strict),
            int(settings.rest == "pool"),
            settings.unit,
            settings.key_block,
            settings.near,
            -1 if settings.mass is not None else settings.heavy // settings.key_block,
            settings.sample,
            settings.samples if settings.strict else 1,
        ]

    def run(self) -> tuple[Tensor, Choice]:
        """Choose, and attend to what was chosen."""
        columns = self.places.sampled(self.settings)  # [B, R]
        _, blocks = self.places.query_blocks(self.settings)
        query, key = self.query.detach(), self.key.detach()
        bits, kept, log_sum = choose(
            query,
            key,
            self.sinks,
            self.spans,
            self.numbers,
            [blocks, self._bytes(), columns.shape[1]],
            self.settings.mass or 0.0,
            self.settings.scale,
        )
        output, row_sum = self._attend(bits)
        there = columns >= 0
        position = self.places.of_queries(self.places.position)
        rows = torch.where(there, position.gather(1, columns.clamp(min=0)), -1)
        kl = (-kept.log()).masked_fill(~there[:, None], 0.0)
        choice = Choice(self._unpack(bits), rows, columns, kept, log_sum, kl)
        return output, with_pooled_kl(choice, row_sum.detach(), self.settings)

    def attend(self, opened: Tensor) -> tuple[Tensor, Tensor]:
        """Attend to a choice made elsewhere."""
        return self._attend(self._pack(opened))

    def _attend(self, bits: Tensor) -> tuple[Tensor, Tensor]:
        output, row_sum = attend(
            self.query,
            self.key,
            self.value,
            self.sinks,
            self.spans,
            bits,
            self.numbers,
            self.settings.scale,
        )
        if self.padding is None:
            return output, row_sum
        return self.padding.put_back(output), self.padding.put_back(row_sum[..., None])[..., 0]

    def _bytes(self) -> int:
        """Bytes of one query block's choice: a bit for each key block of its own sequence."""
        longest = self.key.shape[2]
        if self.places.boundaries is not None:
            longest = int(self.spans.diff().max())  # type: ignore[union-attr]
        return (longest + 8 * self.settings.key_block - 1) // (8 * self.settings.key_block)

    def _unpack(self, bits: Tensor) -> Tensor:
        """Bytes to bool `[B, Hk, Q, C]`."""
        shifts = torch.arange(8, dtype=torch.uint8, device=bits.device)
        wide = ((bits[..., None] >> shifts) & 1).bool().flatten(-2)
        _, count = self.places.key_blocks(self.settings)
        if self.places.boundaries is None:
            return wide[..., :count]
        opened = wide.new_zeros(*wide.shape[:3], count)
        for queries, keys in self._blocks_of_sequences():
            opened[:, :, queries, keys] = wide[:, :, queries, : keys.stop - keys.start]
        return opened

    def _pack(self, opened: Tensor) -> Tensor:
        wide = opened.new_zeros(*opened.shape[:3], 8 * self._bytes())
        if self.places.boundaries is None:
            wide[..., : opened.shape[3]] = opened
        else:
            for queries, keys in self._blocks_of_sequences():
                wide[:, :, queries, : keys.stop - keys.start] = opened[:, :, queries, keys]
        weights = torch.tensor([1 << bit for bit in range(8)], device=opened.device)
        return (wide.unflatten(-1, (-1, 8)) * weights).sum(-1).to(torch.uint8)

    def _blocks_of_sequences(self) -> list[tuple[slice, slice]]:
        """The query blocks and the key blocks of each packed sequence."""
        found = []
        query, key = 0, 0
        bounds = self.places.boundaries or ()
        for begin, end in pairwise(bounds):
            queries = (end - begin + self.settings.unit - 1) // self.settings.unit
            keys = (end - begin + self.settings.key_block - 1) // self.settings.key_block
            found.append((slice(query, query + queries), slice(key, key + keys)))
            query, key = query + queries, key + keys
        return found

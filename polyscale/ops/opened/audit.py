"""What a call of opened attention lost, exactly, on the rows it sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from polyscale.ops.opened.places import Places
from polyscale.ops.opened.reference import Choice, view_of, visible_keys
from polyscale.ops.opened.settings import Settings


@dataclass(frozen=True)
class Audit:
    """Exact figures of the sampled rows, and the choice that was made.

    Example:
        >>> import polyscale as ps
        >>> x = torch.randn(1, 2, 300, 16)
        >>> _, audit = ps.opened_attention(x, x, x, heavy=64, return_audit=True)
        >>> audit.rows[0, -2:].tolist(), audit.kept.shape
        ([295, 299], torch.Size([1, 2, 38]))
    """

    rows: Tensor
    """Sampled positions `[B, R]`, in order, -1 where a row of the batch has fewer."""
    kept: Tensor
    """Softmax mass that each sampled row keeps as single keys, `[B, H, R]`; 0 where rows is -1."""
    kl: Tensor
    """`KL(row || softmax)` in nats, `[B, H, R]`; 0 where rows is -1."""
    opened: Tensor
    """The heavy choice: bool `[B, Hk, query blocks, key blocks]` (strict: groups of `sample`)."""
    heads: int
    places: Places = field(repr=False)
    settings: Settings = field(repr=False)

    @classmethod
    def of(cls, choice: Choice, heads: int, places: Places, settings: Settings) -> Audit:
        """From what a selection found."""
        there = (choice.rows >= 0)[:, None]
        kept, kl = choice.kept.masked_fill(~there, 0.0), choice.kl.clamp(min=0.0)
        return cls(choice.rows, kept, kl, choice.opened, heads, places, settings)

    def mask(self) -> Tensor:
        """Every pair of query and key that is seen, bool `[B, H, N, M]`: to look at and to test."""
        view = view_of(self.opened, self.places, self.settings)  # [B, Hk, Q, M]
        block, _ = self.places.query_blocks(self.settings)  # [B, N]
        index = block.clamp(min=0)[:, None, :, None].expand(-1, view.shape[1], -1, view.shape[3])
        seen = view.gather(2, index) & visible_keys(self.places, self.settings)[:, None]
        return seen.repeat_interleave(self.heads // view.shape[1], dim=1)

    @property
    def share(self) -> float:
        """Pairs of query and key that are computed, of those that softmax attention computes."""
        places, settings = self.places, self.settings
        key_block, _ = places.key_blocks(settings)
        number, count = places.query_blocks(settings)
        position = places.of_queries(places.position)
        sequence = places.of_queries(places.sequence)
        last = places.of_queries(places.length) - 1
        seen = visible = 0
        # Of a query block's keys those before it are seen by all of its queries, and its own by
        # those that are not earlier: one block of queries at a time, so that memory stays linear.
        for block in range(count):
            mine = number == block  # [B, N]
            queries = mine.sum(1)  # [B]
            if not int(queries.sum()):
                continue
            first = torch.where(mine, position, 1 << 40).amin(1) // settings.unit * settings.unit
            own = torch.where(mine, sequence, -1).amax(1)
            same = (places.sequence == own[:, None]) & places.real  # [B, M]
            view = _view_of_block(self.opened[:, :, block], key_block, first, places, settings)
            view = view & same[:, None]
            if not settings.causal:
                seen += int((view.sum(-1) * queries[:, None]).sum())
                visible += int((torch.where(mine, last + 1, 0).sum(1)).sum()) * view.shape[1]
                continue
            before = (places.position < first[:, None])[:, None]
            inside = torch.where(mine, position - first[:, None] + 1, 0).sum(1)  # own keys
            seen += int(((view & before).sum(-1) * queries[:, None] + inside[:, None]).sum())
            visible += int(torch.where(mine, position + 1, 0).sum()) * view.shape[1]
        return seen / visible if visible else 1.0


def _view_of_block(
    opened: Tensor, key_block: Tensor, first: Tensor, places: Places, settings: Settings
) -> Tensor:
    """What one query block sees, whatever sequence: bool `[B, Hk, M]`."""
    index = key_block.clamp(min=0)[:, None].expand(-1, opened.shape[1], -1)
    end = first + settings.unit + (0 if settings.causal else settings.near)
    position = places.position
    near = (position >= first[:, None] - settings.near) & (position < end[:, None])
    return opened.gather(-1, index) | (near | places.sinks)[:, None]

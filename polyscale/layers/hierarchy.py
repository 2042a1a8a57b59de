"""The input of a layer at L resolutions, for whole sequences and for a few tokens at a time."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyscale.layers.filters import CausalFilter
from polyscale.ops.downsample.api import downsample
from polyscale.ops.layout import PackedLayout, level_length
from polyscale.ops.rows import gather_rows


class WholeInput(NamedTuple):
    """The input of every level, for sequences that start here."""

    fine: Tensor  # level 0, [B, T, C]
    coarse: Tensor | None  # the levels above it, concatenated: [B, T_1 + T_2 + .., C]
    sizes: list[int]  # T_1, T_2, ..

    @property
    def levels(self) -> list[Tensor]:
        """The input of each level, `[B, T_l, C]`."""
        if self.coarse is None:
            return [self.fine]
        return [self.fine, *self.coarse.split(self.sizes, dim=1)]


class NewInput(NamedTuple):
    """What new tokens add to the levels, and what the filters need to continue after them."""

    levels: list[Tensor]  # per level that gains an entry, the new ones, [B, Q_l, C]
    positions: list[Tensor]  # of the first token of each new entry, [Q_l] or [B, Q_l]
    tails: list[Tensor]  # per filter: its last width - 1 inputs, [B, width - 1, C]


class Hierarchy(nn.Module):
    """L - 1 trainable causal downsamplings by two, and optionally a filter of the finest level.

    Example:
        >>> [x.shape[1] for x in Hierarchy(8, levels=3)(torch.randn(1, 10, 8))]
        [10, 5, 3]
    """

    def __init__(
        self,
        channels: int,
        levels: int,
        downsampling: str = "depthwise",
        downsampling_width: int = 2,
        filter_width: int = 0,
    ) -> None:
        super().__init__()
        self.levels = levels
        self.input_filter: CausalFilter | None = None
        if filter_width:
            mode = "dense" if downsampling == "dense" else "depthwise"
            self.input_filter = CausalFilter(channels, filter_width, 1, mode, start="identity")
        self.downsamplers = nn.ModuleList(
            CausalFilter(channels, downsampling_width, 2, downsampling) for _ in range(levels - 1)
        )

    def forward(self, x: Tensor, packed: PackedLayout | None = None) -> list[Tensor]:
        """The input `[B, T, C]` at every level, `[B, T_l, C]`; sequences begin at column 0."""
        return self.whole(x, packed).levels

    def whole(
        self, x: Tensor, packed: PackedLayout | None = None, impl: str = "auto"
    ) -> WholeInput:
        """The input `[B, T, C]` at every level; `impl` is that of `ops.downsample`."""
        if self.input_filter is not None:
            if packed is None:
                x = self.input_filter(x)
            else:
                column = torch.arange(x.shape[1], device=x.device)
                x = self.input_filter.at(x, column[None], packed.position[None])
        if not self.downsamplers:
            return WholeInput(x, None, [])
        if packed is None:
            sizes = [level_length(x.shape[1], level) for level in range(1, self.levels)]
        else:
            sizes = [bounds[-1] for bounds in packed.boundaries[1:]]
        filters = [downsampler.taps for downsampler in self._downsamplers()]
        fine, coarse = downsample(x, filters, packed, impl)
        return WholeInput(fine, coarse, sizes)

    def tails(self, x: Tensor, levels: list[Tensor], lengths: Tensor) -> list[Tensor]:
        """What every filter needs to continue after rows of these lengths: its last inputs.

        Args:
            x: `[B, T, C]`, the input of the layer.
            levels: the same at every level, as `forward` returns it.
            lengths: `[B]` tokens of each row.
        """
        tails = []
        if self.input_filter is not None:
            tails.append(_last(x, lengths, self.input_filter.width - 1))
        for level, downsampler in enumerate(self._downsamplers()):
            filled = (lengths + (2**level - 1)) >> level
            tails.append(_last(levels[level], filled, downsampler.width - 1))
        return tails

    def advance(self, x: Tensor, tails: list[Tensor], seen: int) -> NewInput:
        """Continue after `seen` tokens in every row with `x` `[B, Q, C]`.

        Level l gains an entry every `2**l` tokens, so mostly there is little to do.
        """
        tails, levels = list(tails), [x]
        positions = [torch.arange(seen, seen + x.shape[1], device=x.device)]
        number = 0
        if self.input_filter is not None:
            extended, tails[0] = _extended(tails[0], x)
            history = self.input_filter.width - 1
            levels = [self.input_filter.slide(extended, history, x.shape[1])]
            number = 1
        for level, downsampler in enumerate(self._downsamplers(), start=1):
            new = levels[-1].shape[1]
            extended, tails[number] = _extended(tails[number], levels[-1])
            opened = (seen + 1) >> 1
            gained = ((seen + new + 1) >> 1) - opened
            if not gained:
                break
            newest_tap = 2 * opened - seen + downsampler.width - 1
            levels.append(downsampler.slide(extended, newest_tap, gained))
            first, end = opened << level, (opened + gained) << level
            positions.append(torch.arange(first, end, 1 << level, device=x.device))
            seen, number = opened, number + 1
        return NewInput(levels, positions, tails)

    def advance_rows(self, x: Tensor, tails: list[Tensor], seen: Tensor, count: Tensor) -> NewInput:
        """Continue after `seen` `[B]` tokens with the first `count` `[B]` of `x` `[B, Q, C]`.

        A row may gain fewer than `Q_l` entries; the rest of its entries are unused.
        """
        batch, length = x.shape[:2]
        column = torch.arange(length, device=x.device)
        new_tails, levels, positions = [], [x], [seen[:, None] + column]
        tails = list(tails)
        if self.input_filter is not None:
            extended = torch.cat((tails.pop(0), x), dim=1)
            history = self.input_filter.width - 1
            levels = [self.input_filter.at(extended, (column + history).expand(batch, -1))]
            new_tails.append(_window(extended, count, history))
        pairs = zip(self._downsamplers(), tails, strict=True)
        for level, (downsampler, tail) in enumerate(pairs, start=1):
            extended = torch.cat((tail, levels[-1]), dim=1)
            history = downsampler.width - 1
            new_tails.append(_window(extended, count, history))
            opened = (seen + 1) >> 1
            room = level_length(levels[-1].shape[1], 1)
            number = opened[:, None] + torch.arange(room, device=x.device)
            newest_tap = 2 * number - seen[:, None] + history
            levels.append(downsampler.at(extended, newest_tap.clamp(max=extended.shape[1] - 1)))
            positions.append(number << level)
            seen, count = opened, ((seen + count + 1) >> 1) - opened
        return NewInput(levels, positions, new_tails)

    def _downsamplers(self) -> list[CausalFilter]:
        return list(self.downsamplers)  # type: ignore[arg-type]


def _extended(tail: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The new entries after the tail, and the tail of both."""
    extended = torch.cat((tail, new), dim=1)
    return extended, extended[:, extended.shape[1] - tail.shape[1] :]


def _last(x: Tensor, lengths: Tensor, size: int) -> Tensor:
    """The last `size` of each row's first `lengths` entries, zeros where there are fewer."""
    return _window(F.pad(x, (0, 0, size, 0)), lengths, size)


def _window(x: Tensor, start: Tensor, size: int) -> Tensor:
    """`size` entries of `[B, T, C]` from each row's own start."""
    return gather_rows(x, start[:, None] + torch.arange(size, device=x.device))

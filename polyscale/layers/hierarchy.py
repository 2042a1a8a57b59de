"""The input of a layer at L resolutions, for whole sequences and for a few tokens at a time."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyscale.layers.filters import CausalFilter, take
from polyscale.ops.hkt.layout import PackedLayout, level_length
from polyscale.ops.hkt.native import downsample as native


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
        fine, coarse, sizes = self.fine_and_coarse(x, packed)
        return [fine] if coarse is None else [fine, *coarse.split(sizes, dim=1)]

    def fine_and_coarse(
        self, x: Tensor, packed: PackedLayout | None = None, fused: bool = True
    ) -> tuple[Tensor, Tensor | None, list[int]]:
        """Level 0 `[B, T, C]`, the levels above it one after the other, and their lengths.

        `fused` lets the native kernel do it where it can; it has first derivatives only.
        """
        if packed is not None:
            fine, *levels = self._forward_packed(x, packed)
            return fine, torch.cat(levels, dim=1) if levels else None, _lengths(levels)
        fine = x if self.input_filter is None else self.input_filter(x)
        if not self.downsamplers:
            return fine, None, []
        weights = self._tap_weights(x) if fused else None
        if weights is not None and native.takes(fine, weights):
            sizes = [level_length(x.shape[1], level) for level in range(1, self.levels)]
            return *native.downsample(fine, weights), sizes
        levels = [fine]
        for downsample in self._downsamplers():
            levels.append(downsample(levels[-1]))
        return fine, torch.cat(levels[1:], dim=1), _lengths(levels[1:])

    def _tap_weights(self, x: Tensor) -> Tensor | None:
        """`[L - 1, width, C]`; None if some filter takes matrices, or they differ in width."""
        weights = [downsample.tap_weights(x) for downsample in self._downsamplers()]
        present = [weight for weight in weights if weight is not None]
        if len(present) < len(weights) or len({len(weight) for weight in present}) > 1:
            return None
        return torch.stack(present)

    def _forward_packed(self, x: Tensor, packed: PackedLayout) -> list[Tensor]:
        inputs = [x]
        if self.input_filter is not None:
            column = torch.arange(x.shape[1], device=x.device)
            inputs = [self.input_filter.at(x, column[None], packed.position[None])]
        for level, downsample in enumerate(self._downsamplers()):
            sequence, number = packed.level_position(level + 1)
            index = packed.level_starts[level][sequence] + 2 * number
            inputs.append(downsample.at(inputs[-1], index[None], 2 * number[None]))
        return inputs

    def tail(self, x: Tensor, inputs: list[Tensor], lengths: Tensor) -> list[Tensor]:
        """What every filter needs to go on after rows of these lengths: its last inputs."""
        tails = []
        if self.input_filter is not None:
            tails.append(_last(x, lengths, self.input_filter.width - 1))
        for level, downsample in enumerate(self._downsamplers()):
            filled = (lengths + (2**level - 1)) >> level
            tails.append(_last(inputs[level], filled, downsample.width - 1))
        return tails

    def advance(
        self, x: Tensor, tails: list[Tensor], seen: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Go on after `seen` tokens in every row with `x` `[B, Q, C]`.

        Returns the new entries `[B, Q_l, C]` of the levels that gain any, and the tails. Level l
        gains one every `2**l` tokens, so mostly there is little to do.
        """
        tails, entries = list(tails), [x]
        number = 0
        if self.input_filter is not None:
            extended, tails[0] = _extended(tails[0], x)
            history = self.input_filter.width - 1
            entries = [self.input_filter.slide(extended, history, x.shape[1])]
            number = 1
        for downsample in self._downsamplers():
            new = entries[-1].shape[1]
            extended, tails[number] = _extended(tails[number], entries[-1])
            opened = (seen + 1) >> 1
            gained = ((seen + new + 1) >> 1) - opened
            if not gained:
                break
            newest_tap = 2 * opened - seen + downsample.width - 1
            entries.append(downsample.slide(extended, newest_tap, gained))
            seen, number = opened, number + 1
        return entries, tails

    def extend(
        self, x: Tensor, tails: list[Tensor], seen: Tensor, count: Tensor
    ) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        """Go on after `seen` `[B]` tokens with the first `count` `[B]` of `x` `[B, Q, C]`.

        Returns per level the new entries `[B, Q_l, C]` and their numbers `[B, Q_l]`, and the
        tails. A row may open fewer blocks than `Q_l`; what follows them is nobody's.
        """
        batch, length = x.shape[:2]
        column = torch.arange(length, device=x.device)
        new_tails, inputs, numbers = [], [x], [seen[:, None] + column]
        tails = list(tails)
        if self.input_filter is not None:
            extended = torch.cat((tails.pop(0), x), dim=1)
            history = self.input_filter.width - 1
            inputs = [self.input_filter.at(extended, (column + history).expand(batch, -1))]
            new_tails.append(_window(extended, count, history))
        for downsample, tail in zip(self._downsamplers(), tails, strict=True):
            extended = torch.cat((tail, inputs[-1]), dim=1)
            history = downsample.width - 1
            new_tails.append(_window(extended, count, history))
            opened = (seen + 1) >> 1
            room = level_length(inputs[-1].shape[1], 1)
            number = opened[:, None] + torch.arange(room, device=x.device)
            newest_tap = 2 * number - seen[:, None] + history
            inputs.append(downsample.at(extended, newest_tap.clamp(max=extended.shape[1] - 1)))
            numbers.append(number)
            seen, count = opened, ((seen + count + 1) >> 1) - opened
        return inputs, numbers, new_tails

    def _downsamplers(self) -> list[CausalFilter]:
        return list(self.downsamplers)  # type: ignore[arg-type]


def _lengths(levels: list[Tensor]) -> list[int]:
    return [level.shape[1] for level in levels]


def _extended(tail: Tensor, new: Tensor) -> tuple[Tensor, Tensor]:
    """The new entries after the last old ones, and as many of the last of both."""
    extended = torch.cat((tail, new), dim=1)
    return extended, extended[:, extended.shape[1] - tail.shape[1] :]


def _last(x: Tensor, lengths: Tensor, size: int) -> Tensor:
    """The last `size` of each row's first `lengths` entries, zeros where there are fewer."""
    return _window(F.pad(x, (0, 0, size, 0)), lengths, size)


def _window(x: Tensor, start: Tensor, size: int) -> Tensor:
    """`size` entries of `[B, T, C]` from each row's own start."""
    return take(x, start[:, None] + torch.arange(size, device=x.device))

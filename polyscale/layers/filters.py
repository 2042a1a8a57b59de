"""Causal filters over time: the trainable downsampling between two levels, and the filter of
level 0 (the same with stride 1).

`y[i] = sum_k W[k] x[stride * i - k]`; what lies before the start counts as zero. So `y[i]` sees
nothing later than `x[stride * i]`.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

MODES = ("depthwise", "dense", "mean")


class CausalFilter(nn.Module):
    """One causal filter on `[B, T, C]`.

    Args:
        channels: C.
        width: number of taps.
        stride: 2 between levels, 1 at level 0.
        mode: `"depthwise"` (a weight per tap and channel), `"dense"` (a matrix per tap), or
            `"mean"` (fixed `1 / width`).
        start: `"mean"` or `"identity"` (the newest tap alone), where training begins.

    Example:
        >>> CausalFilter(8, width=2, stride=2)(torch.randn(1, 5, 8)).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        channels: int,
        width: int = 2,
        stride: int = 2,
        mode: str = "depthwise",
        start: str = "mean",
    ) -> None:
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"downsampling must be one of {MODES}, got {mode!r}")
        if width < 1:
            raise ValueError(f"the width of a filter must be at least 1, got {width}")
        self.channels, self.width, self.stride = channels, width, stride
        self.mode, self.start = mode, start
        self.weight: nn.Parameter | None = None  # [width, C] or [width, C in, C out]
        if mode != "mean":
            shape = (width, channels) if mode == "depthwise" else (width, channels, channels)
            self.weight = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The mean of the taps, or the newest tap alone."""
        if self.weight is not None:
            self.weight.copy_(self.initial_weight())

    def initial_weight(self) -> Tensor:
        """Where training begins, in the shape of `weight`."""
        taps = torch.zeros(self.width)
        taps[0] = 1.0
        if self.start == "mean":
            taps.fill_(1.0 / self.width)
        if self.mode == "dense":
            return taps[:, None, None] * torch.eye(self.channels)
        return taps[:, None].expand(self.width, self.channels)

    def forward(self, x: Tensor) -> Tensor:
        """Filter whole sequences that start at column 0: `[B, ceil(T / stride), C]`."""
        history = self.width - 1
        return self.slide(F.pad(x, (0, 0, history, 0)), history, -(-x.shape[1] // self.stride))

    def slide(self, x: Tensor, first: int, count: int) -> Tensor:
        """Filter where the newest taps are `x[:, first + stride * i]` for `i < count`.

        `first` is at least `width - 1`: the older taps must be there, too.
        """
        reach = self.stride * (count - 1) + 1 if count else 0
        newest = range(first, first - self.width, -1)
        return self._combine([x[:, start : start + reach : self.stride] for start in newest])

    def at(self, x: Tensor, index: Tensor, position: Tensor | None = None) -> Tensor:
        """Filter where the newest tap is `x[b, index[b, n]]`: `[B, N, C]`.

        `position` (the place of that tap in its own sequence) cuts what lies before the start.
        """
        taps = []
        for tap in range(self.width):
            picked = take(x, (index - tap).clamp(min=0))
            if position is not None and tap > 0:
                picked = picked.masked_fill((position < tap)[..., None], 0.0)
            taps.append(picked)
        return self._combine(taps)

    def _combine(self, taps: list[Tensor]) -> Tensor:
        if self.weight is None:
            return torch.stack(taps).mean(0)
        if self.mode == "dense":
            return torch.matmul(torch.cat(taps, dim=-1), self.weight.flatten(0, 1))
        total = taps[0] * self.weight[0]
        for tap, weight in zip(taps[1:], self.weight[1:], strict=True):
            total = torch.addcmul(total, tap, weight)
        return total

    def tap_weights(self, x: Tensor) -> Tensor | None:
        """One weight per tap and channel, `[width, C]`; None if it takes a matrix per tap."""
        if self.mode == "dense":
            return None
        if self.weight is not None:
            return self.weight
        return x.new_full((self.width, self.channels), 1.0 / self.width)

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"{self.channels}, width={self.width}, stride={self.stride}, mode={self.mode!r}"


def take(x: Tensor, index: Tensor) -> Tensor:
    """`x[b, index[b, n]]`: rows of `[B, T, C]` by `[B, N]`."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))

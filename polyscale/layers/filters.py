"""Causal filters over time: downsampling between two levels, and the filter of level 0.

`y[i] = sum_k W[k] x[stride * i - k]`; what precedes the start counts as zero. So `y[i]` sees
nothing later than `x[stride * i]`. The stride is 2 between levels and 1 at level 0.
"""

import torch
from torch import Tensor, nn

from polyscale.checks import check_choice, check_integer
from polyscale.ops.downsample.api import FilterTaps, filter_at, filter_sequence, filter_slide

MODES = ("depthwise", "dense", "mean")


class CausalFilter(nn.Module):
    """One causal filter on `[B, T, C]`.

    Args:
        channels: C.
        width: number of taps.
        stride: 2 between levels, 1 at level 0.
        mode: `"depthwise"` (a weight per tap and channel), `"dense"` (a matrix per tap), or
            `"mean"` (fixed `1 / width`).
        start: where training begins: `"mean"` or `"identity"` (the newest tap alone).

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
        check_choice("downsampling", mode, MODES)
        width = check_integer("width", width, least=1)
        self.channels, self.width, self.stride = channels, width, stride
        self.mode, self.start = mode, start
        self.weight: nn.Parameter | None = None  # [width, C] or [width, C in, C out]
        if mode != "mean":
            shape = (width, channels) if mode == "depthwise" else (width, channels, channels)
            self.weight = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the weights to where training begins."""
        if self.weight is not None:
            self.weight.copy_(self.initial_weight())

    def initial_weight(self) -> Tensor:
        """The mean of the taps, or the newest tap alone, in the shape of `weight`."""
        taps = torch.zeros(self.width)
        taps[0] = 1.0
        if self.start == "mean":
            taps.fill_(1.0 / self.width)
        if self.mode == "dense":
            return taps[:, None, None] * torch.eye(self.channels)
        return taps[:, None].expand(self.width, self.channels)

    @property
    def taps(self) -> FilterTaps:
        """What the operations on filters take."""
        return FilterTaps(self.width, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Filter whole sequences that start at column 0: `[B, ceil(T / stride), C]`."""
        return filter_sequence(x, self.taps, self.stride)

    def slide(self, x: Tensor, first: int, count: int) -> Tensor:
        """Filter where the newest taps are `x[:, first + stride * i]` for `i < count`.

        `first` is at least `width - 1`, so that the older taps exist as well.
        """
        return filter_slide(x, self.taps, self.stride, first, count)

    def at(self, x: Tensor, index: Tensor, position: Tensor | None = None) -> Tensor:
        """Filter where the newest tap is `x[b, index[b, n]]`: `[B, N, C]`.

        `position` is the position of that tap in its own sequence, so that taps before the
        sequence count as zero.
        """
        return filter_at(x, self.taps, index, position)

    def extra_repr(self) -> str:
        """Shown by print."""
        return f"{self.channels}, width={self.width}, stride={self.stride}, mode={self.mode!r}"

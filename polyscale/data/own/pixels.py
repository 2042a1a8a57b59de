"""Images of users as sequences of pixels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polyscale.data.splits import Split

_SHADES = " .:-=+*#%@"


class PixelSplit(Split):
    """Classified square images in row-major order, grey or in colour.

    >>> split = PixelSplit(torch.zeros(2, 4, 1).byte(), torch.tensor([0, 1]), lambda x: x.float())
    >>> split[1]["input_values"].shape, split.lengths.tolist()
    (torch.Size([4, 1]), [4, 4])
    """

    def __init__(self, pixels: Tensor, labels: Tensor, values: Callable[[Tensor], Tensor]) -> None:
        self.pixels = pixels  # [N, T, C], uint8
        self.labels: Tensor = labels.long()
        self.lengths = torch.full((len(pixels),), pixels.shape[1])
        self.groups = {"length": self.lengths}
        self.values = values

    def _sample(self, index: int) -> dict[str, Any]:
        return {"input_values": self.values(self.pixels[index]), "labels": self.labels[index]}

    def _text(self, index: int) -> str:
        """The image in ten shades; a line shows two rows, because letters are taller than wide."""
        side = round(self.pixels.shape[1] ** 0.5)
        image = self.pixels[index].float().mean(-1).view(side, side)
        rows = [image[row : row + 2].mean(0) for row in range(0, side, 2)]
        return "\n".join("".join(_SHADES[int(x * 10 / 256)] for x in row.tolist()) for row in rows)


def statistics(pixels: Tensor) -> tuple[float, float]:
    """Mean and standard deviation of bytes as numbers between 0 and 1.

    >>> statistics(torch.tensor([0, 255]).byte())
    (0.5, 0.5)
    """
    # Sums of bytes in float64 are exact in any order.
    counts = torch.bincount(pixels.flatten(), minlength=256).double()
    values = torch.arange(256).double() / 255
    mean = float(counts @ values / counts.sum())
    spread = float((counts @ (values - mean).square() / counts.sum()).sqrt())
    return mean, max(1e-6, spread)

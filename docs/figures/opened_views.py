"""Draws docs/figures/opened_views.svg: what each query sees, and how coarsely, in four views.

python docs/figures/opened_views.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

import polyscale as ps

LENGTH, WINDOW = 64, 4
OPENED = {"block": 8, "key_block": 4, "near": 8, "heavy": 8, "sample": 4, "sinks": 2}


def main() -> None:
    """One row for each query; a key seen alone is dark, in a group of n lighter."""
    torch.manual_seed(4)
    query, key = torch.randn(2, 1, 1, LENGTH, 8) * 1.4
    dropped, pooled = (opened_view(query, key, rest) for rest in ("drop", "pool"))
    views = {
        "softmax: all leaves": (torch.arange(LENGTH) <= torch.arange(LENGTH)[:, None]).int(),
        "HSA, columns:\nthe siblings of every ancestor": columns_view(),
        "opened, rest dropped:\nnear, sinks, heavy": dropped,
        "opened, rest pooled:\none mean for each key block": pooled,
    }
    plt.rcParams.update({"svg.hashsalt": "polyscale", "font.family": "sans-serif"})
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.6), sharey=True)
    for axis, (title, sizes) in zip(axes, views.items(), strict=True):
        shade = torch.where(sizes > 0, 1 / (1 + sizes.clamp(min=1).float().log2()), 0.0)
        axis.imshow(shade, cmap="Blues", vmin=0, vmax=1.1, extent=(0, LENGTH, LENGTH, 0))
        axis.set_title(title, fontsize=9)
        axis.set_xlabel("key")
        axis.set_xticks(range(0, LENGTH + 1, 16))
        axis.set_yticks(range(0, LENGTH + 1, 16))
    axes[0].set_ylabel("query")
    figure.tight_layout()
    path = Path(__file__).with_suffix(".svg")
    figure.savefig(path, metadata={"Date": None})
    print(path)


def columns_view() -> torch.Tensor:
    """How many keys share a weight with each, for causal HSA over windows of windows."""
    sizes = torch.zeros(LENGTH, LENGTH, dtype=torch.int32)
    row, column = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    size = LENGTH // WINDOW
    while size >= 1:
        siblings = (row // (size * WINDOW) == column // (size * WINDOW)) & (column <= row)
        sizes[siblings] = size  # a finer window overwrites its own part
        size //= WINDOW
    return sizes


def opened_view(query: torch.Tensor, key: torch.Tensor, rest: str) -> torch.Tensor:
    """The same for opened attention."""
    _, audit = ps.opened_attention(query, key, key, rest=rest, return_audit=True, **OPENED)
    seen = audit.mask()[0, 0]
    sizes = seen.int()
    if rest == "pool":
        first = torch.arange(LENGTH) // OPENED["block"] * OPENED["block"]
        end = (torch.arange(LENGTH) // OPENED["key_block"] + 1) * OPENED["key_block"]
        unseen = ~seen & (end <= first[:, None])
        count = unseen.unflatten(1, (-1, OPENED["key_block"])).sum(-1)
        sizes = sizes + unseen * count.repeat_interleave(OPENED["key_block"], 1)
    return sizes


if __name__ == "__main__":
    main()

"""Draws docs/figures/hkt_levels.svg: the scores of one HKT head on a random walk.

python docs/figures/hkt_levels.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

import polyscale as ps


def main() -> None:
    """Three levels at their own resolution, and what they are merged to."""
    torch.manual_seed(5)
    length = 32
    x = torch.randn(1, length, 16).cumsum(1) * 0.7
    layer = ps.HKTAttention(16, num_heads=1, levels=3)
    with torch.no_grad():
        _, details = layer(x, return_details=True)
    figure, axes = plt.subplots(1, 4, figsize=(11, 3.1))
    plt.rcParams.update({"svg.hashsalt": "polyscale", "font.family": "sans-serif"})
    merged = torch.zeros(length, length)
    look = {"cmap": "RdBu_r", "vmin": -4, "vmax": 4, "extent": (0, length, length, 0)}
    for level, scores in enumerate(details.level_scores):
        axis, weight = axes[level], details.level_weights[0, level]
        block = torch.arange(length) >> level
        merged += weight * scores[0, 0][block][:, block]
        axis.imshow(scores[0, 0], **look)
        size = scores.shape[-1]
        axis.set_title(f"level {level}: {size} x {size}\nweight {weight:.2f}", fontsize=10)
    future = torch.ones(length, length).triu(1).bool()
    axes[3].imshow(merged.masked_fill(future, float("nan")), **look)
    axes[3].set_title("merged by the weights,\ncausal", fontsize=10)
    for axis in axes:
        axis.set_xticks([0, length])
        axis.set_yticks([0, length])
        axis.set_xlabel("key position", fontsize=9)
    axes[0].set_ylabel("query position", fontsize=9)
    figure.tight_layout()
    path = Path(__file__).with_suffix(".svg")
    figure.savefig(path, metadata={"Date": None})
    print(path)


if __name__ == "__main__":
    main()

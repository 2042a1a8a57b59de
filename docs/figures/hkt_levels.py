"""Draws docs/figures/hkt_levels.svg: the scores of a trained HKT head on a ListOps expression.

The model is that of experiments/theory/hkt (two layers, three levels, trained on ListOps).

python docs/figures/hkt_levels.py
"""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import torch

import polyscale as ps
from polyscale.data.listops import encode

TRAINED = Path(__file__).parents[2] / "experiments" / "theory" / "hkt"
EXPRESSION = "[MAX 2 [MIN 4 7 3 ] [MED 1 9 5 ] 0 [SM 6 8 ] 4 ]"
LAYER, HEAD = 0, 1


def main() -> None:
    """Three levels at their own resolution, and what they are merged to."""
    model = ps.HKTForSequenceClassification.from_pretrained(TRAINED).eval()
    attention = model.model.blocks[LAYER].attention
    inputs: list[torch.Tensor] = []
    attention.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    tokens = EXPRESSION.split()
    with torch.no_grad():
        model(torch.tensor([encode(EXPRESSION)]))
        _, details = attention(inputs[0], return_details=True)
    length = len(tokens)
    figure, axes = plt.subplots(1, 4, figsize=(12, 3.9))
    plt.rcParams.update({"svg.hashsalt": "polyscale", "font.family": "sans-serif"})
    merged = torch.zeros(length, length)
    for level, scores in enumerate(details.level_scores):
        weight = details.level_weights[HEAD, level]
        block = torch.arange(length) >> level
        merged += weight * scores[0, HEAD][block][:, block]
        size = scores.shape[-1]
        title = f"level {level}: {size} x {size}\nweight {weight:.2f}"
        draw(axes[level], scores[0, HEAD], level, length, title)
    draw(axes[3], merged, 0, length, "merged by the weights:\nwhat softmax is taken of")
    for axis in axes:
        axis.set_xticks([at + 0.5 for at in range(length)], tokens, rotation=90, fontsize=5.5)
        axis.set_yticks([at + 0.5 for at in range(length)], tokens, fontsize=5.5)
        axis.tick_params(length=0)
    figure.tight_layout()
    path = Path(__file__).with_suffix(".svg")
    figure.savefig(path, metadata={"Date": None})
    print(path)


def draw(axis: plt.Axes, scores: torch.Tensor, level: int, length: int, title: str) -> None:
    """One matrix, red above zero and blue below, over the tokens of the expression."""
    limit = float(scores.abs().max())
    reach = len(scores) << level  # the last block may be longer than what is left
    axis.imshow(scores, cmap="RdBu_r", vmin=-limit, vmax=limit, extent=(0, reach, reach, 0))
    axis.set_xlim(0, length)
    axis.set_ylim(length, 0)
    axis.set_title(title, fontsize=10)


if __name__ == "__main__":
    main()

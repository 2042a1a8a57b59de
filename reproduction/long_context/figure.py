"""The figure of quality: perplexity against the share of pairs and against seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyscale._extras import require
from reproduction.long_context.settings import COUNTED, DENSE

PROMPT = "4096 + 512"
FAMILIES = {
    "opened, heavy": "opened, a number",
    "opened, mass": "opened, a share of the mass",
    "Quest": "Quest",
    "pooled means": "pooled means",
    "antidiagonal": "antidiagonal",
    "true mass": "true mass (limit)",
    "streaming": "streaming",
}


def draw_quality(summary: dict[str, Any], path: Path) -> bool:
    """Draw perplexity of held-out articles against work; return whether there was any.

    Seconds are those of the first token after the same prompt, where they were measured.
    """
    points = _points(summary)
    if not points:
        return False
    figure = require("matplotlib.figure", "train", "a plot").Figure(
        figsize=(9, 3.6), layout="constrained"
    )
    axes = figure.subplots(1, 2, sharey=True)
    for number, name in enumerate(FAMILIES.values()):
        own = [point for point in points if point["family"] == name]
        for axis, field in zip(axes, ("share", "seconds"), strict=True):
            measured = sorted((p for p in own if p[field] is not None), key=lambda p: p[field])
            if measured:
                axis.errorbar(
                    [point[field] for point in measured],
                    [point["ratio"] for point in measured],
                    yerr=[point["error"] for point in measured],
                    color=f"C{number}",
                    marker="o",
                    markersize=4,
                    linewidth=1,
                    capsize=2,
                    label=name,
                )
    for axis in axes:
        axis.axhline(1, color="grey", linewidth=0.8)
    axes[0].set(xlabel="share of pairs", ylabel="perplexity, times softmax attention's")
    axes[1].set(xlabel="seconds to the first token")
    axes[0].legend(fontsize=7, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    return True


def _points(summary: dict[str, Any]) -> list[dict[str, Any]]:
    seconds = {
        _plain(row["setting"]): row["seconds"]
        for row in summary.get("timing", ())
        if row["item"] == f"first token, {PROMPT.split()[0]} tokens" and row["setting"] != DENSE
    }
    points = []
    for row in summary.get("perplexity", ()):
        name = _plain(row["setting"])
        family = next((FAMILIES[start] for start in FAMILIES if name.startswith(start)), None)
        if family is None or row["share"] is None or row["draw"] != "held out":
            continue
        if row["length"] == PROMPT:
            points.append(
                {
                    "family": family,
                    "share": row["share"],
                    "seconds": seconds.get(name),
                    "ratio": row["ratio"],
                    "error": row["error"],
                }
            )
    return points


def _plain(name: str) -> str:
    return name.removesuffix(COUNTED)

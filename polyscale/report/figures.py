"""Figures as inline SVG that take their colours from the page they stand in.

matplotlib draws them without its global state (no pyplot). Text and lines are drawn in marker
colours that are then replaced by CSS variables, so that one picture suits light and dark pages.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from polyscale._extras import require

Curve = Sequence[tuple[float, float]]  # (step, value)
LevelWeights = Sequence[Sequence[Sequence[float]]]  # layer, head, level

# Marker colour -> the CSS variable that takes its place.
_INK, _GRID, _ON_SERIES = "#010203", "#040506", "#070809"
_SERIES = ("#0a0b01", "#0a0b02", "#0a0b03", "#0a0b04")
_LEVELS = ("#0c0d01", "#0c0d02", "#0c0d03", "#0c0d04")
_VARIABLES = {
    _INK: "var(--ink)",
    _GRID: "var(--grid)",
    _ON_SERIES: "var(--on-series)",
    **{marker: f"var(--series-{index})" for index, marker in enumerate(_SERIES)},
    **{marker: f"var(--level-{index})" for index, marker in enumerate(_LEVELS)},
}
_DASHES = ("-", (0, (6, 2)), (0, (2, 2)), (0, (6, 2, 2, 2)))


def line_chart(
    curves: Mapping[str, Curve],
    *,
    title: str,
    y_label: str,
    percent: bool = False,
    reference: tuple[str, float] | None = None,
) -> str:
    """One line for each named curve; `reference` adds a level line such as the majority rate.

    >>> line_chart({"HKT": [(0, 0.1), (10, 0.6)]}, title="Accuracy", y_label="accuracy")[:4]
    '<svg'
    """
    if not curves:
        raise ValueError("curves takes at least one named curve, got none")
    figure, axes = _new_chart(title, width=4.4, height=3.0)
    for index, (name, curve) in enumerate(curves.items()):
        if not curve:
            raise ValueError(f"curves[{name!r}] takes at least one point, got none")
        steps, values = zip(*curve, strict=True)
        axes.plot(
            steps,
            values,
            label=name,
            color=_SERIES[index % len(_SERIES)],
            linestyle=_DASHES[index % len(_DASHES)],  # told apart without colour, too
            linewidth=1.8,
            marker="o" if len(curve) == 1 else None,
        )
    if reference is not None:
        axes.axhline(reference[1], label=reference[0], color=_INK, linewidth=1, linestyle=":")
    if percent:
        axes.set_ylim(0, 1)
        ticker = require("matplotlib.ticker", "train", "a figure")
        axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))
    axes.set_xlabel("training step", color=_INK)
    axes.set_ylabel(y_label, color=_INK)
    axes.legend(frameon=False, labelcolor=_INK, fontsize=9)
    return _to_svg(figure, title)


def level_chart(weights: LevelWeights, *, title: str) -> str:
    """One stacked bar for each head of each layer: the share of every level, which add up to 1.

    >>> level_chart([[[0.5, 0.3, 0.2], [0.6, 0.2, 0.2]]], title="Level weights")[:4]
    '<svg'
    """
    if not weights or not weights[0]:
        raise ValueError("weights takes at least one layer with one head, got none")
    bars = [
        (layer + 1, head + 1, shares)
        for layer, heads in enumerate(weights)
        for head, shares in enumerate(heads)
    ]
    figure, axes = _new_chart(title, width=4.4, height=1.3 + 0.27 * (len(bars) + len(weights)))
    # A gap of one bar between layers.
    places = [index + (layer - 1) * 0.7 for index, (layer, _, _) in enumerate(bars)]
    left = [0.0] * len(bars)
    for level in range(len(bars[0][2])):
        widths = [shares[level] for _, _, shares in bars]
        rectangles = axes.barh(
            places,
            widths,
            left=left,
            height=0.8,
            color=_LEVELS[level % len(_LEVELS)],
            label=f"level {level}",
        )
        axes.bar_label(
            rectangles,
            labels=[f"{width:.2f}" if width >= 0.08 else "" for width in widths],
            label_type="center",
            color=_ON_SERIES,
            fontsize=8,
        )
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_yticks(places, [f"layer {layer}, head {head}" for layer, head, _ in bars])
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.grid(False)
    axes.set_xlabel("weight of the level (each row adds up to 1)", color=_INK)
    figure.legend(
        *axes.get_legend_handles_labels(),
        loc="outside lower center",
        ncols=4,
        frameon=False,
        labelcolor=_INK,
        fontsize=9,
    )
    return _to_svg(figure, title)


def _new_chart(title: str, *, width: float, height: float) -> tuple[Any, Any]:
    figure = require("matplotlib.figure", "train", "a figure").Figure(
        figsize=(width, height), layout="constrained"
    )
    axes = figure.add_subplot()
    axes.set_title(title, color=_INK, fontsize=11, loc="left")
    axes.tick_params(colors=_INK, labelsize=9, length=0)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_GRID)
    return figure, axes


def _to_svg(figure: Any, title: str) -> str:
    """The <svg> element alone: scalable, named for screen readers, in the page's colours."""
    matplotlib = require("matplotlib", "train", "a figure")
    buffer = io.StringIO()
    # Text stays text (small, searchable); a fixed salt gives the same file for the same numbers.
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": title, "font.family": "sans-serif"}
    ):
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=empty)
    svg = buffer.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # Inside HTML the namespace declarations are of no use, and they look like external links.
    svg = re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    # A style sheet inside an inline figure would apply to the whole page.
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family: [^;\"]*", "font-family: inherit", svg)
    # Sizes come from the page; identifiers must be unique among the figures of one page.
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    prefix = re.sub(r"\W+", "-", title.lower()).strip("-")
    svg = re.sub(r'\bid="', f'id="{prefix}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{prefix}-", svg)
    for marker, variable in _VARIABLES.items():
        svg = svg.replace(marker, variable)
    return svg.replace("<svg", f'<svg role="img" aria-label="{escape(title)}"', 1)

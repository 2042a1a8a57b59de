"""Figures as inline SVG that take their colours from the page around them.

matplotlib draws them without its global state (no pyplot). Text and lines are drawn in marker
colours that are then replaced by CSS variables, so that one picture suits light and dark pages;
`standalone` puts the colours of a light page in, for a file of its own.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from polyscale._extras import require
from polyscale.report.colours import FIGURE_LIGHT as LIGHT

Curve = Sequence[tuple[float, float]]  # (step, value)
Band = Sequence[tuple[float, float, float]]  # (step, low, high)
LevelWeights = Sequence[Sequence[Sequence[float]]]  # layer, head, level

# Marker colour -> the CSS variable that replaces it.
_INK, _GRID, _ON_SERIES = "#010203", "#040506", "#070809"
_SERIES = tuple(f"#0a0b{index + 1:02d}" for index in range(8))
_LEVELS = tuple(f"#0c0d{index + 1:02d}" for index in range(5))
_VARIABLES = {
    _INK: "var(--ink)",
    _GRID: "var(--grid)",
    _ON_SERIES: "var(--on-series)",
    **{marker: f"var(--series-{index})" for index, marker in enumerate(_SERIES)},
    **{marker: f"var(--level-{index})" for index, marker in enumerate(_LEVELS)},
}
_DASHES = ("-", (0, (6, 2)), (0, (2, 2)), (0, (6, 2, 2, 2)))
_MARKS = ("o", "s", "^", "D")


class GroupPoint(NamedTuple):
    """A value for one group of samples, with the reach of its error bar (None for no bar)."""

    group: str
    value: float
    error: float | None = None


def line_chart(
    curves: Mapping[str, Curve],
    *,
    title: str,
    y_label: str,
    percent: bool = False,
    reference: tuple[str, float] | None = None,
    bands: Mapping[str, Band] | None = None,
    levels: bool = False,
) -> str:
    """One line for each named curve, with a band around those that `bands` names.

    `reference` adds a horizontal line such as the majority rate; `levels` uses the level colours.

    >>> line_chart({"HKT": [(0, 0.1), (10, 0.6)]}, title="Accuracy", y_label="accuracy")[:4]
    '<svg'
    """
    if not curves:
        raise ValueError("curves must hold at least one named curve, got none")
    colours = _LEVELS if levels else _SERIES
    figure, axes = _new_chart(title, width=4.4, height=3.0)
    for index, (name, curve) in enumerate(curves.items()):
        if not curve:
            raise ValueError(f"curves[{name!r}] must have at least one point, got none")
        steps, values = zip(*curve, strict=True)
        colour, turn = colours[index % len(colours)], index // len(colours)
        axes.plot(
            steps,
            values,
            label=name,
            color=colour,
            linestyle=_DASHES[(index + turn) % len(_DASHES)],  # distinguishable without colour
            linewidth=1.8,
            marker="o" if len(curve) == 1 else None,
        )
        if bands and bands.get(name):
            axes.fill_between(*zip(*bands[name], strict=True), color=colour, alpha=0.2, linewidth=0)
    if reference is not None:
        axes.axhline(reference[1], label=reference[0], color=_INK, linewidth=1, linestyle=":")
    if percent:
        _percent(axes)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_xlabel("training step", color=_INK)
    axes.set_ylabel(y_label, color=_INK)
    _legend_below(figure, axes)
    return _to_svg(figure, title)


def group_chart(
    series: Mapping[str, Sequence[GroupPoint]],
    *,
    title: str,
    x_label: str,
    y_label: str,
    reference: tuple[str, float] | None = None,
) -> str:
    """A share for each group of samples, the series side by side, with error bars.

    >>> points = [GroupPoint("1 to 10", 0.9, 0.02), GroupPoint("11 to 20", 0.7, 0.03)]
    >>> group_chart({"HKT": points}, title="t", x_label="length", y_label="accuracy")[:4]
    '<svg'
    """
    if not any(series.values()):
        raise ValueError("series must hold at least one named series with a point, got none")
    groups = list(dict.fromkeys(point.group for points in series.values() for point in points))
    figure, axes = _new_chart(title, width=4.4, height=3.0)
    # Side by side, so that no error bar hides another.
    offsets = [0.5 * ((at + 0.5) / len(series) - 0.5) for at in range(len(series))]
    for index, (name, points) in enumerate(series.items()):
        axes.errorbar(
            [groups.index(point.group) + offsets[index] for point in points],
            [point.value for point in points],
            yerr=[point.error or 0.0 for point in points],
            label=name,
            color=_SERIES[index % len(_SERIES)],
            marker=_MARKS[(index + index // len(_SERIES)) % len(_MARKS)],
            linestyle="none",
            markersize=5,
            capsize=2.5,
            linewidth=1.5,
        )
    if reference is not None:
        axes.axhline(reference[1], label=reference[0], color=_INK, linewidth=1, linestyle=":")
    _percent(axes)
    crowded = sum(len(group) for group in groups) > 44
    axes.set_xticks(range(len(groups)), groups, rotation=35 if crowded else 0)
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.grid(False, axis="x")
    axes.set_xlabel(x_label, color=_INK)
    axes.set_ylabel(y_label, color=_INK)
    _legend_below(figure, axes)
    return _to_svg(figure, title)


def standalone(svg: str) -> str:
    """A figure as a file of its own: colours of a light page, its own size and background.

    >>> svg = line_chart({"HKT": [(0, 0.1), (10, 0.6)]}, title="Accuracy", y_label="accuracy")
    >>> "var(" in svg, "var(" in standalone(svg)
    (True, False)
    """
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    if box is None:
        raise ValueError("svg must be a figure of this module, got one without a viewBox")
    width, height = box.groups()
    size = f'width="{width}pt" height="{height}pt" xmlns="http://www.w3.org/2000/svg"'
    svg = svg.replace("<svg", f"<svg {size}", 1)
    head, rest = svg.split(">", 1)
    svg = f'{head}>\n<rect width="{width}" height="{height}" fill="var(--page)"/>{rest}'
    svg = svg.replace("font-family: inherit", "font-family: sans-serif")
    return re.sub(r"var\(--([\w-]+)\)", lambda found: LIGHT[found[1]], svg).strip() + "\n"


def level_chart(weights: LevelWeights, *, title: str) -> str:
    """One stacked bar for each head of each layer: the share of every level, which add up to 1.

    >>> level_chart([[[0.5, 0.3, 0.2], [0.6, 0.2, 0.2]]], title="Level weights")[:4]
    '<svg'
    """
    if not weights or not weights[0]:
        raise ValueError("weights must have at least one layer with one head, got none")
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
    _legend_below(figure, axes)
    return _to_svg(figure, title)


def _percent(axes: Any) -> None:
    axes.set_ylim(0, 1)
    ticker = require("matplotlib.ticker", "train", "a figure")
    axes.yaxis.set_major_formatter(ticker.PercentFormatter(1.0, decimals=0))


def _legend_below(figure: Any, axes: Any) -> None:
    """Outside the axes, where it cannot hide a curve; level lines come last."""
    entries = list(zip(*axes.get_legend_handles_labels(), strict=True))
    entries.sort(key=lambda entry: getattr(entry[0], "get_linestyle", str)() == ":")
    handles, labels = zip(*entries, strict=True)
    columns = max(1, min(4, len(labels), 48 // max(len(label) + 4 for label in labels)))
    rows = -(-len(labels) // columns)
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.18 * max(0, rows - 2))
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=columns,
        frameon=False,
        labelcolor=_INK,
        fontsize=9,
    )


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
    """Only the <svg> element: scalable, named for screen readers, in the page's colours."""
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
    # Inline SVG needs no namespace declarations, and they look like external links.
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

"""The colours of the pages and figures, as values of CSS variables, for light and dark.

Series and levels differ in lightness as well as in hue, so that readers who do not see red and
green apart can tell them apart.
"""

from __future__ import annotations

from collections.abc import Mapping

_LIGHT = {
    "page": "#ffffff", "card": "#f6f7f9", "ink": "#1c2330", "soft": "#566072", "grid": "#dfe3e8",
    "series-0": "#b4530a", "series-1": "#1f63b5", "series-2": "#4c7a34", "series-3": "#7b4fa3",
}  # fmt: skip
_DARK = {
    "page": "#12161d", "card": "#1b212b", "ink": "#e7ebf1", "soft": "#a2adbd", "grid": "#333c49",
    "series-0": "#f2a154", "series-1": "#74b0f4", "series-2": "#9ccb7c", "series-3": "#c6a2e8",
}  # fmt: skip

# Figures drawn by matplotlib: more series; levels dark enough for the text on them, "on-series".
FIGURE_LIGHT = {
    **_LIGHT,
    "series-4": "#8c6d00", "series-5": "#0b7a75", "series-6": "#a8326e", "series-7": "#5b6470",
    "level-0": "#24565f", "level-1": "#3f7f86", "level-2": "#7a6a2f", "level-3": "#8a4f6b",
    "level-4": "#4f5b93",
    "on-series": "#ffffff",
}  # fmt: skip
FIGURE_DARK = {
    **_DARK,
    "series-4": "#dcc777", "series-5": "#6fd0ca", "series-6": "#f08cb8", "series-7": "#b3bcc8",
    "level-0": "#7fd3dd", "level-1": "#a9c3c7", "level-2": "#dcc777", "level-3": "#e3a3c1",
    "level-4": "#a9b4ec",
    "on-series": "#10141a",
}  # fmt: skip

# The interactive page: heat for weights, split for signed values, both as stops of a ramp.
ANALYSIS_LIGHT = {
    **_LIGHT,
    "link": "#1f63b5", "focus": "#b4530a", "masked": "#dfe3e8",
    "level-0": "#1d3f6e", "level-1": "#256d8f", "level-2": "#2f9a8f", "level-3": "#74b45b",
    "level-4": "#c9b037", "level-5": "#d98032", "level-6": "#b8456b",
    "heat-0": "#f6f7f9", "heat-1": "#a9cbec", "heat-2": "#1f63b5", "heat-3": "#0b2450",
    "split-0": "#7a3503", "split-1": "#eda364", "split-2": "#f6f7f9", "split-3": "#7fb0e6",
    "split-4": "#103a73",
}  # fmt: skip
ANALYSIS_DARK = {
    **_DARK,
    "link": "#74b0f4", "focus": "#f2a154", "masked": "#333c49",
    "level-0": "#6f9fe0", "level-1": "#5fb7d4", "level-2": "#5fcdb8", "level-3": "#a3d883",
    "level-4": "#e6d268", "level-5": "#f2a968", "level-6": "#e88aa8",
    "heat-0": "#1b212b", "heat-1": "#27548a", "heat-2": "#74b0f4", "heat-3": "#f4f9ff",
    "split-0": "#ffd09a", "split-1": "#a8601a", "split-2": "#1b212b", "split-3": "#2f67ab",
    "split-4": "#b5d8ff",
}  # fmt: skip


def css_variables(scheme: str, colours: Mapping[str, str]) -> str:
    """A rule that sets the colours on the whole page.

    >>> css_variables("light", {"ink": "#000000"})
    ':root { color-scheme: light; --ink: #000000; }'
    """
    variables = " ".join(f"--{name}: {colour};" for name, colour in colours.items())
    return f":root {{ color-scheme: {scheme}; {variables} }}"

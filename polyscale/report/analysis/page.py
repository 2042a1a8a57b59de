"""The interactive page of an analysis: words from the templates, figures from the scripts."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from polyscale.analysis.schema import FORMAT
from polyscale.report.analysis.sections import present_sections
from polyscale.report.colours import ANALYSIS_DARK, ANALYSIS_LIGHT
from polyscale.report.rendering import asset, render, trusted

# The charts are our own: with bars, lines and grids as SVG they take 9 KB, less than a charting
# library (uPlot 51 KB, on a canvas), and can be saved as files and read with the keyboard.
_SCRIPTS = (
    "basics.js",
    "charts.js",
    "heatmap.js",
    "cards.js",
    "attention.js",
    "scores.js",
    "error.js",
    "normality.js",
    "tree.js",
    "main.js",
)
_KINDS = {
    "hkt": "Hierarchical Kernel Transformer",
    "hsa": "Hierarchical Self-Attention",
    "transformer": "Transformer",
}


def analysis_page(analysis: Mapping[str, Any]) -> str:
    """The whole report as one HTML document that fetches nothing.

    Sections without data are left out. Raises ValueError for an analysis without `meta`, of
    another format, or with numbers that are not finite (None stands for those).

    >>> page = analysis_page({"format": 1, "meta": {"title": "Two heads"}})
    >>> "<h1>Two heads</h1>" in page
    True
    """
    check_analysis(analysis)
    meta = analysis["meta"]
    scripts = "\n".join(asset(f"analysis/{name}") for name in _SCRIPTS)
    script = f"(() => {{\n'use strict';\n{scripts}}})();\n"
    return render(
        "analysis.html.j2",
        styles=["base.css", "analysis.css"],
        light=ANALYSIS_LIGHT,
        dark=ANALYSIS_DARK,
        policy=_policy(script),
        title=str(meta.get("title") or "Analysis"),
        summary=analysis.get("summary"),
        facts=_facts(meta),
        notes=meta.get("notes"),
        text=meta.get("text"),
        sections=present_sections(analysis),
        data=trusted(_embedded(analysis)),
        script=trusted(script),
    )


def check_analysis(analysis: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError unless a report can be made of `analysis`."""
    if not isinstance(analysis, dict):
        raise TypeError(f"analysis must be a dict, got {type(analysis).__name__}")
    if not isinstance(analysis.get("meta"), dict):
        raise ValueError("analysis must have the key 'meta' with a dict, got none")
    if analysis.get("format", FORMAT) != FORMAT:
        raise ValueError(f"analysis must have format {FORMAT}, got {analysis['format']!r}")
    place = _find_not_finite(analysis)
    if place is not None:
        raise ValueError(
            f"analysis must hold finite numbers or None, got nan or infinity at {place}"
        )


def _find_not_finite(value: Any, place: str = "analysis") -> str | None:
    if isinstance(value, float):
        return None if math.isfinite(value) else place
    children: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        children = value.items()
    elif isinstance(value, (list, tuple)):
        children = enumerate(value)
    for key, child in children:
        found = _find_not_finite(child, f"{place}[{key!r}]")
        if found is not None:
            return found
    return None


def _policy(script: str) -> str:
    """Nothing is loaded from anywhere, and only this script runs."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _embedded(analysis: Mapping[str, Any]) -> str:
    """JSON in which no HTML parser finds markup: without <, > and &, and ASCII only."""
    text = json.dumps(analysis, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _facts(meta: dict[str, Any]) -> list[tuple[str, Any]]:
    versions = meta.get("versions") or {}
    seconds = meta.get("seconds")
    facts = [
        ("model", meta.get("model")),
        ("kind", _KINDS.get(meta.get("kind") or "", meta.get("kind"))),
        ("layers", meta.get("layers")),
        ("heads", meta.get("heads")),
        ("levels", meta.get("levels")),
        ("length", meta.get("length")),
        ("query rows used", meta.get("rows_used")),
        ("made in", None if seconds is None else f"{seconds:.1f} s"),
        ("versions", ", ".join(f"{name} {number}" for name, number in versions.items())),
    ]
    return [(label, value) for label, value in facts if value not in (None, "")]

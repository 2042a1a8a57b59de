"""The page itself: words and structure here, figures by the scripts among the assets."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from typing import Any

from polyscale.analysis.schema import FORMAT
from polyscale.report.analysis.sections import Section, present_sections

_SCRIPTS = (
    "basics.js",
    "charts.js",
    "heatmap.js",
    "frame.js",
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
    another format, or with numbers that are not finite (they stand as None).

    >>> page = analysis_page({"format": 1, "meta": {"title": "Two heads"}})
    >>> "<h1>Two heads</h1>" in page
    True
    """
    check_analysis(analysis)
    sections = present_sections(analysis)
    title = str(analysis["meta"].get("title") or "Analysis")
    script = "(() => {\n'use strict';\n" + "\n".join(map(_asset, _SCRIPTS)) + "})();\n"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_policy(script)}">\n'
        f"<title>{_text(title)}</title>\n"
        f"<style>\n{_asset('light.css')}{_asset('style.css')}</style>\n"
        '<style id="dark" media="screen and (prefers-color-scheme: dark)">\n'
        f"{_asset('dark.css')}</style>\n</head>\n<body>\n"
        f"{_header(title)}<main>\n{_top(analysis)}{_contents(sections)}"
        '<div class="bar" id="choices" role="group" aria-label="Layer, head and level"></div>\n'
        f"{''.join(map(_section, sections))}</main>\n"
        '<div id="tip" role="status" hidden></div>\n<svg id="seed" hidden></svg>\n'
        f'<script type="application/json" id="analysis">{_embedded(analysis)}</script>\n'
        f"<script>{script}</script>\n</body>\n</html>\n"
    )


def check_analysis(analysis: Mapping[str, Any]) -> None:
    """Raise ValueError or TypeError where `analysis` is not what a report can be made of."""
    if not isinstance(analysis, dict):
        raise TypeError(f"analysis takes a dict, got {type(analysis).__name__}")
    if not isinstance(analysis.get("meta"), dict):
        raise ValueError("analysis takes a dict with the key 'meta', itself a dict; it has none")
    if analysis.get("format", FORMAT) != FORMAT:
        raise ValueError(f"analysis takes format {FORMAT}, got {analysis['format']!r}")
    place = _find_not_finite(analysis)
    if place is not None:
        raise ValueError(f"analysis takes finite numbers or None, got nan or infinity at {place}")


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


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    """Nothing is loaded from anywhere, and no script runs but this one."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _embedded(analysis: Mapping[str, Any]) -> str:
    """JSON that no HTML parser can leave early: no <, > or & stands in it, nor any non-ASCII."""
    text = json.dumps(analysis, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _text(value: Any) -> str:
    """Escaped, and without the lone surrogates that half a token can leave behind."""
    return escape(str(value).encode("utf-8", "replace").decode("utf-8"))


def _header(title: str) -> str:
    return (
        f"<header>\n<h1>{_text(title)}</h1>\n"
        '<div class="tools"><button type="button" id="save-json">Save JSON</button>'
        '<button type="button" id="theme" aria-label="Switch between light and dark">Dark</button>'
        "</div>\n</header>\n"
    )


def _top(analysis: Mapping[str, Any]) -> str:
    meta = analysis["meta"]
    sentences = "".join(
        f"<li>{_text(sentence)}</li>\n" for sentence in analysis.get("summary") or []
    )
    facts = "".join(
        f"<div><dt>{label}</dt><dd>{_text(value)}</dd></div>\n" for label, value in _facts(meta)
    )
    notes = "".join(f"<li>{_text(note)}</li>\n" for note in meta.get("notes") or [])
    text = meta.get("text")
    return (
        (f'<ul class="summary">\n{sentences}</ul>\n' if sentences else "")
        + (f'<dl class="facts">\n{facts}</dl>\n' if facts else "")
        + (
            "<details><summary>What was left out or sampled</summary>\n"
            f"<ul>\n{notes}</ul></details>\n"
            if notes
            else ""
        )
        + (
            f"<details><summary>The text shown</summary><pre>{_text(text)}</pre></details>\n"
            if text
            else ""
        )
        + "<noscript><p>The figures need JavaScript; all numbers are in report.json.</p></noscript>"
    )


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


def _contents(sections: list[Section]) -> str:
    if not sections:
        return ""
    items = "".join(
        f'<li><a href="#{section.name}">{_text(section.title)}</a></li>\n' for section in sections
    )
    return f'<nav class="contents" aria-label="Contents">\n<ul>\n{items}</ul>\n</nav>\n'


def _section(section: Section) -> str:
    return (
        f'<section id="{section.name}" aria-labelledby="{section.name}-title">\n'
        f'<h2 id="{section.name}-title">{_text(section.title)}</h2>\n'
        f'<p>{_text(section.text)}</p>\n<p class="shown"></p>\n<div class="place"></div>\n'
        "</section>\n"
    )

"""The page of a comparison: no script, no link, nothing fetched from anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, NamedTuple

from polyscale.report.charts import NamedFigure, comparison_figures
from polyscale.report.colours import FIGURE_DARK, FIGURE_LIGHT
from polyscale.report.comparison import Comparison
from polyscale.report.rendering import render, trusted
from polyscale.report.tables import (
    MANY_MODELS,
    NOTHING,
    Cells,
    seed_cells,
    table_cells,
    table_notes,
)

_TASKS = {
    "listops": "Each sample is a nested list operation over the digits; the class is its value.",
    "scifar10": "Each sample is a picture, read as a sequence of 1,024 grey pixels; "
    "the class is what it shows.",
    "imdb-char": "Each sample is a film review, read byte by byte; the class is its verdict.",
    "agnews": "Each sample is a news item, read byte by byte; the class is its section.",
    "sst2": "Each sample is a sentence of a film review, read byte by byte; "
    "the class is its verdict.",
    "enwik8": "The model predicts the next byte of an encyclopedia's source text.",
    "mqar": "The model reads pairs of a key and a value and must then give the value of each key.",
    "copy": "The model reads a sequence and must repeat it.",
}


# Name of a figure's section, its heading, and the introduction below the heading.
_FIGURE_SECTIONS = (
    ("training", "Training", ""),
    ("groups", "Where it is right", ""),
    (
        "levels",
        "What the levels are worth",
        "The scores of a head are a convex mix of levels. Level 0 is standard attention; each "
        "further level sees the sequence at half the resolution. Learned weights start equal.",
    ),
)


def comparison_page(comparison: Comparison, figures: Sequence[NamedFigure] | None = None) -> str:
    """The whole page: summary, table, figures, the task, and how to reproduce it.

    `figures` are those of `comparison_figures`, which are drawn if they are not given.
    """
    if figures is None:
        figures = comparison_figures(comparison)
    several = len(comparison.seeds) > 1
    return render(
        "comparison.html.j2",
        styles=["base.css", "comparison.css"],
        light=FIGURE_LIGHT,
        dark=FIGURE_DARK,
        title=comparison.title,
        summary=comparison.summary,
        notes=comparison.notes,
        scores=_table(comparison, table_cells(comparison)),
        table_notes=table_notes(comparison),
        seeds=_table(comparison, seed_cells(comparison)) if several else None,
        figure_sections=_figure_sections(figures),
        task=_TASKS.get(comparison.task, f"The task is {comparison.task}."),
        example=comparison.results[0].example,
        command=comparison.command,
        environment=_environment(comparison),
        configurations=_configurations(comparison),
    )


class _Cell(NamedTuple):
    text: str
    score: bool  # shown large
    missing: bool


class _Table(NamedTuple):
    head: list[str]
    rows: list[tuple[str, list[_Cell]]]
    turned: bool  # models are the rows, because they are many


def _table(comparison: Comparison, cells: Cells) -> _Table:
    """A few models are the columns; many are the rows."""
    labels = [label for label, _ in cells]
    names = [row.name for row in comparison.rows()]
    by_label = [
        [_Cell(text, label.startswith("Test ") and not at, text == NOTHING) for text in row]
        for at, (label, row) in enumerate(cells)
    ]
    if len(names) <= MANY_MODELS:
        return _Table(names, list(zip(labels, by_label, strict=True)), turned=False)
    by_name = [[row[at] for row in by_label] for at in range(len(names))]
    return _Table(labels, list(zip(names, by_name, strict=True)), turned=True)


def _figure_sections(figures: Sequence[NamedFigure]) -> list[dict[str, Any]]:
    """The sections that have figures, which are markup of this package."""
    sections = []
    for name, heading, intro in _FIGURE_SECTIONS:
        wanted = [one._replace(svg=trusted(one.svg)) for one in figures if one.section == name]
        if wanted:
            sections.append({"heading": heading, "intro": intro, "figures": wanted})
    return sections


def _environment(comparison: Comparison) -> str:
    first = comparison.results[0]
    versions = ", ".join(f"{name} {number}" for name, number in first.versions.items())
    seeds = ", ".join(map(str, comparison.seeds))
    sentences = [
        f"Seed{'s' * (len(comparison.seeds) > 1)} {seeds}.",
        f"{versions}.",
        f"{_duration(sum(run.seconds for run in comparison.results))} of training and evaluation "
        f"in {_count(len(comparison.results), 'run')}, on {first.device}, "
        f"{_count(first.processes, 'process')} with {_count(first.threads, 'thread')}.",
    ]
    if first.git_commit:
        sentences.append(f"Commit {first.git_commit}.")
    sentences.append(f"Finished {max(run.finished for run in comparison.results)}.")
    return " ".join(sentences)


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"one {noun}"
    return f"{number} {noun}es" if noun.endswith("s") else f"{number} {noun}s"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _configurations(comparison: Comparison) -> list[tuple[str, str]]:
    """Everything that was set, folded away: data, one configuration for each model."""
    parts: list[tuple[str, Any]] = [("Data", comparison.results[0].data)]
    for row in comparison.rows():
        run = comparison.runs(row.model)[0]
        parts.append((f"Configuration: {row.name}, seed {run.seed}", run.config))
        parts.append((f"Model: {row.name}", run.model_config))
    return [(label, json.dumps(content, indent=2, default=str)) for label, content in parts]

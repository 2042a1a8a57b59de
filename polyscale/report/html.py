"""The report as one HTML file: no script, no link, nothing fetched from anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from html import escape
from typing import Any

from polyscale.report.charts import NamedFigure, comparison_figures
from polyscale.report.comparison import Comparison
from polyscale.report.figures import DARK, LIGHT
from polyscale.report.tables import (
    MANY_MODELS,
    NOTHING,
    Cells,
    seed_cells,
    table_cells,
    table_notes,
)


def _variables(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


_STYLE = (
    f"""
:root {{ color-scheme: light dark; {_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_variables(DARK)} }} }}
"""
    + """
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 60rem; background: var(--page);
  color: var(--ink); font: 1rem/1.55 system-ui, sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .75rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .75rem; }
.summary { font-size: 1.15rem; margin: 0 0 .5rem; }
.note, figcaption { color: var(--soft); margin: .5rem 0; }
.note { font-size: .9375rem; }
figcaption { font-size: .875rem; margin: .25rem 0 0; }
ul.note { padding-left: 1.2rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .6rem; border-bottom: 1px solid var(--grid); text-align: right; }
th:first-child { text-align: left; }
tbody th { font-weight: 400; color: var(--soft); }
.turned td { min-width: 6.5rem; }
.turned tr > :first-child { position: sticky; left: 0; min-width: 0; background: var(--page); }
.score { font-weight: 700; font-size: 1.1rem; white-space: nowrap; }
.charts {
  display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(24rem, 100%), 1fr));
  align-items: start;
}
figure { margin: 0; padding: .75rem; background: var(--card); border-radius: .5rem; }
svg { display: block; width: 100%; max-width: 34rem; height: auto; margin: 0 auto; }
code, pre { font-family: ui-monospace, monospace; font-size: .875rem; }
pre { background: var(--card); padding: .75rem; border-radius: .5rem; overflow-x: auto; margin: 0; }
.wrap { white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .75rem 0; }
summary { cursor: pointer; padding: .25rem 0; }
@media (max-width: 32rem) {
  table { font-size: .875rem; }
  th, td { padding: .4rem .3rem; }
  .score { font-size: 1rem; }
}
@media print { details > * { display: block; } figure { break-inside: avoid; } }
"""
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


def comparison_page(comparison: Comparison, figures: Sequence[NamedFigure] | None = None) -> str:
    """The whole page: summary, table, figures, the task, and how to make it again.

    `figures` are those of `comparison_figures`, which are drawn if they are not given.
    """
    if figures is None:
        figures = comparison_figures(comparison)
    notes = "".join(f"<li>{escape(note)}</li>" for note in comparison.notes)
    parts = [
        f"<h1>{escape(comparison.title)}</h1>",
        f'<p class="summary">{escape(comparison.summary)}</p>',
        f'<ul class="note">{notes}</ul>' if notes else "",
        _table(comparison),
        *_figures("Training", "", figures, "training"),
        *_figures("Where it is right", "", figures, "groups"),
        *_figures(
            "What the levels are worth",
            "The scores of a head are a convex mix of levels. Level 0 is standard attention; each "
            "further level sees the sequence at half the resolution. Learned weights start equal.",
            figures,
            "levels",
        ),
        *_task(comparison),
        "<h2>How to make this again</h2>",
        f'<pre class="wrap">{escape(comparison.command)}</pre>' if comparison.command else "",
        _environment(comparison),
        *_configuration(comparison),
    ]
    body = "\n".join(part for part in parts if part)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(comparison.title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _table(comparison: Comparison) -> str:
    cells = table_cells(comparison)
    names = [row.name for row in comparison.rows()]
    # A few models stand side by side; many stand below each other.
    table = _html_table(names, cells, turned=len(names) > MANY_MODELS)
    notes = "".join(f"<li>{escape(note)}</li>" for note in table_notes(comparison))
    seeds = ""
    if len(comparison.seeds) > 1:
        every = _html_table(names, seed_cells(comparison), turned=len(names) > MANY_MODELS)
        seeds = f"\n<details><summary>Every seed</summary>{every}</details>"
    what = "columns" if len(names) > MANY_MODELS else "rows"
    meaning = f'<summary>What the {what} mean</summary><ul class="note">{notes}</ul>'
    return f"{table}\n<details>{meaning}</details>{seeds}"


def _html_table(names: Sequence[str], cells: Cells, *, turned: bool) -> str:
    labels = [label for label, _ in cells]
    if turned:
        lines = [(name, [row[at] for _, row in cells]) for at, name in enumerate(names)]
    else:
        lines = [(label, row) for label, row in cells]
    heads = "".join(
        f'<th scope="col">{escape(head)}</th>' for head in (labels if turned else names)
    )
    rows = "\n".join(
        f'<tr><th scope="row">{escape(label)}</th>'
        + "".join(
            _cell(cell, is_score=(column if turned else line) == 0 and labels[0][:4] == "Test")
            for column, cell in enumerate(row)
        )
        + "</tr>"
        for line, (label, row) in enumerate(lines)
    )
    table = '<table class="turned">' if turned else "<table>"
    return (
        f'<div class="wide">{table}\n<thead><tr><td></td>{heads}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def _cell(text: str, *, is_score: bool) -> str:
    if text == NOTHING:
        return '<td aria-label="none">-</td>'
    return f'<td class="score">{escape(text)}</td>' if is_score else f"<td>{escape(text)}</td>"


def _figures(heading: str, intro: str, figures: Sequence[NamedFigure], section: str) -> list[str]:
    wanted = [figure for figure in figures if figure.section == section]
    if not wanted:
        return []
    shown = "\n".join(
        f"<figure>{figure.svg}"
        + (f"<figcaption>{escape(figure.caption)}</figcaption>" if figure.caption else "")
        + "</figure>"
        for figure in wanted
    )
    return [
        f"<h2>{escape(heading)}</h2>",
        f'<p class="note">{escape(intro)}</p>' if intro else "",
        f'<div class="charts">{shown}</div>',
    ]


def _task(comparison: Comparison) -> list[str]:
    example = comparison.results[0].example
    about = _TASKS.get(comparison.task, f"The task is {comparison.task}.")
    parts = ["<h2>The task</h2>", f"<p>{escape(about)}</p>"]
    if example:
        parts += [
            "<p>An example from the test set:</p>",
            f'<pre class="wrap">{escape(example)}</pre>',
        ]
    return parts


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
    return f'<p class="note">{escape(" ".join(sentences))}</p>'


def _count(number: int, noun: str) -> str:
    if number == 1:
        return f"one {noun}"
    return f"{number} {noun}es" if noun.endswith("s") else f"{number} {noun}s"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def _configuration(comparison: Comparison) -> list[str]:
    """Everything that was set, folded away: data, one configuration for each model."""
    sections: list[tuple[str, Any]] = [("Data", comparison.results[0].data)]
    for row in comparison.rows():
        run = comparison.runs(row.model)[0]
        sections.append((f"Configuration: {row.name}, seed {run.seed}", run.config))
        sections.append((f"Model: {row.name}", run.model_config))
    return [
        f"<details><summary>{escape(label)}</summary>"
        f"<pre>{escape(json.dumps(content, indent=2, default=str))}</pre></details>"
        for label, content in sections
    ]

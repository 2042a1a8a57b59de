"""The report as one HTML file: no script, no link, nothing fetched from anywhere."""

from __future__ import annotations

import json
from dataclasses import asdict
from html import escape

from polyscale.report.comparison import Comparison
from polyscale.report.figures import level_chart, line_chart

_STYLE = """
:root {
  color-scheme: light dark;
  --page: #ffffff; --card: #f6f7f9; --ink: #1c2330; --soft: #566072; --grid: #dfe3e8;
  --series-0: #b4530a; --series-1: #1f63b5; --series-2: #4c7a34; --series-3: #7b4fa3;
  --level-0: #24565f; --level-1: #3f7f86; --level-2: #7a6a2f; --level-3: #8a4f6b;
  --on-series: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #12161d; --card: #1b212b; --ink: #e7ebf1; --soft: #a2adbd; --grid: #333c49;
    --series-0: #f2a154; --series-1: #74b0f4; --series-2: #9ccb7c; --series-3: #c6a2e8;
    --level-0: #7fd3dd; --level-1: #a9c3c7; --level-2: #dcc777; --level-3: #e3a3c1;
    --on-series: #10141a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 1.5rem 1rem 3rem; max-width: 60rem; background: var(--page);
  color: var(--ink); font: 1rem/1.55 system-ui, sans-serif;
}
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .75rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .75rem; }
.summary { font-size: 1.15rem; margin: 0 0 .5rem; }
.note { color: var(--soft); margin: .5rem 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: .5rem .6rem; border-bottom: 1px solid var(--grid); text-align: right; }
th:first-child { text-align: left; }
tbody th { font-weight: 400; color: var(--soft); }
tbody tr:first-child td { font-weight: 700; font-size: 1.15rem; }
.charts { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(18rem, 1fr)); }
figure { margin: 0; padding: .75rem; background: var(--card); border-radius: .5rem; }
svg { display: block; width: 100%; max-width: 34rem; height: auto; margin: 0 auto; }
code, pre { font-family: ui-monospace, monospace; font-size: .875rem; }
pre { background: var(--card); padding: .75rem; border-radius: .5rem; overflow-x: auto; margin: 0; }
.wrap { white-space: pre-wrap; overflow-wrap: anywhere; }
details { margin: .75rem 0; }
summary { cursor: pointer; padding: .25rem 0; }
"""


def comparison_page(comparison: Comparison) -> str:
    """The whole page: summary, table, curves, level weights, and how to make it again."""
    parts = [
        f"<h1>{escape(comparison.title)}</h1>",
        f'<p class="summary">{escape(comparison.summary)}</p>',
        '<p class="note">One seed, short expressions and a small model: a demonstration, '
        "not a benchmark.</p>",
        _table(comparison),
        "<h2>Training</h2>",
        _curves(comparison),
        *_level_weights(comparison),
        "<h2>The task</h2>",
        "<p>Each sample is a nested list operation over the digits; the class is its value. "
        "An example from the test set:</p>",
        f'<pre class="wrap">{escape(comparison.example)}</pre>',
        "<h2>How to make this again</h2>",
        f'<pre class="wrap">{escape(comparison.command)}</pre>',
        _environment(comparison),
        *_configuration(comparison),
    ]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(comparison.title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _table(comparison: Comparison) -> str:
    heads = "".join(f'<th scope="col">{escape(result.name)}</th>' for result in comparison.results)
    rows = "\n".join(
        f'<tr><th scope="row">{escape(label)}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in cells)
        + "</tr>"
        for label, cells in comparison.rows()
    )
    return (
        f'<div class="wide"><table>\n<thead><tr><th></th>{heads}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>\n"
        '<p class="note">Majority-class rate: always answering the most frequent training class. '
        "Samples per second: training steps, without evaluation. Attention score FLOPs: counted "
        "on the running operation, relative to standard attention.</p>"
    )


def _curves(comparison: Comparison) -> str:
    results = comparison.results
    accuracy = line_chart(
        {r.name: [(p.step, p.accuracy) for p in r.validation_curve] for r in results},
        title="Accuracy on validation",
        y_label="accuracy",
        percent=True,
        reference=("majority class", results[0].majority_rate),
    )
    loss = line_chart(
        {r.name: [(p.step, p.loss) for p in r.train_curve] for r in results},
        title="Training loss",
        y_label="cross-entropy",
    )
    return f'<div class="charts"><figure>{accuracy}</figure><figure>{loss}</figure></div>'


def _level_weights(comparison: Comparison) -> list[str]:
    """A chart for every model that has more than one level to weigh."""
    charts = [
        f"<figure>{level_chart(r.level_weights, title=f'{r.name}: level weights')}</figure>"
        for r in comparison.results
        if r.level_weights and len(r.level_weights[0][0]) > 1
    ]
    if not charts:
        return []
    return [
        "<h2>What the levels are worth</h2>",
        '<p class="note">The scores of a head are a learned, convex mix of levels. Level 0 is '
        "standard attention; each further level sees the sequence at half the resolution. Before "
        "training all levels weigh the same.</p>",
        *charts,
    ]


def _environment(comparison: Comparison) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in comparison.versions.items())
    seconds = sum(result.seconds for result in comparison.results)
    threads = comparison.results[0].threads
    on_threads = "one thread" if threads == 1 else f"{threads} threads"
    return (
        f'<p class="note">Seed {comparison.seed}. {escape(versions)}. '
        f"{seconds:.0f} seconds of training and evaluation on {on_threads}.</p>"
    )


def _configuration(comparison: Comparison) -> list[str]:
    results = comparison.results
    sections = [("Data", comparison.data)]
    if all(result.settings == results[0].settings for result in results):
        sections.append(("Training budget, the same for all models", asdict(results[0].settings)))
    else:
        sections += [(f"Training budget: {r.name}", asdict(r.settings)) for r in results]
    sections += [(f"Model: {result.name}", result.model) for result in results]
    return [
        f"<details><summary>{escape(label)}</summary>"
        f"<pre>{escape(json.dumps(content, indent=2))}</pre></details>"
        for label, content in sections
    ]

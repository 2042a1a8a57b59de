"""A comparison in sentences and tables: for the terminal, for Markdown, for the page."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from polyscale._extras import require
from polyscale.report.comparison import FIGURES_NAME, Comparison, ModelRow
from polyscale.training.statistics import PairedDifference

if TYPE_CHECKING:
    from polyscale.report.charts import NamedFigure

Cells = list[tuple[str, list[str]]]  # a label, and a cell for each model
MANY_MODELS = 4  # with more models than this, models are the rows
NOTHING = "-"
_DECIDING = (
    "Test accuracy",
    "Test bits per token",
    "Difference",
    "Paired t-test, p",
    "Wilcoxon test, p",
    "GFLOPs per sample",
    "Seconds",
)

TABLE_NOTES = {
    "mean": "Mean ± standard deviation over the seeds (n - 1).",
    "difference": "Difference: the model minus {baseline}, seed by seed, with the 95 % confidence "
    "interval of its mean (t distribution).",
    "tests": "Both tests are two-sided and paired by seed; Wilcoxon's is exact.",
    "error": "Test-set error: the binomial standard error of one run, from the size of the test "
    "set only.",
    "majority": "Majority-class rate: always answering the most frequent training class.",
    "flops": "GFLOPs: one forward pass of one sample at full length, counted while it runs.",
    "scores": "Attention score FLOPs: relative to one level, which is standard attention.",
    "time": "Seconds: one run with its evaluations. Samples per second: training steps only.",
}


def table_cells(comparison: Comparison) -> Cells:
    """The table, a label and a cell for each model, without rows that no model has values for.

    Every form of the report uses it, so that they cannot disagree.
    """
    rows = comparison.rows()
    several = len(comparison.seeds) > 1
    unit = "Test accuracy" if comparison.is_classification else "Test bits per token"
    cells: Cells = [(unit, [score_text(comparison, row) for row in rows])]
    if any(row.difference for row in rows):
        cells.append(("Difference", [difference_text(comparison, row.difference) for row in rows]))
    if several:
        found = [row.difference for row in rows]
        cells += [
            ("Paired t-test, p", [_p_text(d.t_p if d else None) for d in found]),
            ("Wilcoxon test, p", [_p_text(d.wilcoxon_p if d else None) for d in found]),
            ("Seeds", [", ".join(map(str, row.seeds)) for row in rows]),
        ]
    cells += [
        (
            "Test-set error",
            [_or_nothing("± {:.1f} points", row.test_standard_error) for row in rows],
        ),
        ("Majority-class rate", [_or_nothing("{:.1f}%", row.majority_rate) for row in rows]),
        ("Parameters", [f"{row.parameters:,}" for row in rows]),
        ("GFLOPs per sample", [_with_ratio(_giga(row), row.flop_ratio) for row in rows]),
        ("Attention score FLOPs", [_or_nothing("{:.3f} x", row.score_flop_ratio) for row in rows]),
        ("Seconds", [_with_ratio(f"{row.seconds:,.0f}", row.seconds_ratio) for row in rows]),
        ("Samples per second", [f"{row.samples_per_second:,.0f}" for row in rows]),
    ]
    return [(label, row) for label, row in cells if any(cell != NOTHING for cell in row)]


def table_notes(comparison: Comparison) -> list[str]:
    """What the labels of `table_cells` mean, for those that are present."""
    labels = {label for label, _ in table_cells(comparison)}
    several = len(comparison.seeds) > 1
    base = next((row.name for row in comparison.rows() if row.model == comparison.baseline), "")
    wanted = {
        "mean": several,
        "difference": several and "Difference" in labels,
        "tests": "Paired t-test, p" in labels,
        "error": "Test-set error" in labels,
        "majority": "Majority-class rate" in labels,
        "flops": True,
        "scores": "Attention score FLOPs" in labels,
        "time": True,
    }
    return [TABLE_NOTES[key].format(baseline=base) for key, is_there in wanted.items() if is_there]


def score_text(comparison: Comparison, row: ModelRow) -> str:
    """The mean, with its standard deviation if there is one: `61.3 ± 0.8 %`."""
    spread = row.score.standard_deviation
    if comparison.is_classification:
        if spread is None:
            return f"{row.score.mean:.1f}%"
        return f"{row.score.mean:.1f} ± {spread:.1f} %"
    return f"{row.score.mean:.3f}" + ("" if spread is None else f" ± {spread:.3f}")


def difference_text(comparison: Comparison, difference: PairedDifference | None) -> str:
    """The difference with its interval: `+1.7 points [0.4, 3.0]`."""
    if difference is None:
        return NOTHING
    digits, unit = (1, " points") if comparison.is_classification else (3, "")
    text = f"{difference.mean:+.{digits}f}{unit}"
    if difference.low is None or difference.high is None:
        return text
    return f"{text} [{difference.low:+.{digits}f}, {difference.high:+.{digits}f}]"


def summary_of(comparison: Comparison) -> str:
    """Sentences on the scores and differences, which claim no more than the figures show."""
    rows = comparison.rows()
    what = "of the test samples right" if comparison.is_classification else "bits per token"
    verb = "answers" if comparison.is_classification else "needs"
    first = rows[0]
    sentences = [
        f"{first.name} {verb} {_score_words(comparison, first)} {what}{_seeds(comparison, first)}."
    ]
    base = "standard attention" if first.model == "standard" else first.name
    single = [row for row in rows[1:] if row.difference is not None and row.difference.count == 1]
    if len(single) < 2:  # one sentence for all of them is enough
        single = []
    sentences += [_verdict(comparison, row, base) for row in rows[1:] if row not in single]
    if single:
        scores = [f"{row.name} {_score_words(comparison, row)}" for row in single]
        sentences.append(
            f"With one seed, which cannot tell a difference from chance: {', '.join(scores)}."
        )
    majority = first.majority_rate
    if majority is not None:
        sentences.append(
            f"Always giving the most frequent class would score {majority:.1f}%"
            f"{_not_above(rows, majority)}."
        )
    return " ".join(sentences)


def _score_words(comparison: Comparison, row: ModelRow) -> str:
    return f"{row.score.mean:.1f}%" if comparison.is_classification else f"{row.score.mean:.3f}"


def _seeds(comparison: Comparison, row: ModelRow) -> str:
    spread = row.score.standard_deviation
    if spread is None:
        return ""
    digits = 1 if comparison.is_classification else 3
    return f" (mean of {row.score.count} seeds, standard deviation {spread:.{digits}f})"


def _verdict(comparison: Comparison, row: ModelRow, base: str) -> str:
    score = f"{row.name}: {_score_words(comparison, row)}"
    difference = row.difference
    if difference is None:
        return f"{score}{_seeds(comparison, row)}."
    digits, unit = (1, " points") if comparison.is_classification else (3, "")
    size = f"{abs(difference.mean):.{digits}f}{unit}"
    more = "more" if difference.mean > 0 else "less"
    gap = f"{size} {more} than {base}" if difference.mean else f"the same as {base}"
    if difference.count == 1:
        return f"{score}, {gap}; one seed cannot tell whether that is more than chance."
    if difference.low is None or difference.high is None:
        return f"{score}, {gap} in every one of {difference.count} seeds, so with no interval."
    interval = f"{difference.low:+.{digits}f} to {difference.high:+.{digits}f}"
    if difference.low <= 0 <= difference.high:
        return (
            f"{score}, {gap}, but the 95 % interval of the difference ({interval}) includes zero: "
            f"no difference could be shown with {difference.count} seeds."
        )
    better = (difference.mean > 0) == comparison.results[0].higher_is_better
    return (
        f"{score}, {gap}; the 95 % interval of the difference ({interval}) leaves out zero, "
        f"so it was {'better' if better else 'worse'} in this setting."
    )


def _not_above(rows: Sequence[ModelRow], majority: float) -> str:
    """Name the models whose score cannot be told from that of a constant answer."""
    low = [row.name for row in rows if row.score.mean <= majority + (row.test_standard_error or 0)]
    if not low:
        return ""
    return f"; {', '.join(low)} {'is' if len(low) == 1 else 'are'} not above that"


def model_cells(comparison: Comparison, row: ModelRow) -> dict[str, str]:
    """The cells of one model in a table over several comparisons."""
    return {
        "score": score_text(comparison, row),
        "difference": difference_text(comparison, row.difference),
        "seeds": ", ".join(map(str, row.seeds)),
        "majority": _or_nothing("{:.1f}%", row.majority_rate),
    }


def markdown_table(comparison: Comparison) -> str:
    """A few models are the columns; many are the rows."""
    cells = table_cells(comparison)
    names = [row.name for row in comparison.rows()]
    if len(names) > MANY_MODELS:
        header = ["", *(label for label, _ in cells)]
        lines = [[name, *(row[at] for _, row in cells)] for at, name in enumerate(names)]
    else:
        header = ["", *names]
        lines = [[label, *row] for label, row in cells]
    return _markdown_table(header, lines)


def comparison_markdown(comparison: Comparison, figures: Sequence[NamedFigure]) -> str:
    """The report as Markdown, with links to the figures beside it."""
    parts = [
        f"# {_escaped(comparison.title)}",
        _escaped(comparison.summary),
        markdown_table(comparison),
        " ".join(table_notes(comparison)),
    ]
    if comparison.notes:
        parts.append("\n".join(f"- {_escaped(note)}" for note in comparison.notes))
    if len(comparison.seeds) > 1:
        parts += ["## Every seed", _every_seed(comparison)]
    if figures:
        parts.append("## Figures")
        parts += [
            f"![{_escaped(figure.title)}]({FIGURES_NAME}/{figure.file_name})\n\n{figure.caption}"
            for figure in figures
        ]
    if comparison.command:
        parts += ["## How to reproduce this", f"```bash\n{comparison.command}\n```"]
    return "\n\n".join(parts) + "\n"


def seed_cells(comparison: Comparison) -> Cells:
    """The score of every seed, a row for each and a cell for each model."""
    digits, unit = (1, "%") if comparison.is_classification else (3, "")
    by_model = [dict(zip(row.seeds, row.scores, strict=True)) for row in comparison.rows()]
    return [
        (
            f"Seed {seed}",
            [f"{of[seed]:.{digits}f}{unit}" if seed in of else "missing" for of in by_model],
        )
        for seed in comparison.seeds
    ]


def _every_seed(comparison: Comparison) -> str:
    names = [row.name for row in comparison.rows()]
    return _markdown_table(["", *names], [[label, *row] for label, row in seed_cells(comparison)])


def terminal_table(comparison: Comparison) -> Any:
    """The table for a `rich` console; models are the rows if they are many."""
    escape = require("rich.markup", "train", "a table").escape
    table = require("rich.table", "train", "a table").Table(title=escape(comparison.title))
    cells = table_cells(comparison)
    names = [row.name for row in comparison.rows()]
    table.add_column("", no_wrap=True)
    if len(names) > MANY_MODELS:
        # The columns that decide, in the width of a terminal; the files have the rest.
        main = [(label, row) for label, row in cells if label in _DECIDING]
        for label, _ in main:
            table.add_column(label, justify="right")
        for at, name in enumerate(names):
            table.add_row(escape(name), *(escape(row[at]) for _, row in main))
        return table
    for name in names:
        table.add_column(escape(name), justify="right")
    for label, row in cells:
        table.add_row(label, *map(escape, row))
    return table


def _markdown_table(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rows = [header, ["---", *["---:"] * (len(header) - 1)], *lines]
    return "\n".join("| " + " | ".join(_escaped(cell) for cell in row) + " |" for row in rows)


def _escaped(text: str) -> str:
    """Text with the characters that Markdown would interpret escaped."""
    for mark in ("\\", "|", "<", "*", "_", "`"):
        text = text.replace(mark, "\\" + mark)
    return " ".join(text.split())


def _or_nothing(form: str, value: float | None) -> str:
    return NOTHING if value is None else form.format(value)


def _p_text(p: float | None) -> str:
    if p is None:
        return NOTHING
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def _giga(row: ModelRow) -> str:
    giga = row.flops_per_sample / 1e9
    return f"{giga:#.3g}" if giga < 100 else f"{giga:,.0f}"


def _with_ratio(text: str, ratio: float | None) -> str:
    return text if ratio is None else f"{text} ({ratio:.2f} x)"

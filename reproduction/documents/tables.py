"""RESULTS.md: every row of every task, and what the rows differ by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polyscale._files import write_text
from polyscale.training.statistics import accuracy_standard_error, paired, summarise
from reproduction.documents.presets import ROWS, TITLES
from reproduction.records import Record, Records
from reproduction.study import RESULTS_MARKDOWN

COMPARED = (
    ("columns", "shuffled", "HSA, columns: the document's tree against a shuffled one"),
    ("columns", "flat", "HSA, columns, against flat attention"),
    ("blocks", "flat", "HSA, blocks, against flat attention"),
    ("columns", "none", "HSA, columns, against no attention"),
    ("columns-place", "shuffled-place", "with places: the document's tree against a shuffled one"),
    ("columns-place", "flat-number", "with places: HSA, columns, against flat attention"),
    ("columns-place", "none-place", "with places: HSA, columns, against no attention"),
    ("none-place", "none", "no attention: with places against without"),
    ("columns-place", "columns", "HSA, columns: with places against without"),
)


def write_tables(records: Records) -> None:
    """Write RESULTS.md of all finished measurements."""
    write_text(records.folder / RESULTS_MARKDOWN, markdown(records))


def markdown(records: Records) -> str:
    """All tables as one Markdown text."""
    preset = records.head["preset"]
    lines = [
        "# Long structured documents",
        "",
        f"Made by `polyscale reproduce documents --preset {preset['name']}`. Leaves are sentences: "
        f"frozen vectors of {records.head['model']}, one layer of {preset['hidden_size']} with "
        f"{preset['heads']} heads above them, {preset['epochs']} epochs. Every row had two tries "
        "on the validation documents, and was then run on the test documents, rows with a seed "
        f"with {len(preset['seeds'])} of them. *Memory* is what fitting added to the peak of the "
        "process; *fit* and *answer* were timed on a machine with other work on it, and are worth "
        "an order of magnitude. All figures: results.json.",
        "",
    ]
    left = [name for name in records.head.get("units", []) if name not in records]
    if left:
        lines += [f"**Not finished:** {len(left)} units are still to be done.", ""]
    for task, title in TITLES.items():
        lines += [f"## {title}", "", *_documents(records, task)]
        lines += [*_rows(records, task), *_differences(records, task), *_tries(records, task)]
    seconds = sum(one["seconds"] for one in records.records.values())
    lines.append(f"{len(records.records)} units, {seconds / 3600:.1f} hours in all.")
    return "\n".join(lines) + "\n"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(header) + " |",
        "|---" + "|---:" * (len(header) - 1) + "|",
        *("| " + " | ".join(row) + " |" for row in rows),
        "",
    ]


def _documents(records: Records, task: str) -> list[str]:
    found = records.of("vectors", task)
    if not found:
        return []
    values = found[0]["values"]
    sizes = values["documents"]
    total = sum(sizes.values())
    lines = [
        f"{sizes['train']:,} documents for training, {sizes['validation']} for validation, "
        f"{sizes['test']} for testing; {values['over_1000_words']:,} of {total:,} have more than "
        f"1,000 words, the median {values['median_words']:,.0f}. Trees have "
        f"{values['median_leaves']:.0f} leaves in the median (at most {values['most_leaves']:,}) "
        f"and a depth of {values['median_depth']:.0f}. The {values['sentences']:,} sentences of "
        f"the articles took {values['seconds_of_sentences']:.0f} s to encode, the first 512 tokens "
        f"of the documents {values['seconds_of_documents']:.0f} s.",
        "",
    ]
    header = ("class", "training", "validation", "test")
    return lines + _table(header, [(n, *map(str, c)) for n, c in values["labels"].items()])


def _of_row(records: Records, task: str, row: str) -> list[Record]:
    return [one for one in records.of("test", task) if one["config"]["row"] == row]


def _accuracies(records: Records, task: str, row: str) -> list[float]:
    return [100 * one["values"]["accuracy"] for one in _of_row(records, task, row)]


def _rows(records: Records, task: str) -> list[str]:
    rows = []
    for row in ROWS:
        found = _of_row(records, task, row.name)
        if found:
            values: list[dict[str, Any]] = [one["values"] for one in found]
            rows.append(
                (
                    row.title,
                    _mean([100 * one["accuracy"] for one in values]),
                    _mean([100 * one["macro_f1"] for one in values]),
                    f"{summarise([one['fit_seconds'] for one in values]).mean:.1f} s",
                    f"{summarise([one['milliseconds'] for one in values]).mean:.2f} ms",
                    f"{max(one['added_mib'] for one in values):,.0f} MiB",
                    f"{values[0]['parameters']:,}" if "parameters" in values[0] else "-",
                )
            )
    if not rows:
        return []
    header = ("row", "accuracy", "macro F1", "fit", "answer", "memory", "parameters")
    count = len(records.of("test", task)[0]["values"]["right"])
    error = 100 * accuracy_standard_error(0.5 if task == "order" else 0.8, count)
    return [
        *_table(header, rows),
        f"The {count} test documents alone leave a standard error of about {error:.1f} points.",
        "",
    ]


def _mean(values: list[float]) -> str:
    found = summarise(values)
    spread = found.standard_deviation
    return f"{found.mean:.1f} %" if spread is None else f"{found.mean:.1f} ± {spread:.1f} %"


def _differences(records: Records, task: str) -> list[str]:
    rows = []
    for one, other, meaning in COMPARED:
        a, b = _accuracies(records, task, one), _accuracies(records, task, other)
        if len(a) == len(b) > 1:
            found = paired(a, b)
            interval = "-" if found.low is None else f"[{found.low:+.1f}, {found.high:+.1f}]"
            rows.append((meaning, f"{found.mean:+.1f} points", interval))
    header = ("difference", "accuracy", "95 % interval, paired by seed")
    return _table(header, rows) if rows else []


def _tries(records: Records, task: str) -> list[str]:
    titles = {row.name: row.title for row in ROWS}
    rows = [
        (
            titles[one["config"]["row"]],
            ", ".join(f"{name} {value}" for name, value in one["config"]["setting"].items()),
            f"{100 * one['values']['accuracy']:.1f} %",
            " ".join(f"{100 * value:.0f}" for value in one["values"].get("curve", [])) or "-",
        )
        for one in records.of("tune", task)
    ]
    if not rows:
        return []
    header = ("row", "setting", "accuracy", "after each epoch")
    return ["Tries, on the validation documents:", "", *_table(header, rows)]

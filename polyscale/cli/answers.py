"""`polyscale evaluate`, `predict` and `generate`."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyscale.cli import options
from polyscale.cli.errors import one_line_errors

if TYPE_CHECKING:
    from polyscale.training.answers import Answer

_RUN = typer.Argument(help="Folder of a run, or of a model that was saved with its tokenizer.")
_SOURCE = typer.Argument(help="A table, a folder, a document, an image, or a text itself.")
_TABLE = typer.Option(None, help="CSV or JSON lines to write (CSV, printed).")


def evaluate(
    folder: Path = _RUN,
    split: str = typer.Option("test", help="train, validation or test, of the run's own data."),
    data_dir: Path | None = options.DATA_DIR,
    data: str | None = typer.Option(None, help="Other data, with labels, as for train --data."),
    text_column: str | None = options.TEXT_COLUMN,
    label_column: str | None = options.LABEL_COLUMN,
) -> None:
    """Measure a trained model; prints JSON."""
    with one_line_errors():
        from polyscale.training.answers import evaluate_data
        from polyscale.training.run import CONFIG_NAME, evaluate_run

        if data is not None:
            columns = _columns(text_column)
            found = evaluate_data(folder, data, text=columns, label=label_column)
        elif (folder / "config.json").is_file() and not (folder / CONFIG_NAME).is_file():
            raise ValueError(
                f"--data must name data with labels, got none; {folder} holds no run "
                f"({CONFIG_NAME} is missing), whose own data could be read"
            )
        else:
            found = evaluate_run(folder, split=split, data_dir=data_dir)
        print(json.dumps(found))


def predict(
    folder: Path = _RUN,
    source: str = _SOURCE,
    output: Path | None = _TABLE,
    text_column: str | None = options.TEXT_COLUMN,
) -> None:
    """Label texts, documents or images; writes a table with labels and probabilities."""
    with one_line_errors():
        from polyscale._files import write_text
        from polyscale.training.answers import predict as answer

        lines = output is not None and output.suffix in (".jsonl", ".ndjson")
        if output is not None and output.suffix not in (".csv", ".jsonl", ".ndjson"):
            raise ValueError(f"--output must end with .csv or .jsonl, got {output}")
        answers, items = answer(folder, source, text=_columns(text_column))
        for note in items.notes():
            print(note, file=sys.stderr)
        table = _json_lines(answers) if lines else _csv(answers)
        if output is None:
            print(table, end="")
            return
        write_text(output, table)
        print(f"{len(answers):,} answers: {output}")


def generate(
    folder: Path = _RUN,
    prompt: str = typer.Argument(help="The text to continue."),
    tokens: int = typer.Option(200, min=1, help="New tokens at most."),
    temperature: float = typer.Option(0.0, min=0.0, help="0 takes the likeliest token."),
    seed: int = typer.Option(0, min=0, help="Of the choice among tokens."),
) -> None:
    """Continue a text with a language model."""
    with one_line_errors():
        from polyscale.training.answers import generate as write

        print(write(folder, prompt, tokens=tokens, temperature=temperature, seed=seed))


def _columns(text: str | None) -> tuple[str, ...]:
    return () if text is None else tuple(text.split(","))


def _csv(answers: Sequence[Answer]) -> str:
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["row", "label", "probability"])
    for one in answers:
        writer.writerow([one.item.where, one.label, f"{one.probability:.4f}"])
    return table.getvalue()


def _json_lines(answers: Sequence[Answer]) -> str:
    rows = [
        {
            "row": one.item.where,
            "label": one.label,
            "probability": round(one.probability, 6),
            "probabilities": {name: round(score, 6) for name, score in one.scores.items()},
        }
        for one in answers
    ]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

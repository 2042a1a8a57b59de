"""Tables: CSV, TSV and JSON lines, with damaged rows named and left out."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polyscale.data.own.files import MAX_LINE, check_lines, read_text_file

_DELIMITERS = {",": "commas", "\t": "tabs", ";": "semicolons", "|": "bars"}
JSON_LINES = (".jsonl", ".ndjson", ".jsonlines")
TABLES = (".csv", ".tsv", ".tab", *JSON_LINES)


@dataclass(frozen=True)
class Table:
    """The rows of a table by column, and those that cannot be read, each with its place."""

    name: str
    columns: list[str]
    rows: list[tuple[str, dict[str, Any]]]  # ("line 2", cells)
    damaged: list[tuple[str, str]] = field(default_factory=list)  # ("line 3", reason)


def is_table(path: Path) -> bool:
    """Whether the name of a file is that of a table.

    >>> is_table(Path("reviews.csv.gz")), is_table(Path("notes.md"))
    (True, False)
    """
    return suffix_of(path) in TABLES


def suffix_of(path: Path) -> str:
    """The ending of a file's name, without .gz and in lower case."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def read_table(path: Path) -> Table:
    """Read CSV, TSV or JSON lines; the first line of CSV and TSV names the columns."""
    text = read_text_file(path)
    check_lines(text, str(path))
    if suffix_of(path) in JSON_LINES:
        table = _read_json_lines(text, str(path))
    else:
        table = _read_separated(text, str(path), tabs=suffix_of(path) in (".tsv", ".tab"))
    if not table.rows and not table.damaged:
        raise ValueError(f"{path} must have some rows, got only the names of columns")
    if len(table.damaged) > len(table.rows):
        where, reason = table.damaged[0]
        raise ValueError(
            f"{path} must be a table, got {len(table.damaged):,} damaged rows and "
            f"{len(table.rows):,} good ones; the first is {where}: {reason}"
        )
    return table


def _read_json_lines(text: str, name: str) -> Table:
    rows: list[tuple[str, dict[str, Any]]] = []
    damaged: list[tuple[str, str]] = []
    columns: dict[str, None] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            damaged.append((f"line {number}", "not JSON"))
            continue
        if not isinstance(row, dict):
            damaged.append((f"line {number}", "not a JSON object"))
            continue
        columns.update(dict.fromkeys(row))
        rows.append((f"line {number}", row))
    return Table(name, list(columns), rows, damaged)


def _read_separated(text: str, name: str, *, tabs: bool) -> Table:
    delimiter = "\t" if tabs else _delimiter(text.split("\n", 1)[0])
    columns: list[str] | None = None
    rows: list[tuple[str, dict[str, Any]]] = []
    damaged: list[tuple[str, str]] = []
    for where, cells in _split_rows(text, name, delimiter):
        if isinstance(cells, str):
            damaged.append((where, cells))
        elif columns is None:
            columns = _check_header([cell.strip() for cell in cells], name)
        elif not any(cell.strip() for cell in cells):
            damaged.append((where, "empty"))
        elif len(cells) != len(columns):
            damaged.append((where, f"{len(cells)} fields, not {len(columns)}"))
        else:
            rows.append((where, dict(zip(columns, cells, strict=True))))
    if columns is None:
        raise ValueError(f"{name} must name its columns in the first line, got {damaged[0][1]}")
    return Table(name, columns, rows, damaged)


def _split_rows(text: str, name: str, delimiter: str) -> Iterator[tuple[str, list[str] | str]]:
    """Yield the place of each row with its cells, or with what is wrong with it."""
    before = csv.field_size_limit(MAX_LINE)
    try:
        # Lines stay as they are: newlines may be part of a quoted field.
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        while True:
            where = f"line {reader.line_num + 1}"
            try:
                cells = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                if "unexpected end" in str(error) or "field larger" in str(error):
                    raise ValueError(
                        f"{name}, {where}: a quoted field must end, got no closing quote; write a "
                        'quote within a field as ""'
                    ) from None
                yield where, "misplaced quotes"
                continue
            yield where, cells
    finally:
        csv.field_size_limit(before)


def _delimiter(header: str) -> str:
    """The delimiter that makes most columns of a header; the comma if several do."""
    return max(_DELIMITERS, key=header.count)


def _check_header(columns: list[str], name: str) -> list[str]:
    repeated = [column for column in columns if columns.count(column) > 1]
    if repeated or not any(columns):
        raise ValueError(
            f"{name} must name its columns in the first line, each once, got {columns[:8]}"
        )
    return columns

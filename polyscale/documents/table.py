"""Tables to trees: rows of cells, keyed by the names of their columns."""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from polyscale.documents.building import NUMBER, DocumentBuilder, Reading
from polyscale.documents.document import Document
from polyscale.documents.text import Text

_FIELD = {
    mark: re.compile(rf'(?P<quoted>"(?:[^"]|"")*")(?=[{mark}\r\n]|\Z)|(?P<plain>[^{mark}\r\n]*)')
    for mark in (",", "\t", ";")
}
_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")

Cell = tuple[Any, int, int]  # a value and its place in the source, -1 for none


def read_table(
    table: Any, reading: Reading | None = None, *, columns: Sequence[str] | None = None
) -> Document:
    r"""Read CSV, TSV, a list of dicts or rows, a dict of columns or a data frame.

    Rows are keyed by their columns; `columns` names them if the table does not. Numbers are
    leaves of the modality "number".

    >>> read_table("name,price\nold house,3.5").values
    ['old', 'house', 3.5]
    """
    is_text = isinstance(table, str)
    names, rows = _from_text(table) if is_text else _from_data(table)
    if columns is not None:
        rows = rows if names is None else [[(name, -1, -1) for name in names], *rows]
        names = list(columns)
    if names is None:
        raise ValueError("columns must be given for rows without names, got None")
    names = [str(name) for name in names]
    if len(set(names)) != len(names):
        raise ValueError(f"columns must have different names, got {names}")
    builder = DocumentBuilder("table", reading or Reading(), table if is_text else None)
    for number, row in enumerate(rows):
        if len(row) != len(names):
            raise ValueError(
                f"row {number} of table must have {len(names)} cells, as {names}, got {len(row)}"
            )
        builder.open("row", domain="keyed")
        for name, (value, begin, end) in zip(names, row, strict=True):
            builder.open("cell", key=name)
            _add(builder, value, begin, end)
            builder.close()
        builder.close()
    return builder.finish()


def _add(builder: DocumentBuilder, value: Any, begin: int, end: int) -> None:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return
    if not isinstance(value, (str, bool)):
        try:
            builder.leaf("number", float(value), begin, end, NUMBER)
            return
        except (TypeError, ValueError):
            value = str(value)
    content = str(value)
    if begin >= 0 and _NUMBER.fullmatch(content.strip()):
        builder.leaf("number", float(content), begin, end, NUMBER)
        return
    text = Text()
    if end - begin > len(content):  # a quote in a cell in quotes is doubled
        for number, part in enumerate(content.split('"')):
            if number:
                text.add('"', begin, begin + 2)
                begin += 2
            text.add(part, begin, begin + len(part))
            begin += len(part)
    else:
        text.add(content, begin, end)
    builder.prose(text)


def _from_text(source: str) -> tuple[list[str] | None, list[list[Cell]]]:
    first = source.lstrip("\r\n").split("\n", 1)[0]
    mark = max(_FIELD, key=first.count)
    rows: list[list[Cell]] = []
    row: list[Cell] = []
    at = 1 if source.startswith("\ufeff") else 0
    while at < len(source):
        match = _FIELD[mark].match(source, at)
        assert match is not None  # the second alternative takes anything, and nothing
        begin, end = match.span()
        if match["quoted"] is not None:
            row.append((match["quoted"][1:-1].replace('""', '"'), begin + 1, end - 1))
        else:
            row.append((match["plain"], begin, end))
        at = end
        if at < len(source) and source[at] == mark:
            at += 1
            if at < len(source):
                continue
            row.append(("", at, at))
        at += 2 if source.startswith("\r\n", at) else 1
        if any(value for value, *_ in row) or len(row) > 1:
            rows.append(row)
        row = []
    if not rows:
        raise ValueError("table must have a line with the names of its columns, got none")
    return [value for value, *_ in rows[0]], rows[1:]


def _from_data(table: Any) -> tuple[list[str] | None, list[list[Cell]]]:
    def cells(values: Iterable[Any]) -> list[Cell]:
        return [(value, -1, -1) for value in values]

    if hasattr(table, "to_dict") and hasattr(table, "columns"):
        table = {str(name): list(table[name]) for name in table.columns}
    if isinstance(table, Mapping):
        lengths = {name: len(column) for name, column in table.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"table must have columns of one length, got {lengths}")
        return list(table), [cells(row) for row in zip(*table.values(), strict=True)]
    if not isinstance(table, Sequence) or not table:
        raise TypeError(
            "table must be CSV as a str, a list of dicts or rows, a dict of columns or a data "
            f"frame, got {type(table).__name__ if table != [] else 'an empty list'}"
        )
    if all(isinstance(row, Mapping) for row in table):
        names = list(dict.fromkeys(name for row in table for name in row))
        return names, [cells(row.get(name) for name in names) for row in table]
    if all(isinstance(row, Sequence) and not isinstance(row, str) for row in table):
        return None, [cells(row) for row in table]
    raise TypeError(f"table must have rows that are all dicts or all lists, got {table[0]!r}")

"""Which columns of a table are texts, labels and files: as named, or as guessed."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

from polyscale.data.own.tables import Table

_TEXTS = (
    "text",
    "sentence",
    "review",
    "content",
    "document",
    "body",
    "article",
    "comment",
    "message",
    "tweet",
    "question",
    "description",
    "abstract",
    "html",
    "markdown",
    "title",
)
_LABELS = (
    "label",
    "labels",
    "class",
    "category",
    "target",
    "sentiment",
    "topic",
    "tag",
    "y",
    "label_text",
    "class_name",
)
_FILES = ("file_name", "filename", "file", "path", "image", "document", "page")
_LOOKED_AT = 2_000  # rows, of which a guess is made


def find_column(table: Table, option: str, name: str) -> str:
    """A column by the name that the user gave; the nearest one is offered if it does not exist."""
    if name in table.columns:
        return name
    near = get_close_matches(name, table.columns, n=1, cutoff=0.5)
    columns = ", ".join(map(repr, table.columns))
    raise ValueError(
        f"{option} must be a column of {table.name} ({columns}), got {name!r}"
        + (f"; did you mean {near[0]!r}?" if near else "")
    )


def guess_text(table: Table, label: str | None = None) -> str:
    """The column of texts: by its name, or the one with the longest texts."""
    columns = [column for column in table.columns if column != label]
    named = _by_name(columns, _TEXTS)
    if named is not None:
        return named
    lengths = {
        column: sum(len(value) for value in _values(table, column) if isinstance(value, str))
        for column in columns
    }
    if not lengths or not max(lengths.values()):
        raise ValueError(
            f"{table.name} must have a column of texts, got {table.columns}; name it with "
            "--text-column"
        )
    return max(lengths, key=lambda column: lengths[column])


def guess_label(table: Table, texts: Sequence[str]) -> str:
    """The column of labels: by its name, or the only one whose values repeat like classes."""
    columns = [column for column in table.columns if column not in texts]
    named = _by_name(columns, _LABELS)
    if named is not None:
        return named
    found = []
    for column in columns:
        values = [str(value) for value in _values(table, column)]
        if 2 <= len(set(values)) <= max(2, len(values) // 5) and len(set(values)) < len(values):
            found.append(column)
    if len(found) != 1:
        raise ValueError(
            f"{table.name} must have a column of labels, got {_listed(table.columns)}"
            + (f", of which {_listed(found)} could be it" if found else "")
            + "; name it with --label-column, or use --kind language to model the texts"
        )
    return found[0]


def guess_file(table: Table) -> str | None:
    """The column that names files, if there is one."""
    return _by_name(table.columns, _FILES)


def _by_name(columns: Sequence[str], known: Sequence[str]) -> str | None:
    lower = {column.lower(): column for column in reversed(columns)}
    return next((lower[name] for name in known if name in lower), None)


def _values(table: Table, column: str) -> list[Any]:
    return [row.get(column) for _, row in table.rows[:_LOOKED_AT]]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))

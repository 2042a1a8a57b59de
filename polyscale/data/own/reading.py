"""Reads whatever `--data` names into items."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polyscale.data.own.columns import find_column, guess_file, guess_label, guess_text
from polyscale.data.own.files import read_text_file
from polyscale.data.own.folders import (
    find_parts,
    label_of,
    read_file,
    read_folder,
    read_listed,
)
from polyscale.data.own.hub import (
    is_dataset_name,
    is_saved_dataset,
    read_hub_dataset,
    read_saved_dataset,
)
from polyscale.data.own.images import open_image
from polyscale.data.own.items import IMAGE, TEXT, Item, Items
from polyscale.data.own.tables import Table, is_table, read_table, suffix_of

_HTML = re.compile(r"\s*<(!doctype|html|head|body|div|article|section|p|h[1-6]|table)\b", re.I)


@dataclass(frozen=True)
class Wanted:
    """What to read from a source.

    Args:
        text: columns of texts; guessed if empty. Several become the fields of a record.
        label: the column of labels; guessed if None.
        table: a table with the labels of the files of a folder.
        labelled: whether items need labels: without, there are none.
    """

    text: tuple[str, ...] = ()
    label: str | None = None
    table: str | None = None
    labelled: bool = True


def read_source(data: str, wanted: Wanted) -> dict[str, Items]:
    """The items of a file, a folder or a dataset: "train", and other splits that it has.

    Raises:
        FileNotFoundError: if there is nothing of that name.
        ValueError: with one line that says what is wrong.
    """
    path = Path(data).expanduser()
    if path.is_dir():
        return _read_directory(path, wanted)
    if path.is_file():
        return {"train": _read_one(path, wanted)}
    if is_dataset_name(data):
        return _items_of_splits(read_hub_dataset(data), wanted)
    raise FileNotFoundError(f"data must be a file or folder that exists, got {data}")


def items_of_table(table: Table, wanted: Wanted) -> Items:
    """The rows of a table as items."""
    label = wanted.label
    if label is not None and wanted.labelled:
        find_column(table, "--label-column", label)
    images = [
        name
        for name in table.columns
        if any(isinstance(row.get(name), bytes) for _, row in table.rows)
    ]
    texts = tuple(find_column(table, "--text-column", name) for name in wanted.text)
    if not texts:
        texts = (images[0],) if images else (guess_text(table, label),)
    if wanted.labelled and label is None:
        label = guess_label(table, texts)
    items: list[Item] = []
    left_out = list(table.damaged)
    for where, row in table.rows:
        content = _content(row, texts)
        answer = label_of(row.get(label)) if wanted.labelled and label is not None else None
        if isinstance(content, _Bad):
            left_out.append((where, content.reason))
        elif wanted.labelled and answer is None:
            left_out.append((where, "no label"))
        else:
            items.append(Item(where, content, answer))
    if not items:
        raise ValueError(
            f"{table.name} must have rows with a text"
            + (" and a label" if wanted.labelled else "")
            + f", got {len(left_out):,} without; the first is {left_out[0][0]}: {left_out[0][1]}"
        )
    media = IMAGE if texts[0] in images else "record" if len(texts) > 1 else _media_of_texts(items)
    return Items(
        table.name,
        media,
        items,
        left_out,
        text=texts,
        label=label if wanted.labelled else None,
    )


def _items_of_splits(tables: dict[str, Table], wanted: Wanted) -> dict[str, Items]:
    """The splits of a dataset; those without labels, as of secret tests, are ignored and said."""
    train = items_of_table(tables["train"], wanted)
    found = {"train": train}
    same = Wanted(train.text, train.label, None, wanted.labelled)
    for part in tables.keys() - {"train"}:
        table = tables[part]
        if wanted.labelled and all(row.get(str(train.label)) is None for _, row in table.rows):
            found["train"] = replace(train, ignored=f"{table.name} is ignored: it has no labels")
        else:
            found[part] = items_of_table(table, same)
    return found


@dataclass(frozen=True)
class _Bad:
    reason: str


def _content(row: dict[str, Any], texts: tuple[str, ...]) -> Any:
    """The text of a row, its fields, or the bytes of its image; otherwise what is wrong."""
    value = row.get(texts[0])
    if isinstance(value, bytes):
        try:
            open_image(value)
        except ValueError as error:
            return _Bad(str(error).removeprefix("image "))
        return value
    fields: dict[str, Any] = {}
    for name in texts:
        value = row.get(name)
        if value is None or (isinstance(value, str) and not value.strip()):
            continue
        if isinstance(value, (list, dict, bytes)):
            return _Bad(f"{name} is a {type(value).__name__}, not a text")
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                return _Bad("half a surrogate pair")
        fields[name] = value
    if not fields:
        return _Bad("no text")
    return str(fields[texts[0]]) if len(texts) == 1 else fields


def _media_of_texts(items: list[Item]) -> str:
    pages = sum(bool(_HTML.match(item.content)) for item in items)
    return "html" if 2 * pages > len(items) else TEXT


def _read_directory(folder: Path, wanted: Wanted) -> dict[str, Items]:
    if is_saved_dataset(folder):
        return _items_of_splits(read_saved_dataset(folder), wanted)
    table = None if wanted.table is None else Path(wanted.table).expanduser()
    parts = find_parts(folder) if table is None else {}
    return {
        part: read_folder(where, labelled=wanted.labelled, table=table, label=wanted.label)
        for part, where in (parts or {"train": folder}).items()
    }


def _read_one(path: Path, wanted: Wanted) -> Items:
    if suffix_of(path) == ".json":
        table = _json_table(path)
        if table is not None:
            return items_of_table(table, wanted)
    if not is_table(path):
        if suffix_of(path) == ".txt" and path.suffix == ".gz":
            return Items(str(path), TEXT, [Item(path.name, read_text_file(path))])
        return read_file(path)
    table = read_table(path)
    # A table of files, such as labels.csv: it has a column of names, and the first one exists.
    column = guess_file(table)
    if column is not None and not wanted.text and table.rows:
        name = table.rows[0][1].get(column)
        if isinstance(name, str) and name and (path.parent / name).is_file():
            return read_listed(table, path.parent, wanted.label, labelled=wanted.labelled)
    return items_of_table(table, wanted)


def _json_table(path: Path) -> Table | None:
    """A JSON file that is a list of objects; None if it is something else."""
    try:
        content = json.loads(read_text_file(path))
    except RecursionError:
        raise ValueError(f"{path} must be JSON, got lists that are nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} must be JSON, got: {error}; JSON lines end with .jsonl") from None
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        return None
    if not content:
        raise ValueError(f"{path} must have some rows, got none")
    columns = dict.fromkeys(name for row in content for name in row)
    return Table(str(path), list(columns), [(f"row {n}", row) for n, row in enumerate(content)])

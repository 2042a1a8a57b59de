"""Hugging Face datasets: a name on the Hub, or a folder that `save_to_disk` wrote.

Both are Arrow and JSON files. The `datasets` that polyscale needs (4 and later) cannot run scripts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from polyscale._extras import require
from polyscale.data.own.folders import _PARTS
from polyscale.data.own.tables import Table

_NAME = re.compile(r"[\w-]+(\.[\w-]+)*(/[\w.-]+)?(:[\w.-]+)?")
_MARKS = ("dataset_info.json", "dataset_dict.json")


def is_saved_dataset(folder: Path) -> bool:
    """Whether `save_to_disk` wrote a folder."""
    return any((folder / name).is_file() for name in _MARKS)


def is_dataset_name(data: str) -> bool:
    """Whether a text can be the name of a dataset: "owner/name" or "owner/name:configuration".

    >>> is_dataset_name("fancyzhx/ag_news"), is_dataset_name("my/reviews.csv")
    (True, False)
    """
    endings = (".csv", ".tsv", ".jsonl", ".json", ".txt", ".gz", ".md", ".html", ".parquet")
    return bool(_NAME.fullmatch(data)) and not data.lower().endswith(endings)


def read_saved_dataset(folder: Path) -> dict[str, Table]:
    """The splits of a folder that `save_to_disk` wrote."""
    datasets = require("datasets", "train", "reading a saved dataset")
    try:
        return _tables(datasets, datasets.load_from_disk(str(folder)), str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} must be a dataset saved to disk, got: {error}") from error


def read_hub_dataset(name: str) -> dict[str, Table]:
    """The splits of a dataset on the Hub."""
    datasets = require("datasets", "train", "reading a dataset of the Hub")
    repository, _, configuration = name.partition(":")
    try:
        loaded = datasets.load_dataset(repository, configuration or None)
    # Whatever the cause (no such name, no network, a script), the advice is the same.
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise FileNotFoundError(
            f"data must be a file or folder that exists or a dataset of the Hugging Face Hub, got "
            f"{name!r}, which could not be loaded from there ({reason})"
        ) from error
    return _tables(datasets, loaded, name)


def _tables(datasets: Any, loaded: Any, name: str) -> dict[str, Table]:
    if not isinstance(loaded, dict):
        return {"train": _table(datasets, loaded, name)}
    found = {
        part: _table(datasets, loaded[split], f"{name}, {split}")
        for part, names in _PARTS.items()
        for split in names
        if split in loaded
    }
    if "train" not in found:
        raise ValueError(f"{name} must have a split 'train', got {', '.join(loaded)}")
    return found


def _table(datasets: Any, data: Any, name: str) -> Table:
    features = dict(data.features)
    names = {
        column: kind.names
        for column, kind in features.items()
        if isinstance(kind, datasets.ClassLabel)
    }
    images = [column for column, kind in features.items() if isinstance(kind, datasets.Image)]
    for column in images:  # the bytes: our own reader says what is wrong with them
        data = data.cast_column(column, datasets.Image(decode=False))
    rows = []
    for number, row in enumerate(data.with_format(None)):
        cells = dict(row)
        for column, known in names.items():
            value = cells[column]
            # Datasets write -1 where the label is secret.
            cells[column] = known[value] if value is not None and value >= 0 else None
        for column in images:
            cells[column] = _image_bytes(cells[column])
        rows.append((f"row {number}", cells))
    return Table(name, list(features), rows)


def _image_bytes(value: Any) -> bytes | None:
    if value is None:
        return None
    content = value.get("bytes")
    if content is None and value.get("path") and Path(value["path"]).is_file():
        content = Path(value["path"]).read_bytes()
    return content

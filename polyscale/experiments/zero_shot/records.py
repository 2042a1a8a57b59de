"""The results file: one record for each finished unit of work, written whole after each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyscale.training.files import write_json

FILE = "results.json"
FORMAT = "polyscale.zero-shot"
VERSION = 1

Record = dict[str, Any]  # id, kind, task, config, seed, git_commit, seconds, values


class Records:
    """All that is finished, by the names of the units.

    >>> import tempfile
    >>> records = Records(Path(tempfile.mkdtemp()), {"preset": "tiny"})
    >>> records.add({"id": "a", "values": {"accuracy": 0.5}})
    >>> "a" in records, Records.read(records.folder).values("a")
    (True, {'accuracy': 0.5})
    """

    def __init__(self, folder: Path, head: dict[str, Any]) -> None:
        self.folder = folder
        self.head = head  # what all records have in common
        self.records: dict[str, Record] = {}

    @classmethod
    def read(cls, folder: Path) -> Records:
        """Read what `add` wrote."""
        path = folder / FILE
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path}: not JSON: {error}") from error
        if not isinstance(data, dict) or data.get("format") != FORMAT:
            raise ValueError(f"{path}: does not say that its format is {FORMAT}")
        if data.get("version") != VERSION:
            raise ValueError(f"{path}: has version {data.get('version')!r}, takes {VERSION}")
        found = data.get("records")
        if not isinstance(found, list) or not all(
            isinstance(one, dict) and "id" in one and "values" in one for one in found
        ):
            raise ValueError(f"{path}: records takes a list of records with id and values")
        head = {k: v for k, v in data.items() if k not in ("format", "version", "records")}
        records = cls(folder, head)
        records.records = {one["id"]: one for one in found}
        return records

    def __contains__(self, name: str) -> bool:
        return name in self.records

    def add(self, record: Record) -> None:
        """Keep one more record; a kill while it is written leaves the file as it was."""
        self.records[record["id"]] = record
        self.write()

    def drop(self, beginnings: Sequence[str]) -> None:
        """Forget the records whose names begin so; the file keeps them until the next `add`."""
        if isinstance(beginnings, str):
            raise TypeError(f"again: got {beginnings!r}, takes a list of beginnings of names")
        for beginning in beginnings:
            found = [name for name in self.records if name.startswith(beginning)]
            if not beginning or not found:
                raise ValueError(f"again: got {beginning!r}, with which no finished unit begins")
            for name in found:
                del self.records[name]

    def write(self) -> None:
        """Write the file, records in the order of the units."""
        order = {name: at for at, name in enumerate(self.head.get("units", []))}
        found = sorted(self.records.values(), key=lambda one: order.get(one["id"], len(order)))
        data = {"format": FORMAT, "version": VERSION, **self.head}
        write_json(self.folder / FILE, {**data, "records": found})

    def values(self, name: str) -> dict[str, Any]:
        """What a unit has measured."""
        if name not in self.records:
            raise ValueError(f"{self.folder / FILE}: has no record {name!r}")
        return self.records[name]["values"]

    def of(self, kind: str, task: str | None = None) -> list[Record]:
        """All records of a kind, and of a task if one is given."""
        return [
            one
            for one in self.records.values()
            if one["kind"] == kind and (task is None or one["task"] == task)
        ]

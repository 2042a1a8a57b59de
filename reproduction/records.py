"""The results file of measurements: one record for each, the whole file replaced after each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from polyscale._files import write_json
from reproduction.study import RESULTS_JSON

VERSION = 1

Record = dict[str, Any]  # id, kind, task, config, seed, git_commit, seconds, values


class Records:
    """The finished measurements of a study, by id.

    >>> import tempfile
    >>> records = Records(Path(tempfile.mkdtemp()), {"preset": "tiny"}, "polyscale.example")
    >>> records.add({"id": "a", "values": {"accuracy": 0.5}})
    >>> "a" in records, Records.read(records.folder, "polyscale.example").values("a")
    (True, {'accuracy': 0.5})
    """

    def __init__(self, folder: Path, head: dict[str, Any], format: str) -> None:
        self.folder = folder
        self.head = head  # what all records have in common
        self.format = format  # names the study in the file
        self.records: dict[str, Record] = {}

    @classmethod
    def read(cls, folder: Path, format: str) -> Records:
        """Read what `add` wrote."""
        path = folder / RESULTS_JSON
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"{path} must be JSON: {error}") from error
        if not isinstance(data, dict) or data.get("format") != format:
            raise ValueError(f"{path} must have the format {format}")
        if data.get("version") != VERSION:
            raise ValueError(f"{path} must have version {VERSION}, got {data.get('version')!r}")
        found = data.get("records")
        if not isinstance(found, list) or not all(
            isinstance(one, dict) and "id" in one and "values" in one for one in found
        ):
            raise ValueError(f"{path}: records must be a list of records with id and values")
        head = {k: v for k, v in data.items() if k not in ("format", "version", "records")}
        records = cls(folder, head, format)
        records.records = {one["id"]: one for one in found}
        return records

    def __contains__(self, name: str) -> bool:
        return name in self.records

    def add(self, record: Record) -> None:
        """Save one more record; the file on disk is complete at any time."""
        self.records[record["id"]] = record
        self.write()

    def drop(self, prefixes: Sequence[str]) -> None:
        """Forget the records whose ids have these prefixes; the file keeps them until `add`."""
        if isinstance(prefixes, str):
            raise TypeError(f"redo must be a list of prefixes of ids, got {prefixes!r}")
        for prefix in prefixes:
            found = [name for name in self.records if name.startswith(prefix)]
            if not prefix or not found:
                raise ValueError(f"redo must be prefixes of finished units, got {prefix!r}")
            for name in found:
                del self.records[name]

    def write(self) -> None:
        """Write the file, records in the order of the units."""
        order = {name: at for at, name in enumerate(self.head.get("units", []))}
        found = sorted(self.records.values(), key=lambda one: order.get(one["id"], len(order)))
        data = {"format": self.format, "version": VERSION, **self.head}
        write_json(self.folder / RESULTS_JSON, {**data, "records": found})

    def values(self, name: str) -> dict[str, Any]:
        """What a measurement found."""
        if name not in self.records:
            raise ValueError(f"{self.folder / RESULTS_JSON} has no record {name!r}")
        return self.records[name]["values"]

    def of(self, kind: str, task: str | None = None) -> list[Record]:
        """All records of a kind, and of a task if one is given."""
        return [
            one
            for one in self.records.values()
            if one["kind"] == kind and (task is None or one["task"] == task)
        ]

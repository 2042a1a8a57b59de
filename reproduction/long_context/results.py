"""Results: one line of JSON for each measurement, so that a run goes on where it stopped."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any


class Results:
    """The measurements of one kind in one file, by setting and item.

    >>> import tempfile
    >>> from contextlib import redirect_stdout
    >>> results = Results(Path(tempfile.mkdtemp()), "perplexity")
    >>> with redirect_stdout(None):  # it prints each measurement with the time
    ...     results.add("dense", "article 0", loss=2.5)
    >>> Results(results.path.parent, "perplexity").find("dense", "article 0")["loss"]
    2.5
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.path = folder / f"{kind}.jsonl"
        self.kind = kind
        self.records: dict[tuple[str, str], dict[str, Any]] = {}
        folder.mkdir(parents=True, exist_ok=True)
        if self.path.is_file():
            for line in self.path.read_text().splitlines():
                record = json.loads(line)
                self.records[record["setting"], record["item"]] = record

    def find(self, setting: str, item: str) -> dict[str, Any] | None:
        """Return a measurement that was made already."""
        return self.records.get((setting, item))

    def add(self, setting: str, item: str, **values: Any) -> None:
        """Keep a measurement, in the file before anything else happens."""
        record = {"setting": setting, "item": item, **values}
        self.records[setting, item] = record
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")
        shown = ", ".join(
            f"{name} {value:.5g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in values.items()
            if not isinstance(value, list | dict)
        )
        print(f"{time.strftime('%H:%M:%S')} {self.kind}: {setting}, {item}: {shown}", flush=True)

    def settings(self) -> list[str]:
        """Return the names of the settings that were measured, in their order."""
        return list(dict.fromkeys(setting for setting, _ in self.records))

    def of(self, setting: str) -> dict[str, dict[str, Any]]:
        """Return the measurements of a setting, by item."""
        return {item: record for (name, item), record in self.records.items() if name == setting}

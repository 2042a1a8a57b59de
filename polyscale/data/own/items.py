"""Items: texts, documents and images of users, with their labels and their places."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TEXT, IMAGE = "text", "image"
_NAMED = 5  # rows that a message names


@dataclass(frozen=True)
class Item:
    """One sample: its `content` is a text, a dict of fields, or the bytes of an image."""

    where: str  # "line 7", "row 7" or a path in the folder
    content: Any
    label: str | None = None

    @property
    def key(self) -> bytes:
        """Bytes that are equal for equal contents."""
        return self.content if isinstance(self.content, bytes) else repr(self.content).encode()

    @property
    def text(self) -> str:
        """The content as one text; fields are joined by newlines."""
        if isinstance(self.content, dict):
            return "\n".join(str(value) for value in self.content.values())
        return str(self.content)


@dataclass(frozen=True)
class Items:
    """The items of one source, and what was left out of it.

    >>> Items("my.csv", "text", [Item("line 2", "a")], left_out=[("line 3", "no text")]).notes()
    ['my.csv: left out 1 of 2 rows: line 3 (no text)']
    """

    name: str
    media: str  # of the contents: text, html, markdown, json, python, record or image
    items: list[Item]
    left_out: list[tuple[str, str]] = field(default_factory=list)
    ignored: str = ""  # what else is in the folder
    text: tuple[str, ...] = ()  # columns that were read
    label: str | None = None

    def notes(self) -> list[str]:
        """What a user should know of the reading, a line for each."""
        found = [self.ignored] if self.ignored else []
        if self.left_out:
            total = len(self.items) + len(self.left_out)
            places = sorted(self.left_out, key=lambda place: _in_order(place[0]))
            found.append(
                f"{self.name}: left out {len(self.left_out):,} of {total:,} rows: "
                + name_places(places)
            )
        return found


def name_places(places: Sequence[tuple[str, str]]) -> str:
    """The first places with their reasons, and how many there are more.

    >>> name_places([(f"line {number}", "empty") for number in range(2, 9)])[-27:]
    ', line 6 (empty) and 2 more'
    """
    named = ", ".join(f"{where} ({reason})" for where, reason in places[:_NAMED])
    more = len(places) - _NAMED
    return named + (f" and {more:,} more" if more > 0 else "")


def _in_order(where: str) -> list[tuple[int, str]]:
    """Places by their numbers: line 9 before line 10."""
    return [(int(part), "") if part.isdigit() else (0, part) for part in re.split(r"(\d+)", where)]


def digest_of(splits: dict[str, list[Item]]) -> str:
    """A checksum of everything that a run learns from: SHA-256, shortened."""
    found = hashlib.sha256()
    for name in sorted(splits):
        found.update(f"{name}:{len(splits[name])}\n".encode())
        for item in splits[name]:
            found.update(hashlib.sha256(item.key).digest())
            found.update(repr(item.label).encode() + b"\n")
    return f"sha256-{found.hexdigest()[:16]}"

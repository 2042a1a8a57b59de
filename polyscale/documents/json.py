"""JSON to trees, with the place of each value, which the json module does not tell."""

import json
import re
from typing import Any

from polyscale.documents.building import NUMBER, DocumentBuilder, Reading
from polyscale.documents.document import Document
from polyscale.documents.text import Text

_TOKEN = re.compile(
    r"[ \t\n\r]*(?:(?P<string>\"[^\"\\\x00-\x1f]*(?:\\.[^\"\\\x00-\x1f]*)*\")"
    r"|(?P<number>-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?)"
    r"|(?P<word>true|false|null)|(?P<mark>[][{}:,]))"
)
_ESCAPE = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|\\u....|\\.")


def read_json(source: str, reading: Reading | None = None) -> Document:
    """Read JSON: objects are keyed, arrays are sequences, strings are text, numbers are numbers.

    >>> document = read_json('{"title": "Fish swim", "weights": [1.5, 2]}')
    >>> document.values, document.tree.modality_names
    (['Fish', 'swim', 1.5, 2.0], ('text', 'number'))
    """
    if not isinstance(source, str):
        raise TypeError(
            f"source must be JSON as a str, got {type(source).__name__}; data that is already "
            "parsed is for HTEProcessor or SignalTree.from_nested"
        )
    builder = DocumentBuilder("source", reading or Reading(), source)
    _JSONReader(builder, source).read()
    return builder.finish()


class _JSONReader:
    def __init__(self, builder: DocumentBuilder, source: str) -> None:
        self.builder, self.source, self.at = builder, source, 0
        self.open: list[str] = []  # brackets; no recursion, so any depth is read

    def read(self) -> None:
        token, after_comma, key = self._next(), False, None
        while True:
            closes = token["mark"] in ("]", "}") and bool(self.open) and not after_comma
            if closes and token["mark"] == self.open[-1]:
                self._close()
            else:
                if self.open and self.open[-1] == "}":
                    key, token = self._key(token)
                if token["mark"] in ("[", "{"):
                    self._open(token["mark"], key)
                    token, after_comma, key = self._next(), False, None
                    continue
                self._value(token, key)
                key = None
            while self.open:
                token = self._next()
                if token["mark"] == ",":
                    token, after_comma = self._next(), True
                    break
                if token["mark"] != self.open[-1]:
                    self._refuse(token.start(token.lastgroup or 0), f"',' or '{self.open[-1]}'")
                self._close()
            if not self.open:
                break
        rest = self.source[self.at :].lstrip(" \t\n\r")
        if rest:
            self._refuse(len(self.source) - len(rest), "the end")

    def _next(self) -> re.Match[str]:
        match = _TOKEN.match(self.source, self.at)
        if match is None:
            spaces = len(self.source[self.at :]) - len(self.source[self.at :].lstrip(" \t\n\r"))
            self._refuse(self.at + spaces, "a value")
        assert match is not None
        self.at = match.end()
        return match

    def _refuse(self, place: int, expected: str) -> None:
        got = repr(self.source[place : place + 20]) if place < len(self.source) else "its end"
        line = self.source.count("\n", 0, place) + 1
        raise ValueError(
            f"source must be JSON, got {got} at character {place} (line {line}), where {expected} "
            "is expected"
        )

    def _key(self, token: re.Match[str]) -> tuple[str, re.Match[str]]:
        if token["string"] is None:
            self._refuse(token.start(token.lastgroup or 0), "a name in double quotes")
        colon = self._next()
        if colon["mark"] != ":":
            self._refuse(colon.start(colon.lastgroup or 0), "':'")
        return str(self._decoded(token)), self._next()

    def _open(self, mark: str, key: str | None) -> None:
        self.open.append("}" if mark == "{" else "]")
        self.builder.open(
            "object" if mark == "{" else "list",
            domain="keyed" if mark == "{" else "sequence",
            key=key,
        )

    def _close(self) -> None:
        self.open.pop()
        self.builder.close()

    def _value(self, token: re.Match[str], key: str | None) -> None:
        if token["mark"]:
            self._refuse(token.start("mark"), "a value")
        group = token.lastgroup or ""
        begin, end = token.span(group)
        self.builder.open("field" if key is not None else "item", key=key)
        if group == "string":
            self.builder.prose(self._text(token))
        elif group == "number":
            self.builder.leaf("number", float(token[group]), begin, end, NUMBER)
        else:
            self.builder.leaf("word", token[group], begin, end)
        self.builder.close()

    def _decoded(self, token: re.Match[str]) -> Any:
        try:
            return json.loads(token["string"])
        except ValueError:
            self._refuse(token.start("string"), "a string with valid escapes")

    def _text(self, token: re.Match[str]) -> Text:
        self._decoded(token)  # refuses bad escapes
        text, end = Text(), token.end("string") - 1
        at = token.start("string") + 1
        for match in _ESCAPE.finditer(self.source, at, end):
            text.add(self.source[at : match.start()], at, match.start())
            text.add(json.loads(f'"{match[0]}"'), *match.span())
            at = match.end()
        text.add(self.source[at:end], at, end)
        return text

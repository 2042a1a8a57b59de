"""Markdown to trees: the rules of markdown-it-py, wrapped so that they tell their places."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from polyscale._extras import require
from polyscale.documents.building import DocumentBuilder, Reading
from polyscale.documents.document import Document
from polyscale.documents.html import HTMLReader
from polyscale.documents.text import Image, Text

CONTAINERS = {
    "bullet_list": "list",
    "ordered_list": "list",
    "list_item": "item",
    "blockquote": "quote",
    "table": "table",
    "tr": "row",
    "th": "cell",
    "td": "cell",
}
MAX_NESTING = 100  # the parser recurses


def read_markdown(source: str, reading: Reading | None = None) -> Document:
    """Read CommonMark with tables: sections by heading level, lists, tables, links, images.

    >>> read_markdown("A [small](x) fish.").values
    ['A', 'small', 'fish']
    """
    if not isinstance(source, str):
        raise TypeError(
            f"source must be the Markdown as a str, got {type(source).__name__}; decode bytes, and "
            "read a file with Path(...).read_text()"
        )
    builder = DocumentBuilder("source", reading or Reading(), source)
    _MarkdownReader(builder, source).read()
    return builder.finish()


class _MarkdownReader:
    def __init__(self, builder: DocumentBuilder, source: str) -> None:
        self.builder, self.source = builder, source
        self.lines = _line_starts(source)
        self.heading = 0
        self.column = 0
        self.cell_end = 0  # where the last cell of a row ends

    def read(self) -> None:
        for token in _parser().parse(self.source):
            if token.nesting == 1 and token.level >= MAX_NESTING - 1:
                raise ValueError(
                    f"source must nest quotes and lists at most {MAX_NESTING} deep: the parser "
                    f"leaves out what is deeper, from line {token.map[0] + 1} on"
                )
            kind, _, way = token.type.rpartition("_")
            if kind in CONTAINERS and way == "open":
                self._open(kind, token)
            elif kind in CONTAINERS:
                self.builder.close()
            elif token.type == "heading_open":
                self.heading = int(token.tag[1:])
            elif token.type == "heading_close":
                self.heading = 0
            elif token.type == "inline":
                self._inline(token)
            elif token.type in ("fence", "code_block"):
                self._code(token)
            elif token.type == "html_block":
                self._html(token)

    def _open(self, kind: str, token: Any) -> None:
        position = -1
        if kind == "tr":
            self.column, self.cell_end = 0, self.lines[token.map[0]]
        elif kind in ("th", "td"):
            position, self.column = self.column, self.column + 1
        self.builder.open(CONTAINERS[kind], position=position)

    def _inline(self, token: Any) -> None:
        if self.builder.kinds[self.builder.stack[-1].node] == "cell":
            places = self._places_in_row(token)
        else:
            places = self._places(token.content, *token.map)
        text = Text()
        for child in token.children or ():
            self._child(child, text, places)
        text.close_link()
        if self.heading:
            self.builder.heading(self.heading, text)
        else:
            self.builder.block(text)

    def _child(self, child: Any, text: Text, places: Sequence[int]) -> None:
        begin, end = child.meta.get("begin", 0), child.meta.get("end", 0)
        first = places[begin] if begin < len(places) else self.cell_end
        last = places[end - 1] + 1 if 0 < end <= len(places) else first
        if child.type == "link_open":
            text.open_link()
        elif child.type == "link_close":
            text.close_link()
        elif child.type in ("softbreak", "hardbreak"):
            text.add("\n", first, first)
        elif child.type == "image":
            text.add_image(Image(child.attrs.get("src", ""), child.content), first, last)
        elif child.type == "html_inline" and child.content[:4].lower() == "<img":
            _add_tag(child.content, text, first, last)
        elif child.type in ("text", "text_special", "code_inline"):
            content = child.content
            if child.type == "code_inline":
                text.add(content, *self._inside(content, first, last))
            elif len(content) == end - begin:
                _add_characters(content, places[begin:end], text)
            else:  # an entity, an escape, or an address in angle brackets
                text.add(content, *self._inside(content, first, last))

    def _inside(self, content: str, first: int, last: int) -> tuple[int, int]:
        """The place of code between its backticks, or of an address between its brackets."""
        # A line break in code reads as a space.
        found = self.source[first:last].replace("\n", " ").find(content)
        return (first, last) if found < 0 else (first + found, first + found + len(content))

    def _places(self, content: str, first_line: int, end_line: int) -> Sequence[int]:
        """Where each character of a block's content stands in the source.

        Lines of the content are those of the source without what precedes them in quotes and lists,
        so they are aligned from their ends.
        """
        if "\n" not in content:  # as a range, because a line may have millions of characters
            row = min(first_line, len(self.lines) - 2)
            return self._aligned(content, self.lines[row], self.lines[row + 1])
        places: list[int] = []
        for number, line in enumerate(content.split("\n")):
            row = min(first_line + number, end_line - 1, len(self.lines) - 2)
            places += self._aligned(line, self.lines[row], self.lines[row + 1])
            places.append(self.lines[row + 1] - 1)  # the line break
        return places[:-1]

    def _aligned(self, line: str, begin: int, end: int) -> Sequence[int]:
        found = self.source.rfind(line, begin, end)
        if found >= 0:
            return range(found, found + len(line))
        at, places = end - 1, [begin] * len(line)
        for index in range(len(line) - 1, -1, -1):
            here = at
            while here >= begin and self.source[here] != line[index]:
                here -= 1
            if here >= begin:  # otherwise it is no character of the source, such as a tab's space
                at = here
                places[index] = at
                at -= 1
            else:
                places[index] = max(begin, at)
        return places

    def _places_in_row(self, token: Any) -> Sequence[int]:
        """Where the characters of a cell stand; cells are found from left to right."""
        row = min(token.map[0], len(self.lines) - 2)
        end = self.lines[row + 1]
        places = []
        for character in token.content:
            found = self.source.find(character, self.cell_end, end)
            if found >= 0:
                self.cell_end = found + 1
            places.append(max(self.cell_end - 1, 0))
        bar = self.source.find("|", self.cell_end, end)
        self.cell_end = bar + 1 if bar >= 0 else end
        return places

    def _code(self, token: Any) -> None:
        first, end = token.map
        places = self._places(token.content, first + (token.type == "fence"), end)
        text = Text()
        _add_characters(token.content, places, text)
        self.builder.lines(text)

    def _html(self, token: Any) -> None:
        begin, end = self.lines[token.map[0]], self.lines[token.map[1]]
        HTMLReader(self.builder, self.source[begin:end], begin).read()


def _add_characters(characters: str, places: Sequence[int], text: Text) -> None:
    if characters and places[-1] - places[0] == len(places) - 1:
        text.add(characters, places[0], places[-1] + 1)
        return
    for character, place in zip(characters, places, strict=True):
        text.add(character, place, place + 1)


def _add_tag(tag: str, text: Text, first: int, last: int) -> None:
    lexbor: Any = require("selectolax.lexbor", "documents", "reading HTML in Markdown")
    found = lexbor.LexborHTMLParser(tag).css_first("img")
    if found is not None:
        attributes = found.attributes
        image = Image(attributes.get("src") or "", attributes.get("alt") or "")
        text.add_image(image, first, last)


def _line_starts(source: str) -> list[int]:
    """Where lines begin, as CommonMark counts them, and the end of the source twice."""
    starts, at = [0], 0
    while at < len(source):
        line_end = min(
            (place for place in (source.find("\n", at), source.find("\r", at)) if place >= 0),
            default=len(source),
        )
        at = line_end + (2 if source.startswith("\r\n", line_end) else 1)
        starts.append(min(at, len(source)))
    return [*starts, len(source)]


@lru_cache(maxsize=1)
def _parser() -> Any:
    markdown_it: Any = require("markdown_it", "documents", "reading Markdown")
    from markdown_it import rules_inline as rules

    parser = markdown_it.MarkdownIt("commonmark", {"maxNesting": MAX_NESTING}).enable("table")
    # They join pieces of text that stand at different places.
    parser.disable(["fragments_join", "text_join"], True)
    parser.inline.ruler.at("text", _text)
    for name, rule in (
        ("newline", rules.newline),
        ("escape", rules.escape),
        ("backticks", rules.backtick),
        ("emphasis", rules.emphasis.tokenize),
        ("link", rules.link),
        ("image", rules.image),
        ("autolink", rules.autolink),
        ("html_inline", rules.html_inline),
        ("entity", rules.entity),
    ):
        parser.inline.ruler.at(name, _placed(rule))
    return parser


def _placed(rule: Callable[[Any, bool], bool]) -> Callable[[Any, bool], bool]:
    """The rule, noting in each token where in the block's content it stands."""

    def run(state: Any, silent: bool) -> bool:
        begin, count, waiting = state.pos, len(state.tokens), len(state.pending)
        done = rule(state, silent)
        if done and not silent:
            for index, token in enumerate(state.tokens[count:]):
                if index == 0 and waiting and token.type == "text" and "begin" not in token.meta:
                    # Single characters before that began nothing.
                    token.meta.update(begin=begin - len(token.content), end=begin)
                token.meta.setdefault("begin", begin)
                token.meta.setdefault("end", state.pos)
        return done

    return run


def _text(state: Any, silent: bool) -> bool:
    """The rule for text, as a token of its own with its place."""
    found = state.md.inline.terminator_re.search(state.src, state.pos)
    end = min(found.start(), state.posMax) if found else state.posMax
    if end == state.pos:
        return False
    if not silent:
        waiting = len(state.pending)
        token = state.push("text", "", 0)
        if waiting:
            state.tokens[-2].meta.update(begin=state.pos - waiting, end=state.pos)
        token.content = state.src[state.pos : end]
        token.meta.update(begin=state.pos, end=end)
    state.pos = end
    return True

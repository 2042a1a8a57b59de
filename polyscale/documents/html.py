"""HTML to trees.

Parsers that read pages as browsers do give no places in the source. So the source is parsed with a
number in place of each piece of text; where the number comes out, that piece stands.
"""

import re
from html import unescape
from typing import Any

from polyscale._extras import require
from polyscale.documents.building import DocumentBuilder, Reading
from polyscale.documents.document import Document
from polyscale.documents.text import Image, Text

# Every alternative ends at the end of the source at the latest, so that none is tried in vain.
_MARKUP = re.compile(
    r"<!--.*?(?:--!?>|\Z)"
    r"|<(?P<raw>script|style|template|noscript|iframe|noembed|noframes|xmp)\b.*?(?:</(?P=raw)\b|\Z)"
    r"|</?[a-z](?:[^>=]|=\s*\"[^\"]*(?:\"|\Z)|=\s*'[^']*(?:'|\Z)|=)*(?:>|\Z)"
    r"|<[!?/][^>]*(?:>|\Z)",
    re.DOTALL | re.IGNORECASE,
)
_ENTITY = re.compile(r"&(?:#[0-9]+|#[xX][0-9a-fA-F]+|[a-zA-Z][a-zA-Z0-9]*);?")
_OPEN, _CLOSE = "\ue000", "\ue001"  # around the number of a piece of text; of private use
_NUMBER = re.compile(rf"{_OPEN}([0-9]+){_CLOSE}|(\s+)")
_IMAGE = re.compile(r"<img(?=[\s/>])", re.IGNORECASE)
_PLACE = "data-polyscale-place"  # an attribute with the number of an image
_SURROGATE = re.compile("[\ud800-\udfff]")

SKIPPED = re.compile(
    "script|style|template|noscript|iframe|noembed|noframes|xmp|svg|math|object|select|datalist"
    "|button|input|textarea|audio|video|canvas"
)
CONTAINERS = {
    "ul": "list",
    "ol": "list",
    "menu": "list",
    "dl": "list",
    "li": "item",
    "dt": "item",
    "dd": "item",
    "table": "table",
    "tr": "row",
    "td": "cell",
    "th": "cell",
    "blockquote": "quote",
}
BLOCKS = re.compile(
    "address|article|aside|body|caption|center|details|dialog|div|fieldset|figcaption|figure|footer"
    "|form|header|hgroup|hr|html|legend|main|nav|p|search|section|summary|tbody|tfoot|thead"
)
HEADINGS = {f"h{level}": level for level in range(1, 7)}


def read_html(source: str, reading: Reading | None = None) -> Document:
    """Read a page: its title, sections by heading level, lists, tables, links and images.

    >>> document = read_html("<h1>Fish</h1><p>They <a href=x>swim</a>. <img src=f.png></p>")
    >>> document.values
    ['Fish', 'They', 'swim', Image(address='f.png', description='')]
    """
    if not isinstance(source, str):
        raise TypeError(
            f"source must be the HTML as a str, got {type(source).__name__}; decode bytes, and "
            "read a file with Path(...).read_text()"
        )
    builder = DocumentBuilder("source", reading or Reading(), source)
    HTMLReader(builder, source, 0).read()
    return builder.finish()


class HTMLReader:
    """Feeds a builder with what a page, or a piece of one, holds.

    `begin` is where the piece begins in the source of the builder.
    """

    def __init__(self, builder: DocumentBuilder, source: str, begin: int) -> None:
        self.builder, self.source, self.begin = builder, source, begin
        self.pieces: list[tuple[int, int]] = []  # of text
        self.images: list[tuple[int, int]] = []  # tags
        self.text = Text()  # of the block that is open
        self.spaced, self.breaks = True, 0
        self.code = 0  # open <pre>
        self.columns: list[int] = []  # cells so far of the rows that are open

    def read(self) -> None:
        """Walk the page from its beginning to its end, without recursion."""
        lexbor: Any = require("selectolax.lexbor", "documents", "reading HTML")
        node = lexbor.LexborHTMLParser(self._numbered()).root
        ancestors: list[Any] = []
        while node is not None:
            inside = self._enter(node)
            child = node.child if inside else None
            if child is not None:
                ancestors.append(node)
                node = child
                continue
            if inside:
                self._leave(node.tag)
            while ancestors and node.next is None:
                node = ancestors.pop()
                self._leave(node.tag)
            node = node.next if ancestors else None
        self._flush()

    def _numbered(self) -> str:
        """The source with the numbers of its pieces of text instead of them."""
        parts: list[str] = []
        at = 0
        for match in _MARKUP.finditer(self.source):
            self._number(at, match.start(), parts)
            markup = match[0].replace(_OPEN, " ").replace(_CLOSE, " ")
            if _IMAGE.match(markup):
                markup = f"<img {_PLACE}={len(self.images)} {markup[4:]}"
                self.images.append((match.start(), match.end()))
            parts.append(markup)
            at = match.end()
            if match["raw"]:  # the pattern has taken the beginning of the closing tag, too
                at = self.source.find(">", at) + 1 or len(self.source)
                parts.append(">")
        self._number(at, len(self.source), parts)
        return _SURROGATE.sub("\ufffd", "".join(parts)).replace("\0", " ")

    def _number(self, begin: int, end: int, parts: list[str]) -> None:
        text = self.source[begin:end]
        if text.strip():
            parts.append(f"{_OPEN}{len(self.pieces)}{_CLOSE}")
            self.pieces.append((begin, end))
        elif text:
            parts.append(" ")

    def _enter(self, node: Any) -> bool:
        """Begin an element or take a text; False to skip what is in it."""
        tag = node.tag
        if tag == "-text":
            self._take(node.text_content or "")
        elif tag is None or SKIPPED.fullmatch(tag):
            return False
        elif tag == "title":
            self._title(node)
            return False
        elif tag == "br":
            self._break()
        elif tag == "img":
            self._image(node.attributes)
        elif tag == "a":
            self.text.open_link()
        elif tag in HEADINGS or BLOCKS.fullmatch(tag):
            self._flush()
        elif tag == "pre":
            self._flush()
            self.code += 1
        elif tag in CONTAINERS:
            self._flush()
            if tag == "tr":
                self.columns.append(0)
            position = -1
            if tag in ("td", "th") and self.columns:
                # The column, also where empty cells before it are left out.
                position = self.columns[-1]
                self.columns[-1] += 1
            self.builder.open(CONTAINERS[tag], position=position)
        return True

    def _leave(self, tag: str) -> None:
        if tag in HEADINGS:
            text, self.text = self.text, Text()
            text.close_link()
            self.spaced, self.breaks = True, 0
            self.builder.heading(HEADINGS[tag], text)
        elif tag == "a":
            self.text.close_link()
        elif tag == "pre":
            self._flush()
            self.code = max(0, self.code - 1)
        elif BLOCKS.fullmatch(tag):
            self._flush()
        elif tag in CONTAINERS:
            self._flush()
            self.builder.close()
            if tag == "tr":
                self.columns.pop()

    def _take(self, numbered: str) -> None:
        for match in _NUMBER.finditer(numbered):
            if match[1] is None:
                self._space()
            elif int(match[1]) < len(self.pieces):
                self._add(*self.pieces[int(match[1])])

    def _add(self, begin: int, end: int) -> None:
        """Append a piece of the source, its entities as characters."""
        at, self.breaks = begin, 0
        for match in _ENTITY.finditer(self.source, begin, end):
            character = unescape(match[0])
            if character != match[0]:
                self._literal(at, match.start())
                at = match.end()
                self.text.add(character, self.begin + match.start(), self.begin + at)
        self._literal(at, end)
        self.spaced = self.source[end - 1].isspace()

    def _literal(self, begin: int, end: int) -> None:
        self.text.add(self.source[begin:end], self.begin + begin, self.begin + end)

    def _space(self) -> None:
        if not self.spaced:
            self.text.add(" ", self.text.end, self.text.end)
            self.spaced = True

    def _break(self) -> None:
        """A line break; two in a row end the paragraph."""
        self.breaks += 1
        if self.breaks == 2 and not self.code:
            self._flush()
        else:
            self.text.add("\n", self.text.end, self.text.end)
            self.spaced = True

    def _image(self, attributes: dict[str, str | None]) -> None:
        image = Image(attributes.get("src") or "", attributes.get("alt") or "")
        number = attributes.get(_PLACE) or ""
        if number.isdecimal() and int(number) < len(self.images):
            begin, end = self.images[int(number)]
            self.text.add_image(image, self.begin + begin, self.begin + end)
            self.spaced, self.breaks = False, 0

    def _title(self, node: Any) -> None:
        kept, self.text = self.text, Text()
        self._take(node.text() or "")
        self.builder.title(self.text)
        self.text, self.spaced = kept, True

    def _flush(self) -> None:
        """End the block of text that is open."""
        text, self.text = self.text, Text()
        self.spaced, self.breaks = True, 0
        if text.in_link:  # a link around several blocks
            self.text.open_link()
        text.close_link()
        if text.text.strip():
            if self.code:
                self.builder.lines(text)
            else:
                self.builder.block(text)

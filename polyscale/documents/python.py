"""Python source to trees: blocks by their indentation, lines of tokens in them."""

import io
import keyword
import token as kinds
import tokenize

from polyscale.documents.building import DocumentBuilder, Reading
from polyscale.documents.document import Document

_STARTS = {getattr(kinds, name, -1) for name in ("FSTRING_START", "TSTRING_START")} - {-1}
_ENDS = {getattr(kinds, name, -1) for name in ("FSTRING_END", "TSTRING_END")} - {-1}
_SKIPPED = {tokenize.NL, tokenize.ENCODING, tokenize.ENDMARKER}


def read_python(source: str, reading: Reading | None = None) -> Document:
    r"""Read Python: classes and functions are sections, statements lines, tokens leaves.

    >>> document = read_python("def f(x):\n    return x + 1\n")
    >>> document.values[:6], [document.text(node) for node in document.nodes("section")]
    (['def', 'f', '(', 'x', ')', ':'], ['def f(x):\n    return x + 1'])
    """
    if not isinstance(source, str):
        raise TypeError(f"source must be Python as a str, got {type(source).__name__}")
    builder = DocumentBuilder("source", reading or Reading(), source)
    builder.headings_need_content = False  # a function in one line is a function
    try:
        _read(builder, source)
    except (tokenize.TokenError, SyntaxError) as error:
        raise ValueError(f"source must be Python: {error}") from error
    return builder.finish()


def _read(builder: DocumentBuilder, source: str) -> None:
    starts = [0]
    for line in io.StringIO(source, newline=""):
        starts.append(starts[-1] + len(line))
    blocks: list[int] = []  # nodes that are open for each indentation: 1, or 2 for a section
    in_line, opens_section, strings = False, False, 0
    begin = 0
    comments: list[tuple[str, int, int]] = []
    # StringIO keeps \r\n as it is, so that the places are those of the source.
    for item in tokenize.generate_tokens(io.StringIO(source, newline="").readline):
        if item.type == tokenize.INDENT:
            if opens_section:
                builder.open("body", key="body")
            else:
                builder.open("block")
            blocks.append(2 if opens_section else 1)
            opens_section = False
            for comment in comments:
                _comment(builder, *comment)
            comments.clear()
            continue
        if item.type == tokenize.DEDENT:
            if opens_section:
                builder.close()
                opens_section = False
            for _ in range(blocks.pop()):
                builder.close()
            continue
        if item.type == tokenize.NEWLINE:
            if in_line:
                builder.close()
            in_line = False
            continue
        if item.type in _SKIPPED:
            continue
        here = min(starts[item.start[0] - 1] + item.start[1], len(source))
        end = min(starts[item.end[0] - 1] + item.end[1], len(source))
        if item.type == tokenize.COMMENT and not in_line:
            if opens_section:  # it is in the block that is not open yet
                comments.append((item.string, here, end))
            else:
                _comment(builder, item.string, here, end)
            continue
        if not in_line:
            if opens_section:  # its body was on its own line
                builder.close()
                for comment in comments:
                    _comment(builder, *comment)
                comments.clear()
            opens_section = _begins_section(source, here)
            if opens_section:
                builder.open("section", domain="keyed")
            builder.open("line", key="heading" if opens_section else None)
            in_line = True
        if item.type in _STARTS:
            begin, strings = (begin if strings else here), strings + 1
        elif item.type in _ENDS:
            strings -= 1
            if not strings:
                builder.leaf("string", source[begin:end], begin, end)
        elif not strings:
            builder.leaf(_kind(item), item.string, here, end)
    if opens_section:
        builder.close()
    for comment in comments:
        _comment(builder, *comment)


def _comment(builder: DocumentBuilder, comment: str, begin: int, end: int) -> None:
    builder.open("line")
    builder.leaf("comment", comment, begin, end)
    builder.close()


def _begins_section(source: str, here: int) -> bool:
    line = source[here : here + 100]
    return line.startswith(("def ", "class ", "async def "))


def _kind(item: tokenize.TokenInfo) -> str:
    if item.type == tokenize.NAME:
        return "keyword" if keyword.iskeyword(item.string) else "name"
    names = {tokenize.STRING: "string", tokenize.NUMBER: "literal", tokenize.COMMENT: "comment"}
    return names.get(item.type, "mark")

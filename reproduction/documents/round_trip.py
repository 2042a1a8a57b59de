"""Reads real HTML and Markdown files and checks every leaf against its place in the source.

`python -m reproduction.documents.round_trip FOLDER ... --output FILE` draws files below them.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from polyscale._files import write_json
from polyscale.documents import Document, Reading, read_html, read_markdown
from polyscale.documents.words import split_words
from polyscale.trees import SignalTree

KINDS = {"html": (".html", ".htm"), "markdown": (".md",)}
_MARKUP = re.compile(r"</?[a-zA-Z][^>]*>|\]\([^)]*\)|\]\[[^\]]*\]|[`*_\[\]\\]")
LARGEST = 400_000  # bytes
_SKIPPED = {
    "script", "style", "template", "noscript", "iframe", "svg", "math", "object", "select",
    "button", "textarea", "audio", "video", "canvas", "noframes", "title",
}  # fmt: skip


class VisibleText(HTMLParser):
    """The text of a page by another parser, Python's own.

    >>> page = VisibleText()
    >>> page.feed("<p>One <b>two</b><script>x</script>")
    >>> "".join(page.parts).split()
    ['One', 'two']
    """

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.parts: list[str] = []
        self.skipped: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        if tag in _SKIPPED:
            self.skipped.append(tag)
        elif tag not in ("b", "i", "em", "strong", "span", "a", "code", "tt", "font", "sub", "sup"):
            self.parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in self.skipped:
            while self.skipped.pop() != tag:
                pass

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.parts.append(data)


def check_file(source: str, kind: str) -> dict[str, Any]:
    """Read a source both ways, words and sentences as leaves; what was found.

    >>> check_file("<p>One &amp; two.", "html")["misplaced"]
    0
    """
    read = read_html if kind == "html" else read_markdown
    began = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of large families
            document = read(source, None)
            sentences = read(source, Reading(sentences=True))
    except ValueError as error:
        return {"refused": str(error).splitlines()[0][:120]}
    seconds = time.perf_counter() - began
    for one in (document, sentences):
        one.tree.validate()
    found = {
        "characters": len(source),
        "leaves": document.tree.num_leaves,
        "sentences": sentences.tree.num_leaves,
        "depth": document.tree.max_depth,
        "misplaced": sum(1 for _ in misplaced(document)),
        "saved_alike": _saved_alike(document.tree),
        "words_differ": sum((_words(document) - _words(sentences)).values()),
        "seconds": round(seconds, 4),
    }
    if kind == "html":
        page = VisibleText()
        page.feed(source)
        visible = Counter(word for _, _, word in split_words("".join(page.parts)))
        common = sum((visible & _words(document)).values())
        found["words_of_page"] = sum(visible.values())
        found["words_found"] = common
    return found


def misplaced(document: Document) -> Iterator[tuple[str, str]]:
    """Leaves that are not what the source has at their place: (leaf, source)."""
    tree = document.tree
    assert tree.source_offsets is not None
    assert document.source is not None
    for value, (begin, end) in zip(document.values, tree.source_offsets.tolist(), strict=True):
        if isinstance(value, str):
            here = document.source[begin:end]
            # A word may go on after markup: an<b>other</b>, `it`'s, [two](x)s.
            shown = _MARKUP.sub("", unescape(here))
            if value not in (here, unescape(here), shown):
                yield value, here


def _words(document: Document) -> Counter[str]:
    texts = [value for value in document.values if isinstance(value, str)]
    return Counter(word for text in texts for _, _, word in split_words(text))


def _saved_alike(tree: SignalTree) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        tree.save(Path(folder) / "tree.safetensors")
        return SignalTree.load(Path(folder) / "tree.safetensors") == tree


def draw(folders: Sequence[Path], each: int, seed: int) -> list[tuple[str, Path]]:
    """So many files of each kind, none twice by its content."""
    drawn: list[tuple[str, Path]] = []
    for kind, endings in KINDS.items():
        found = sorted(p for folder in folders for p in folder.rglob("*") if p.suffix in endings)
        random.Random(seed).shuffle(found)
        seen: set[bytes] = set()
        for path in found:
            if len(seen) == each:
                break
            if path.is_file() and 200 < path.stat().st_size < LARGEST:
                content = path.read_bytes()
                if content not in seen:
                    seen.add(content)
                    drawn.append((kind, path))
    return drawn


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path)
    parser.add_argument("--each", type=int, default=250, help="files of each kind")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    files = []
    for kind, path in draw(options.folders, options.each, options.seed):
        content = path.read_bytes()
        source = content.decode("utf-8", errors="replace")
        sha = hashlib.sha256(content).hexdigest()
        files.append({"kind": kind, "name": path.name, "sha256": sha, **check_file(source, kind)})
    write_json(options.output, {"seed": options.seed, "summary": summary(files), "files": files})
    print(summary(files))


def summary(files: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Counts by kind."""
    found = {}
    for kind in KINDS:
        some = [one for one in files if one["kind"] == kind]
        read = [one for one in some if "refused" not in one]
        found[kind] = {
            "files": len(some),
            "refused": len(some) - len(read),
            **{
                name: sum(one.get(name, 0) for one in read)
                for name in (
                    "characters", "leaves", "misplaced", "words_differ", "saved_alike",
                    "words_of_page", "words_found",
                )
            },
            "seconds": round(sum(one["seconds"] for one in read), 2),
        }  # fmt: skip
    return found


if __name__ == "__main__":
    main()

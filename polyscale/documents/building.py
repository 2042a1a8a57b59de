"""Trees of documents, made while they are read from beginning to end."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from polyscale.checks import check_flag, check_integer
from polyscale.documents.document import Document
from polyscale.documents.text import Image, Text
from polyscale.documents.words import Split, split_long, split_words
from polyscale.trees import SignalTree
from polyscale.trees.families import MAX_FAMILY, split_families
from polyscale.trees.sentences import split_paragraphs, split_sentences
from polyscale.trees.structure import breadth_first_order

TEXT, IMAGE, NUMBER = "text", "image", "number"  # modalities of leaves
MAX_LEAVES = 1_000_000


@dataclass(frozen=True)
class Reading:
    """How documents are read.

    Args:
        drop_empty: leave out what has no content, such as sections with nothing below their
            heading; otherwise an empty word stands in it.
        max_family: split larger families into windows, with a warning; None splits none.
        max_leaves: refuse documents of more leaves.
        split: (begin, end, value) of each leaf of a text; words by default.
        sentences: make each sentence one leaf, with its text as its value; `split` is not used.
        max_characters: divide longer sentences at spaces, if sentences are leaves.
    """

    drop_empty: bool = True
    max_family: int | None = MAX_FAMILY
    max_leaves: int = MAX_LEAVES
    split: Split = split_words
    sentences: bool = False
    max_characters: int = 400

    def __post_init__(self) -> None:
        check_flag("drop_empty", self.drop_empty)
        check_flag("sentences", self.sentences)
        check_integer("max_characters", self.max_characters, least=1)
        check_integer("max_leaves", self.max_leaves, least=1)
        if self.max_family is not None:
            check_integer("max_family", self.max_family, least=2, hint="None splits no family")


@dataclass
class _Open:
    node: int
    level: int  # of a section's body; 0 for everything else


class DocumentBuilder:
    """Opens and closes nodes in the order of the text; nothing here recurses.

    >>> builder = DocumentBuilder("source", Reading())
    >>> text = Text()
    >>> text.add("One word. Two words.", 0, 20)
    >>> builder.block(text)
    >>> builder.finish().kinds[:4]
    ('document', 'body', 'paragraph', 'sentence')
    """

    def __init__(self, name: str, reading: Reading, source: str | None = None) -> None:
        self.name, self.reading, self.source = name, reading, source
        self.parents = [-1]
        self.kinds = ["document"]
        self.domains: list[str | None] = ["keyed"]
        self.keys: list[str | None] = [None]
        self.modalities: list[str | None] = [None]
        self.positions = [-1]  # -1 for the index in the family
        self.leaves: dict[int, tuple[Any, int, int]] = {}  # node: value, begin, end
        self.stack = [_Open(0, 0)]
        self.has_title = False
        self.headings_need_content = True  # sections without a body are empty
        self.link: tuple[int, int] | None = None  # the one that is open, as places in the text

    # Nodes

    def open(
        self,
        kind: str,
        *,
        domain: str = "sequence",
        key: str | None = None,
        level: int = 0,
        position: int = -1,
    ) -> None:
        """Open a node under the one that is open."""
        if len(self.stack) == 1 and key is None:
            self._add(0, "body", "sequence", "body")
            self.stack.append(_Open(len(self.parents) - 1, 0))
        self._add(self.stack[-1].node, kind, domain, key, position=position)
        self.stack.append(_Open(len(self.parents) - 1, level))

    def close(self) -> None:
        """Close the node that is open, and the sections in it."""
        while self.stack[-1].level:
            self._close_section()
        self.stack.pop()

    def leaf(self, kind: str, value: Any, begin: int, end: int, modality: str = TEXT) -> None:
        """Add a leaf to the node that is open."""
        if len(self.leaves) >= self.reading.max_leaves:
            raise ValueError(
                f"{self.name} must have at most {self.reading.max_leaves:,} leaves, got more; "
                "divide it, or pass a larger max_leaves"
            )
        self._add(self.stack[-1].node, kind, None, None, modality)
        self.leaves[len(self.parents) - 1] = (value, begin, end)

    def _add(
        self,
        parent: int,
        kind: str,
        domain: str | None,
        key: str | None,
        modality: str | None = None,
        position: int = -1,
    ) -> None:
        self.parents.append(parent)
        self.kinds.append(kind)
        self.domains.append(domain)
        self.keys.append(key)
        self.modalities.append(modality)
        self.positions.append(position)

    # What documents are made of

    def title(self, text: Text) -> None:
        """Set the title; further titles are ignored."""
        if not self.has_title and text.text.strip():
            self.has_title = True
            kept, self.stack = self.stack, self.stack[:1]
            self.block(text, "title", key="title")
            self.stack = kept

    def heading(self, level: int, text: Text) -> None:
        """Begin a section; it ends before the next heading of its level or one above."""
        if level == 1 and not self.has_title and len(self.parents) == 1:
            self.title(text)
            return
        while self.stack[-1].level >= level:
            self._close_section()
        self.open("section", domain="keyed")
        self.block(text, "heading", key="heading")
        self.open("body", key="body", level=level)

    def _close_section(self) -> None:
        self.stack.pop()  # the body
        self.stack.pop()  # the section

    def block(self, text: Text, kind: str = "paragraph", key: str | None = None) -> None:
        """Add a node with the sentences of a text."""
        self.open(kind, key=key)
        if self.reading.sentences:
            self._sentences(text, split_sentences(text.text))
            self.close()
            return
        ends = [end for _, end in split_sentences(text.text)]
        sentence = -1
        for begin, end, value in self._leaves_of(text):
            number = bisect_right(ends, begin)
            if number != sentence:
                if sentence >= 0:
                    self._end_sentence(text)
                self.open("sentence")
                sentence = number
            self._enter_link(text, begin)
            place = text.place(begin, end)
            if isinstance(value, Image):
                self.leaf("image", value, *place, IMAGE)
            else:
                self.leaf("word", value, *place)
        if sentence >= 0:
            self._end_sentence(text)
        self.close()

    def _sentences(self, text: Text, places: Iterable[tuple[int, int]]) -> None:
        """Add a leaf for each sentence, and for each image between them."""
        images = sorted(text.images)
        for begin, end in places:
            cuts = [place for place in images if begin <= place < end]
            for place in [*cuts, end]:
                for first, last in split_long(text.text, begin, place, self.reading.max_characters):
                    self.leaf("sentence", text.text[first:last], *text.place(first, last))
                if place in text.images:
                    self.leaf("image", text.images[place], *text.place(place, place + 1), IMAGE)
                begin = place + 1

    def _enter_link(self, text: Text, begin: int) -> None:
        """Open or close the node of a link before the leaf at `begin`."""
        place = bisect_right(text.links, (begin, len(text.text) + 1)) - 1
        link = text.links[place] if place >= 0 and begin < text.links[place][1] else None
        if link != self.link:
            if self.link is not None:
                self.close()
            if link is not None:
                self.open("link")
            self.link = link

    def _end_sentence(self, text: Text) -> None:
        if self.link is not None:
            self.close()
            self.link = None
        self.close()

    def _leaves_of(self, text: Text) -> Iterator[tuple[int, int, Any]]:
        """Yield the leaves of a text, those between images split apart from each other."""
        whole, begin = text.text, 0
        for place in [*text.images, len(whole)]:
            for first, last, value in self.reading.split(whole[begin:place]):
                if last > first:
                    yield begin + first, begin + last, value
            if place in text.images:
                yield place, place + 1, text.images[place]
            begin = place + 1

    def lines(self, text: Text, kind: str = "code") -> None:
        """Add a node with a family for each line of a text."""
        self.open(kind)
        whole, begin = text.text, 0
        for line in whole.splitlines(keepends=True):
            if self.reading.sentences:
                self._sentences(text, [(begin, begin + len(line))])
                begin += len(line)
                continue
            self.open("line")
            for first, last, value in self.reading.split(line):
                if last > first:
                    self.leaf("word", value, *text.place(begin + first, begin + last))
            self.close()
            begin += len(line)
        self.close()

    def prose(self, text: Text) -> None:
        """Add the paragraphs of plain text to the node that is open."""
        whole = text.text
        for begin, end in split_paragraphs(whole):
            self.block(text.part(begin, end))

    # The tree

    def finish(self) -> Document:
        """Return the document; raise if there is nothing in it."""
        if not self.reading.drop_empty:
            self._fill_empty()
        kept = self._kept()
        if not kept:
            hint = (
                "; pass drop_empty=False to keep sections that are only a heading"
                if self.leaves and self.reading.drop_empty
                else ""
            )
            raise ValueError(f"{self.name} must have some content, got none{hint}")
        number = {node: index for index, node in enumerate(kept)}
        parent = torch.tensor([number.get(self.parents[node], -1) for node in kept])
        tree = SignalTree.from_parents(
            parent,
            domains=[self.domains[node] for node in kept],
            positions=self._positions(kept),
            keys=[self.keys[node] for node in kept],
            modalities=[self.modalities[node] for node in kept],
        )
        order = breadth_first_order(parent).tolist()  # as from_parents numbers them
        found = [self.leaves[kept[order[leaf]]] for leaf in tree.leaf_order.tolist()]
        offsets = None
        if self.source is not None:
            offsets = torch.tensor([place for _, *place in found])
        tree = replace(tree, source_offsets=offsets)
        tree, before = split_families(tree, self.reading.max_family)
        kinds = ("window" if n < 0 else self.kinds[kept[order[n]]] for n in before.tolist())
        return Document(tree, [value for value, *_ in found], tuple(kinds), self.source)

    def _fill_empty(self) -> None:
        inner = set(self.parents)
        for node in range(len(self.parents)):
            if node not in inner and node not in self.leaves:
                self._add(node, "word", None, None, TEXT)
                self.leaves[len(self.parents) - 1] = ("", -1, -1)

    def _kept(self) -> list[int]:
        """The nodes with content, by number."""
        count = [int(node in self.leaves) for node in range(len(self.parents))]
        with_body = set()
        drops = self.reading.drop_empty and self.headings_need_content
        for node in range(len(self.parents) - 1, 0, -1):  # children before their parents
            parent, is_section = self.parents[node], self.kinds[node] == "section"
            if is_section and drops and node not in with_body:
                count[node] = 0
            if count[node] and self.kinds[node] == "body":
                with_body.add(parent)
            count[parent] += count[node]
        for node in range(1, len(self.parents)):
            if not count[self.parents[node]]:
                count[node] = 0
        return [node for node, leaves in enumerate(count) if leaves]

    def _positions(self, kept: list[int]) -> list[int]:
        family: dict[int, int] = {}
        positions = []
        for node in kept:
            parent = self.parents[node]
            index = family.get(parent, 0)
            family[parent] = index + 1
            given = self.positions[node]
            positions.append(0 if parent < 0 else index if given < 0 else given)
        return positions

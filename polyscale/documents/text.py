"""The text of a block, as a reader sees it, and where each character stands in the source."""

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True)
class Image:
    """An image of a document: its address and the text that stands for it."""

    address: str
    description: str = ""


IMAGE = "\ufffc"  # the character of Unicode for an object in a text


class Text:
    """Pieces of text with their places in the source, and the links and images among them.

    >>> text = Text()
    >>> text.add("fish ", 10, 15)
    >>> text.add("&", 15, 20)  # written as an entity
    >>> text.text, text.place(0, 4), text.place(5, 6)
    ('fish &', (10, 14), (15, 20))
    """

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._starts: list[int] = []
        self._places: list[tuple[int, int]] = []
        self._length = 0
        self.links: list[tuple[int, int]] = []  # (begin, end) in the text
        self.images: dict[int, Image] = {}
        self._link_begin = -1

    @property
    def text(self) -> str:
        if len(self._parts) > 1:
            self._parts = ["".join(self._parts)]
        return self._parts[0] if self._parts else ""

    @property
    def end(self) -> int:
        """Where the last piece ends in the source; 0 if there is none."""
        return self._places[-1][1] if self._places else 0

    def add(self, text: str, begin: int, end: int) -> None:
        """Append characters that the source has at [begin, end), in as many or other characters."""
        if text:
            self._starts.append(self._length)
            self._places.append((begin, end))
            self._parts.append(text)
            self._length += len(text)

    def add_image(self, image: Image, begin: int, end: int) -> None:
        """Append an image."""
        self.images[self._length] = image
        self.add(IMAGE, begin, end)

    def open_link(self) -> None:
        """Begin a link here; links do not nest."""
        self.close_link()
        self._link_begin = self._length

    def close_link(self) -> None:
        """End the open link here, if there is one."""
        if 0 <= self._link_begin < self._length:
            self.links.append((self._link_begin, self._length))
        self._link_begin = -1

    @property
    def in_link(self) -> bool:
        return self._link_begin >= 0

    def part(self, begin: int, end: int) -> "Text":
        """Return the characters [begin, end) with their places, without links and images."""
        part, at = Text(), begin
        while at < end:
            piece = bisect_right(self._starts, at) - 1
            following = self._starts[piece + 1] if piece + 1 < len(self._starts) else self._length
            stop = min(following, end)
            first, last = self._places[piece]
            start = self._starts[piece]
            if following - start == last - first:
                first, last = first + at - start, first + stop - start
            part.add(self.text[at:stop], first, last)
            at = stop
        return part

    def place(self, begin: int, end: int) -> tuple[int, int]:
        """Return where the characters [begin, end) of the text stand in the source."""
        first, last = self._place_of(begin), self._place_of(end - 1)
        return first[0], max(first[0], last[1])

    def _place_of(self, index: int) -> tuple[int, int]:
        piece = bisect_right(self._starts, index) - 1
        begin, end = self._places[piece]
        start = self._starts[piece]
        following = self._starts[piece + 1] if piece + 1 < len(self._starts) else self._length
        if following - start != end - begin:  # not written as it reads
            return begin, end
        return begin + index - start, begin + index - start + 1

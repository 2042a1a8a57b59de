"""The words of a text in any script, and where they stand."""

import re
import sys
import unicodedata
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

# (begin, end, value) of each leaf of a text.
Split = Callable[[str], Iterable[tuple[int, int, Any]]]

# Chinese and Japanese put no spaces between words: each character is a leaf.
_UNSPACED = (
    r"\u3041-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)

_LETTER = re.compile(r"[^\W_]")


def split_words(text: str) -> Iterable[tuple[int, int, str]]:
    """Yield (begin, end, word) for each word of a text; punctuation is left out.

    >>> [word for _, _, word in split_words("It isn't good: 3,5 € -- 猫だ")]
    ['It', "isn't", 'good', '3', '5', '猫', 'だ']
    """
    for match in _pattern().finditer(text):
        yield match.start(), match.end(), match[0]


def split_long(text: str, begin: int, end: int, most: int) -> Iterable[tuple[int, int]]:
    """Yield the places of text[begin:end] in parts of at most `most` characters, without spaces
    around them; those without a letter or a digit are left out.

    >>> text = " one two three. -- "
    >>> [text[first:last] for first, last in split_long(text, 0, len(text), 8)]
    ['one two', 'three.']
    """
    while begin < end:
        if text[begin].isspace():
            begin += 1
            continue
        stop = end
        if end - begin > most:
            # At the last space, where there is one.
            space = max(
                text.rfind(" ", begin, begin + most + 1), text.rfind("\n", begin, begin + most + 1)
            )
            stop = space if space > begin else begin + most
        last = stop
        while text[last - 1].isspace():
            last -= 1
        if _LETTER.search(text, begin, last):
            yield begin, last
        begin = stop


@lru_cache(maxsize=1)
def _pattern() -> re.Pattern[str]:
    # Vowel signs of Indic scripts are marks, which \w does not match.
    marks = _ranges_of_marks()
    letters = rf"(?:[^\W_{_UNSPACED}]+|[{marks}]+)+"
    return re.compile(rf"[{_UNSPACED}][{marks}]*|{letters}(?:['\u2019]{letters})*")


def _ranges_of_marks() -> str:
    ranges: list[list[int]] = []
    for code in range(0x300, min(sys.maxunicode, 0x1FFFF)):
        if unicodedata.category(chr(code))[0] == "M":
            if ranges and ranges[-1][1] == code - 1:
                ranges[-1][1] = code
            else:
                ranges.append([code, code])
    return "".join(f"{chr(first)}-{chr(last)}" for first, last in ranges)

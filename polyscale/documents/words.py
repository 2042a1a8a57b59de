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


def split_words(text: str) -> Iterable[tuple[int, int, str]]:
    """Yield (begin, end, word) for each word of a text; punctuation is left out.

    >>> [word for _, _, word in split_words("It isn't good: 3,5 € -- 猫だ")]
    ['It', "isn't", 'good', '3', '5', '猫', 'だ']
    """
    for match in _pattern().finditer(text):
        yield match.start(), match.end(), match[0]


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

"""Where paragraphs and sentences begin, by rule."""

import re
from collections.abc import Iterator
from itertools import pairwise

# Never the end of a sentence.
_NEVER = """
    mr mrs ms dr prof rev hon gen col maj capt lt sgt gov sen rep pres st mt messrs mme mlle
    e.g i.e eg ie cf vs v viz approx resp ca incl excl est dept univ
"""
# The end of a sentence only before a word that usually begins one.
_SELDOM = "etc inc ltd co corp jr sr bros al ph.d m.d b.a m.a"
# Not the end of a sentence before a number.
_NUMBERED = """
    no nos fig figs p pp vol vols ch sec eq eqs art par ep
    jan feb mar apr jun jul aug sep sept oct nov dec
"""
_STARTERS = """
    a an the this that these those it he she i we you they there here in on at for from as if
    when while after before but and so yet however my his her its our your their what who how
    why where not no one some all
"""
NEVER = frozenset(_NEVER.split())
SELDOM = frozenset(_SELDOM.split())
NUMBERED = frozenset(_NUMBERED.split())
STARTERS = frozenset(_STARTERS.split())

# Marks that end a sentence whatever follows, from the property Sentence_Terminal of Unicode (UAX
# 29, STerm): those of scripts that use no full stop, question mark or exclamation mark of ours.
TERMINATORS = (
    r"\u037e\u0589\u061d-\u061f\u06d4\u0700-\u0702\u07f9\u0837\u0839\u083d\u083e\u0964\u0965"
    r"\u104a\u104b\u1362\u1367\u1368\u166e\u1735\u1736\u17d4\u17d5\u1803\u1809\u1944\u1945"
    r"\u1aa8-\u1aab\u1b5a\u1b5b\u1b5e\u1b5f\u1b7d\u1b7e\u1c3b\u1c3c\u1c7e\u1c7f"
    r"\u203c\u203d\u2047-\u2049\u2cf9-\u2cfb\u2e2e\u2e3c\u2e53\u2e54\u3002\ua4ff\ua60e\ua60f"
    r"\ua6f3\ua6f7\ua876\ua877\ua8ce\ua8cf\ua92f\ua9c8\ua9c9\uaa5d-\uaa5f\uaaf0\uaaf1\uabeb"
    r"\ufe12\ufe15\ufe16\ufe52\ufe56\ufe57\uff01\uff0e\uff1f\uff61"
    r"\U00010a56\U00010a57\U00011047\U00011048\U000110be-\U000110c1\U00011141-\U00011143"
    r"\U000111c5\U000111c6\U00011238\U00011239\U0001123b\U0001123c\U0001144b\U0001144c"
    r"\U000115c2\U000115c3\U00011641\U00011642\U0001173c-\U0001173e\U00016a6e\U00016a6f"
)
# Curly quotes and full-width marks are escaped, because they are easily confused.
CLOSING = r"\"'\u201d\u2019\u00bb)\]"
# Brackets and quotes of any script that close, among them those of Chinese and Japanese.
WIDE_CLOSING = (
    CLOSING + r"}\u203a\u3009\u300b\u300d\u300f\u3011\u3015\u3017\u3019\u301b\u301e\u301f"
    r"\ufd3e\uff02\uff07\uff09\uff3d\uff5d\uff60\uff63"
)
OPENING = r"\"'\u201c\u2018\u00ab(\["
PARAGRAPH_BREAK = re.compile(r"(?:<br\s*/?>\s*){2,}|\n\s*\n\s*|\u2029\s*", re.IGNORECASE)
CANDIDATE = re.compile(
    # A mark is matched from its first character only, or long runs would take quadratic time.
    rf"(?P<mark>(?<![.!?\u2026])[.!?\u2026]+)(?P<close>[{CLOSING}]*)(?P<gap>(?:\s|<br\s*/?>)+)"
    rf"|(?P<wide>(?<![{TERMINATORS}])[{TERMINATORS}][{TERMINATORS}.!?\u2026]*[{WIDE_CLOSING}]*\s*)"
    r"|(?P<line>(?:<br\s*/?>\s*)+)",
    re.IGNORECASE,
)
START = re.compile(rf"[.!?\u2026<{TERMINATORS}]")  # what a candidate begins with
WORD_CHARACTER = re.compile(r"\w")
LAST_WORD = re.compile(rf"[^\s<>{OPENING}]*$")
NEXT_WORD = re.compile(rf"[{OPENING}]*([^\W\d_]*)")
DOTTED = re.compile(r"(?:[^\W\d_]\.)+[^\W\d_]")


def split_paragraphs(text: str) -> list[tuple[int, int]]:
    r"""Return the (start, end) of each paragraph: blank lines and doubled <br /> divide them.

    >>> split_paragraphs("One.\n\nTwo.")
    [(0, 6), (6, 10)]
    """
    starts = [0]
    for match in PARAGRAPH_BREAK.finditer(text):
        if match.start() > 0 and match.end() < len(text):
            starts.append(match.end())
    return list(pairwise([*starts, len(text)]))


def split_sentences(text: str) -> list[tuple[int, int]]:
    """Return the (start, end) of each sentence of a paragraph; together they cover it.

    The sentence ends of all scripts count, with the quotes and brackets that close after them.

    Full stops of abbreviations, initials, decimals and numbered lines end no sentence, nor do
    ellipses and quoted questions followed by lower case; a <br /> always does.

    >>> split_sentences("Dr. Who paid 3.50. Why?")
    [(0, 19), (19, 23)]
    """
    starts = [0]
    scanned, has_word = 0, False
    for match in _candidates(text):
        has_word = has_word or bool(WORD_CHARACTER.search(text, scanned, match.start()))
        scanned = match.end()
        if match.end() < len(text) and has_word and _ends_sentence(text, starts[-1], match):
            starts.append(match.end())
            has_word = False
    return list(pairwise([*starts, len(text)]))


def _candidates(text: str) -> Iterator[re.Match[str]]:
    """Yield the matches of CANDIDATE; a search for one character class is ten times as quick."""
    found = START.search(text)
    while found is not None:
        match = CANDIDATE.match(text, found.start())
        if match is not None:
            yield match
        found = START.search(text, found.end() if match is None else match.end())


def _ends_sentence(text: str, begin: int, match: re.Match[str]) -> bool:
    mark = match["mark"]
    if mark is None or "<" in match["gap"]:
        return True
    found = LAST_WORD.search(text, max(begin, match.start() - 40), match.start())
    word = found[0] if found else ""
    following = text[match.end()]
    if mark == "." and not match["close"]:
        lower = word.lower()
        next_word = NEXT_WORD.match(text, match.end())
        starts_well = next_word is not None and next_word[1].lower() in STARTERS
        if lower in NEVER:
            return False
        if lower in NUMBERED and following.isdigit():
            return False
        if lower in SELDOM or DOTTED.fullmatch(word):
            return starts_well and not following.islower()
        if len(word) == 1 and word.isalpha() and word != "I":
            return False  # an initial
        if word.isdigit() and not text[begin : match.start() - len(word)].strip():
            return False  # the number of a line
    if not following.islower():
        return True
    if match["close"] or mark not in (".", "!", "?"):
        return False
    # Before lower case a sentence may end in careless writing, but not after a name with a mark.
    return len(word) >= 3 and (mark == "." or not word[0].isupper())

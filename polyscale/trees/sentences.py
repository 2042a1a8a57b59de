"""Where paragraphs and sentences begin, by rule."""

import re
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

# Curly quotes and full-width marks are escaped, because they are easily confused.
CLOSING = r"\"'\u201d\u2019\u00bb)\]"
OPENING = r"\"'\u201c\u2018\u00ab(\["
PARAGRAPH_BREAK = re.compile(r"(?:<br\s*/?>\s*){2,}|\n\s*\n\s*|\u2029\s*", re.IGNORECASE)
CANDIDATE = re.compile(
    # A mark is matched from its first character only, or long runs would take quadratic time.
    rf"(?P<mark>(?<![.!?\u2026])[.!?\u2026]+)(?P<close>[{CLOSING}]*)(?P<gap>(?:\s|<br\s*/?>)+)"
    r"|(?P<wide>[\u3002\uff01\uff1f]+[\u300d\u300f\u201d\u2019\uff09]*\s*)"
    r"|(?P<line>(?:<br\s*/?>\s*)+)",
    re.IGNORECASE,
)
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

    Full stops of abbreviations, initials, decimals and numbered lines end no sentence, nor do
    ellipses and quoted questions followed by lower case; a <br /> always does.

    >>> split_sentences("Dr. Who paid 3.50. Why?")
    [(0, 19), (19, 23)]
    """
    starts = [0]
    scanned, has_word = 0, False
    for match in CANDIDATE.finditer(text):
        has_word = has_word or bool(WORD_CHARACTER.search(text, scanned, match.start()))
        scanned = match.end()
        if match.end() < len(text) and has_word and _ends_sentence(text, starts[-1], match):
            starts.append(match.end())
            has_word = False
    return list(pairwise([*starts, len(text)]))


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

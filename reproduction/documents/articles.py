"""Articles of enwik8 as Markdown, with a topic each from the categories they name."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path

from reproduction.long_context.articles import read_pages

_PAGE = re.compile(r"<title>(.*?)</title>.*?<text[^>]*>(.*?)</text>", re.DOTALL)
_OTHER = re.compile(r"(?:Wikipedia|Template|Image|Category|MediaWiki|Portal|Help|User):")
_CATEGORY = re.compile(r"\[\[\s*category\s*:\s*([^\]|]*)[^\]]*\]\]", re.IGNORECASE)
_LEFT_OUT = re.compile(
    r"<!--.*?-->|<(ref|math|timeline|gallery|pre)\b[^>]*>.*?</\1>|__[A-Z]+__", re.DOTALL
)
_TAG = re.compile(r"</?[a-zA-Z][^>]*>")
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_TABLE = re.compile(r"\{\|(?:(?!\{\||\|\}).)*\|\}", re.DOTALL)
_LINK = re.compile(r"\[\[([^\[\]]*)\]\]")
_ADDRESS = re.compile(r"\[(?:https?|ftp|mailto):\S*\s*([^\]]*)\]")
_HEADING = re.compile(r"(={2,6})\s*(.+?)\s*\1\s*")
_ITEM = re.compile(r"([*#:;]+)\s*(.*)")
_BACK = re.compile(
    r"(see also|references?|external links?.*|further reading|notes?|sources?|bibliography|links"
    r"|footnotes|trivia|related (articles|topics).*)",
    re.IGNORECASE,
)

# A category counts for every topic that has one of its words; an article is of the topic that most
# of its categories count for.
TOPICS = {
    "people": "births deaths people writers philosophers mathematicians actors monarchs emperors "
    "kings saints scientists musicians poets novelists politicians presidents natives alumni "
    "directors singers painters generals leaders officers bishops archbishops winners physicists "
    "composers knights rulers popes economists chemists inventors artists sultans",
    "places": "cities towns islands geography countries states capitals rivers territories "
    "municipalities counties county regions provinces economies communications transportation "
    "demographics continents mountains lakes seas villages settlements areas alaska alabama",
    "arts": "film films books novels television music musical albums songs fiction fictional games "
    "game art literature comics opera characters paintings architecture dance poetry bands "
    "sculpture theatre mythology mythological deities plays anime",
    "technology": "computer computers software programming hardware technology aircraft spacecraft "
    "missiles internet systems engineering vehicles computing weapons apple amiga atari ships "
    "automobiles rail protocols companies electronics transport",
    "science": "chemistry chemical physics mathematics algebra astronomy biology elements geometry "
    "constellation theorems statistics diseases disorders medicine medical anatomy plants animals "
    "mammals birds fish psychology genetics hydrocarbons drugs particles analysis theory set "
    "logic objects topology geology measurement units neurological",
    "society": "history war wars battles politics political religion christianity christian law "
    "legal philosophy theology ethics government islam judaism culture economics military treaties "
    "languages language ancient empire parties holidays tribes peoples groups education sports "
    "sport football food cuisine society",
}


@dataclass(frozen=True)
class Article:
    """An article: its title, its Markdown and its topic, None if its categories tell none."""

    title: str
    text: str
    topic: str | None

    @property
    def words(self) -> int:
        return len(self.text.split())

    def sections(self) -> tuple[str, list[str]]:
        """What comes before the first section, and the sections, without references and links."""
        first, *rest = re.split(r"^(?=## )", self.text, flags=re.MULTILINE)
        kept = [part for part in rest if not _BACK.fullmatch(part[3:].split("\n", 1)[0].strip())]
        return first, kept


def read_articles(data_dir: Path, least: int, most: int) -> list[Article]:
    """Return the articles of `least` to `most` words, sorted by title."""
    found = []
    for page in read_pages(data_dir):
        match = _PAGE.search(page)
        if match is None:
            continue
        title, source = unescape(match[1]), unescape(match[2])
        is_other = re.match(
            r"(?:Wikipedia|Template|Image|Category|MediaWiki|Portal|Help|User):", title
        )
        if is_other or source.lstrip()[:9].lower() == "#redirect":
            continue
        article = Article(title, markdown_of(title, source), topic_of(source))
        if least <= article.words <= most:
            found.append(article)
    return sorted(found, key=lambda one: one.title)


def topic_of(source: str) -> str | None:
    """The topic that most categories of an article are for; ties go to the first named.

    >>> topic_of("... [[Category:1832 births]] [[Category:English novelists]]")
    'people'
    """
    counts: Counter[str] = Counter()
    for name in _CATEGORY.findall(source):
        words = _stems(name.lower().replace("_", " "))
        counts.update(topic for topic, known in _STEMS.items() if words & known)
    return counts.most_common(1)[0][0] if counts else None


def _stems(words: str) -> set[str]:
    """The words without the s of a plural."""
    return {word.rstrip("s") for word in re.findall(r"[a-z]+", words)}


_STEMS = {topic: _stems(words) for topic, words in TOPICS.items()}


def markdown_of(title: str, source: str) -> str:
    r"""The text of an article as Markdown, without links, categories, templates and tables.

    >>> markdown_of("Fish", "'''Fish''' [[swim|swims]]. [[Category:Fish]]\n== Life ==\n* {{x}}Yes")
    '# Fish\n\nFish swims.\n\n\n## Life\n\n- Yes\n'
    """
    # What spans lines is a line break: a heading may follow it.
    text = _LEFT_OUT.sub(lambda match: "\n" if "\n" in match[0] else "", source)
    for pattern in (_TEMPLATE, _TABLE):
        text = _until_unchanged(pattern, "", text)
    text = _until_unchanged(_LINK, _shown, text)
    text = _TAG.sub(" ", _ADDRESS.sub(r"\1", text))
    text = unescape(re.sub(r"'{2,}", "", text))
    return f"# {title}\n\n" + "".join(_lines(text)).strip() + "\n"


def _until_unchanged(pattern: re.Pattern[str], by: object, text: str) -> str:
    before = None
    while text != before:
        before, text = text, pattern.sub(by, text)  # type: ignore[call-overload]
    return text


def _shown(match: re.Match[str]) -> str:
    """The text of a link; nothing for categories, images and other languages."""
    target, _, shown = match[1].partition("|")
    if re.match(r"\s*:?\s*(?:category|image|media|file|[a-z-]{2,12})\s*:", target, re.IGNORECASE):
        return ""
    return shown.rsplit("|", 1)[-1] or target


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        line = line.strip().lstrip("|!>").strip()
        heading, item = _HEADING.fullmatch(line), _ITEM.fullmatch(line)
        if heading:
            yield f"\n\n{'#' * len(heading[1])} {heading[2]}\n\n"
        elif item and item[2]:
            yield f"{'  ' * (len(item[1]) - 1)}- {item[2]}\n"
        elif not item:
            yield f"{line}\n"

import copy
import json
import re
from base64 import b64encode
from hashlib import sha256
from html import unescape
from html.parser import HTMLParser
from typing import Any

import pytest

from polyscale.report.analysis import analysis_page
from polyscale.report.analysis.sections import SECTIONS

from .samples import HOSTILE, hkt_sample, hostile_sample, hsa_sample, transformer_sample

ALL_OF_HKT = ["attention", "levels", "kernel", "symmetry", "error", "normality", "cost"]
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Parsed(HTMLParser):
    """What a browser would find: elements with their attributes and text, all closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self.open: list[str] = []
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.texts[self.open[-1]][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def sections_of(page: str) -> list[str | None]:
    return [attributes["id"] for attributes in Parsed(page).all("section")]


def embedded(page: str) -> Any:
    match = re.search(r'<script type="application/json" id="analysis">(.*?)</script>', page, re.S)
    assert match is not None
    return json.loads(match.group(1))


@pytest.mark.parametrize(
    ("sample", "sections"),
    [
        (hkt_sample, ALL_OF_HKT),
        (hsa_sample, ["attention", "hsa"]),
        (transformer_sample, ["attention", "kernel", "symmetry", "normality"]),
    ],
)
def test_the_page_has_the_sections_that_have_data_in_order_and_in_the_contents(sample, sections):
    page = analysis_page(sample())
    assert sections_of(page) == sections
    links = [link["href"] for link in Parsed(page).all("a")]
    assert links == [f"#{name}" for name in sections]


@pytest.mark.parametrize("name", ALL_OF_HKT)
@pytest.mark.parametrize("empty", [None, {}, []])
def test_a_section_without_data_is_left_out(name, empty):
    analysis = hkt_sample()
    analysis[name] = empty
    assert sections_of(analysis_page(analysis)) == [one for one in ALL_OF_HKT if one != name]


def test_empty_lists_inside_a_section_leave_it_out():
    analysis = {"meta": {"title": "x"}, "kernel": {"forms": [], "scores": [], "note": "why"}}
    analysis["levels"] = {"weights": []}
    assert sections_of(analysis_page(analysis)) == []


def test_the_weights_of_a_single_level_are_not_shown():
    analysis = {"meta": {"title": "x"}, "levels": {"weights": [[[1.0], [1.0]]]}}
    assert sections_of(analysis_page(analysis)) == []


def test_a_page_with_nothing_but_a_title_is_whole():
    page = analysis_page({"format": 1, "meta": {"title": "Nothing yet"}})
    parsed = Parsed(page)
    assert parsed.open == []
    assert parsed.texts["h1"] == ["Nothing yet"]
    assert parsed.all("nav") == []


def test_every_section_says_what_it_shows_and_has_a_place_for_figures():
    page = analysis_page(hkt_sample())
    for section in SECTIONS[:-1]:
        assert section.text in unescape(page)
    assert page.count('<div class="place"></div>') == len(ALL_OF_HKT)


@pytest.mark.parametrize("sample", [hkt_sample, hsa_sample, transformer_sample, hostile_sample])
def test_the_page_holds_all_of_the_analysis(sample):
    analysis = sample()
    assert embedded(analysis_page(analysis)) == analysis


def test_hostile_texts_stay_texts():
    page = analysis_page(hostile_sample())
    parsed = Parsed(page)
    assert parsed.open == []
    assert len(parsed.all("script")) == 2
    assert parsed.all("img") == []
    assert parsed.all("b") == []
    # As a browser reads it: the data end where they should, and nothing else is script.
    data, code = parsed.texts["script"]
    assert json.loads(data)["meta"]["tokens"] == HOSTILE
    assert "window.broken" not in code
    assert not set("<>&") & set(data)
    summary = page[page.index('<ul class="summary">') : page.index("</ul>")]
    assert "&lt;/script&gt;&lt;script&gt;" in summary
    assert "<script" not in summary


def test_a_page_with_broken_tokens_can_be_written_as_utf_8():
    page = analysis_page(hostile_sample())
    assert page.encode("utf-8").decode("utf-8") == page


@pytest.mark.parametrize("sample", [hkt_sample, hsa_sample, hostile_sample])
def test_the_page_refers_to_nothing_outside(sample):
    page = analysis_page(sample())
    assert "http://" not in page
    assert "https://" not in page
    assert not re.search(r"@import|url\(|\bfetch\(|XMLHttpRequest|import\(|innerHTML|eval\(", page)
    for tag, attributes in Parsed(page).elements:
        assert "src" not in attributes
        assert tag != "link"
        assert (attributes.get("href") or "#").startswith("#")


def test_the_policy_of_the_page_allows_its_own_script_and_no_other():
    page = analysis_page(hostile_sample())
    code = re.findall(r"<script>(.*?)</script>", page, re.S)
    assert len(code) == 1
    digest = b64encode(sha256(code[0].encode()).digest()).decode()
    (policy,) = [
        meta["content"]
        for meta in Parsed(page).all("meta")
        if meta.get("http-equiv") == "Content-Security-Policy"
    ]
    assert f"default-src 'none'; script-src 'sha256-{digest}';" in policy
    assert "connect-src" not in policy


def test_the_page_is_the_same_for_the_same_analysis_and_leaves_it_as_it_was():
    analysis = hkt_sample()
    before = copy.deepcopy(analysis)
    assert analysis_page(analysis) == analysis_page(analysis)
    assert analysis == before


def test_missing_numbers_are_fine():
    analysis = hkt_sample()
    analysis["error"]["rows"][0] |= {"kl": None, "drift": None}
    analysis["attention"][0]["map"][0][0] = None
    analysis["meta"] |= {"seconds": None, "versions": None, "notes": None, "tokens": None}
    assert embedded(analysis_page(analysis)) == analysis


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_number_that_is_not_finite_is_refused_by_its_place(bad):
    analysis = hkt_sample()
    analysis["kernel"]["forms"][1]["smallest"] = bad
    with pytest.raises(ValueError, match=r"\['kernel'\]\['forms'\]\[1\]\['smallest'\]"):
        analysis_page(analysis)


@pytest.mark.parametrize(
    ("analysis", "error", "words"),
    [
        (None, TypeError, "analysis must be a dict, got NoneType"),
        ({"format": 1}, ValueError, "'meta'"),
        ({"format": 2, "meta": {}}, ValueError, "format 1, got 2"),
    ],
)
def test_what_is_no_analysis_is_refused(analysis, error, words):
    with pytest.raises(error, match=words):
        analysis_page(analysis)


def test_the_summary_stands_above_the_figures():
    page = analysis_page(hkt_sample())
    assert page.index("Level 2 carries 41 % of the weight") < page.index("<section")


def test_without_scripts_the_reader_is_told_where_the_numbers_are():
    words = analysis_page(hkt_sample()).split("<noscript>")[1].split("</noscript>")[0]
    assert "report.json" in words

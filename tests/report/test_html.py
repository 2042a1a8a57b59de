import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from polyscale.report.html import comparison_page
from tests.report.samples import comparison, result

VOID = {"meta", "br", "hr", "img", "input", "link", "path", "use", "rect"}


class Reader(HTMLParser):
    """Collects tags, attributes and visible text, and checks that tags close in order."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, name, value) for name, value in attrs]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text.append(data)


def read(page):
    reader = Reader()
    reader.feed(page)
    assert reader.open == []
    reader.words = " ".join(" ".join(reader.text).split())
    return reader


@pytest.fixture(scope="module")
def page():
    return comparison_page(comparison())


@pytest.fixture(scope="module")
def reader(page):
    return read(page)


def test_the_page_is_well_formed_and_has_its_parts_in_order(reader):
    assert reader.tags[0] == "html"
    parts = ["61.3% of unseen", "Test accuracy", "Training loss", "level weights", "my runs"]
    places = [reader.words.index(part) for part in parts]
    assert places == sorted(places)


def test_nothing_is_fetched_and_nothing_runs(page, reader):
    assert "http" not in page
    assert "//" not in page
    assert "@import" not in page
    assert not {"script", "link", "img", "iframe", "object", "base"} & set(reader.tags)
    for _, name, value in reader.attributes:
        assert not name.startswith("on")
        if name in ("src", "href", "xlink:href"):
            assert value.startswith("#")
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", page))


def test_references_inside_figures_point_to_ids_that_occur_once(page, reader):
    identifiers = [value for _, name, value in reader.attributes if name == "id"]
    assert len(identifiers) == len(set(identifiers))
    targets = re.findall(r"url\(#([^)]*)\)", page) + re.findall(r'href="#([^"]*)"', page)
    assert targets
    assert set(targets) <= set(identifiers)


def test_the_page_suits_dark_and_light_and_a_phone(page):
    assert "prefers-color-scheme: dark" in page
    assert 'name="viewport"' in page


def test_every_colour_variable_used_is_defined_for_both_schemes(page):
    used = set(re.findall(r"var\((--[\w-]+)\)", page))
    light, dark = page.split("prefers-color-scheme: dark", 1)
    for variable in used:
        assert f"{variable}:" in light
        assert f"{variable}:" in dark


def test_figures_have_no_fixed_colours(page):
    for figure in re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL):
        assert not re.findall(r"(?:fill|stroke): (#[0-9a-f]{3,6})", figure)


def test_the_table_has_every_figure(reader):
    for cell in ("61.3%", "68.7%", "12.5%", "70,290", "1,234", "1.000 x", "1.312 x"):
        assert cell in reader.words


def test_names_are_escaped(page):
    assert "Standard <attention>" not in page
    assert "Standard &lt;attention&gt;" in page
    assert "<title>HKT &amp; standard attention</title>" in page


def test_the_page_says_how_it_was_made(reader):
    assert "polyscale demo --output 'my runs' --seed 7" in reader.words
    assert "Seed 7" in reader.words
    assert "torch 2.13.0" in reader.words
    assert '"max_length": 24' in reader.words
    assert '"batch_size": 64' in reader.words


def test_level_weights_are_drawn_only_where_there_are_levels_to_weigh(reader):
    labels = [value for _, name, value in reader.attributes if name == "aria-label"]
    assert [label for label in labels if "level weights" in label] == [
        "HKT (3 levels): level weights"
    ]
    alone = comparison(results=(result("flat", 0.5, 1),), score_flop_ratios=(1.0,))
    assert "level weights" not in comparison_page(alone)


def test_a_shared_budget_is_shown_once_and_different_ones_by_name(reader):
    assert reader.words.count("Training budget") == 1
    first, second = comparison().results
    longer = replace(second, settings=replace(second.settings, steps=80))
    words = read(comparison_page(comparison(results=(first, longer)))).words
    assert "Training budget: HKT (3 levels)" in words
    assert words.count("Training budget") == 2

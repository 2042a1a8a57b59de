import re
from html.parser import HTMLParser

import pytest

from polyscale.report.comparison import Comparison
from polyscale.report.html import comparison_page
from tests.training.fake_results import make_language_result, make_result, make_results

COMMAND = "polyscale compare --output 'my runs' --seeds 0,1,2"
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


def compare(results=None, **options):
    return Comparison.from_results(make_results() if results is None else results, **options)


@pytest.fixture(scope="module")
def page():
    results = make_results() + [make_result("hkt <odd> & co", seed, 0.5) for seed in range(3)]
    return comparison_page(compare(results, title="HKT & standard attention", command=COMMAND))


@pytest.fixture(scope="module")
def reader(page):
    return read(page)


def test_the_page_is_well_formed_and_has_its_parts_in_order(reader):
    assert reader.tags[0] == "html"
    parts = [
        "61.0% of the test samples",
        "Test accuracy",
        "Training loss",
        "Accuracy by depth",
        "level weights",
        "[MAX 2 9 ]",
        "my runs",
    ]
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
    for cell in (
        "61.0 ± 1.0 %",
        "67.7 ± 1.5 %",
        "+6.7 points [+5.2, +8.1]",
        "12.5%",
        "70,300",
        "1,234",
        "1.000 x",
        "1.312 x",
        "0.00250 (1.25 x)",
    ):
        assert cell in reader.words


def test_notes_and_every_seed_are_on_the_page(reader):
    assert "cannot give a p-value below 0.25" in reader.words
    assert "Seed 1 62.0% 69.0%" in reader.words


def test_names_are_escaped(page):
    assert "hkt <odd>" not in page
    assert "hkt &lt;odd&gt; &amp; co" in page
    assert "<title>HKT &amp; standard attention</title>" in page


def test_the_page_says_how_it_was_made(reader):
    assert COMMAND in reader.words
    assert "Seeds 0, 1, 2." in reader.words
    assert "torch 2.13.0" in reader.words
    assert "one process with 2 threads" in reader.words
    assert '"preset": "demo"' in reader.words
    assert '"batch_size": 64' in reader.words
    assert '"max_position_embeddings": 24' in reader.words


def test_level_weights_are_drawn_only_where_there_are_levels_to_weigh(reader):
    labels = [value for _, name, value in reader.attributes if name == "aria-label"]
    assert [label for label in labels if "level weights" in label] == [
        "HKT (3 levels): level weights over training",
        "HKT (3 levels): level weights",
        "hkt <odd> & co: level weights over training",
        "hkt <odd> & co: level weights",
    ]
    assert "level weights" not in comparison_page(compare([make_result("standard")]))


def test_one_seed_is_called_a_demonstration():
    words = read(comparison_page(compare(make_results([0.6], [0.66])))).words
    assert "One seed: a demonstration, not a benchmark." in words
    assert "Every seed" not in words
    assert "the binomial standard error of the group" in words
    assert "over the seeds" not in words


def test_several_seeds_are_not_called_a_demonstration(reader):
    assert "demonstration" not in reader.words
    assert "the band reaches from the lowest seed to the highest" in reader.words


def test_many_models_stand_below_each_other():
    results = make_results() + [make_result(f"hkt-variant-{k}") for k in range(3)]
    reader = read(comparison_page(compare(results)))
    assert ("table", "class", "turned") in reader.attributes
    assert "What the columns mean" in reader.words


def test_a_language_task_has_its_own_words_and_no_classes():
    results = [
        make_language_result(model, seed) for model in ("standard", "hkt") for seed in (0, 1)
    ]
    words = read(comparison_page(compare(results))).words
    assert "Bits per token on validation" in words
    assert "majority" not in words.lower()
    assert "next byte" in words


def test_an_example_with_markup_stays_text():
    page = comparison_page(compare([make_result("standard", example="<script>alert(1)</script>")]))
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_a_run_without_curves_still_has_a_page():
    bare = make_result(
        "standard", train_curve=[], validation_curve=[], level_weights_curve=[], accuracy_by={}
    )
    words = read(comparison_page(compare([bare]))).words
    assert "Training loss" not in words
    assert "60.0%" in words

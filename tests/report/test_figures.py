import re
import xml.etree.ElementTree as ElementTree

import pytest

from polyscale.report.figures import level_chart, line_chart

CURVES = {"one": [(0, 0.1), (50, 0.6)], "two": [(0, 0.2), (50, 0.5)]}


def words(svg):
    return " ".join(ElementTree.fromstring(svg).itertext())


def test_a_line_chart_is_one_svg_with_its_names_as_text():
    svg = line_chart(
        CURVES, title="Accuracy", y_label="share", percent=True, reference=("flat", 0.1)
    )
    for name in ("one", "two", "flat", "Accuracy", "share", "training step", "100%"):
        assert name in words(svg)
    assert 'aria-label="Accuracy"' in svg
    assert "width=" not in svg.split(">", 1)[0], "the page decides on the size"


def test_lines_differ_in_colour_and_in_dashes():
    svg = line_chart(CURVES, title="Loss", y_label="loss")
    lines = [
        style
        for style in re.findall(r'style="([^"]*)"', svg)
        if "var(--series-" in style and "stroke-width: 1.8" in style
    ]
    assert {re.search(r"--series-\d", line).group() for line in lines} == {
        "--series-0",
        "--series-1",
    }
    assert len({"stroke-dasharray" in line for line in lines}) == 2


def test_the_height_of_a_curve_follows_its_values():
    def ends(curve):
        svg = line_chart({"one": curve}, title="x", y_label="y", percent=True)
        path = re.search(r'<path d="([^"]*)"[^>]*stroke: var\(--series-0\)', svg).group(1)
        numbers = [float(number) for number in re.findall(r"[\d.]+", path)]
        return numbers[1], numbers[-1]

    rising, falling = ends([(0, 0.2), (1, 0.8)]), ends([(0, 0.8), (1, 0.2)])
    assert rising[0] > rising[1], "SVG counts downwards"
    assert rising == falling[::-1]


def test_the_same_numbers_give_the_same_figure():
    assert line_chart(CURVES, title="t", y_label="y") == line_chart(CURVES, title="t", y_label="y")


def test_a_level_chart_labels_every_head_and_level():
    svg = level_chart([[[0.7, 0.25, 0.05]], [[0.2, 0.3, 0.5]]], title="Weights")
    for name in ("layer 1, head 1", "layer 2, head 1", "level 2", "0.70", "0.25"):
        assert name in words(svg)
    assert "0.05" not in words(svg), "a sliver has no room for its label"


def test_empty_figures_are_refused_by_name():
    with pytest.raises(ValueError, match="curves"):
        line_chart({}, title="t", y_label="y")
    with pytest.raises(ValueError, match="two"):
        line_chart({"two": []}, title="t", y_label="y")
    with pytest.raises(ValueError, match="weights"):
        level_chart([], title="t")

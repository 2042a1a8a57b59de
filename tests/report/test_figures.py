import re
import xml.etree.ElementTree as ElementTree

import pytest

from polyscale.report.colours import (
    ANALYSIS_DARK,
    ANALYSIS_LIGHT,
    FIGURE_DARK,
    FIGURE_LIGHT,
)
from polyscale.report.figures import (
    GroupPoint,
    group_chart,
    level_chart,
    line_chart,
    standalone,
)

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
    with pytest.raises(ValueError, match="series"):
        group_chart({"one": []}, title="t", x_label="x", y_label="y")
    with pytest.raises(ValueError, match="svg"):
        standalone("<svg></svg>")


def test_a_band_lies_around_its_curve_in_the_same_colour():
    bands = {"two": [(0, 0.1, 0.3), (50, 0.4, 0.6)]}
    without = line_chart(CURVES, title="t", y_label="y")
    svg = line_chart(CURVES, title="t", y_label="y", bands=bands)
    assert "fill-opacity: 0.2" not in without
    filled = re.findall(r"fill: var\((--[\w-]+)\); fill-opacity: 0.2", svg)
    assert set(filled) == {"--series-1"}


def test_ten_lines_differ_from_each_other():
    svg = line_chart({f"line {k}": [(0, k), (1, k)] for k in range(10)}, title="t", y_label="y")
    styles = re.findall(r'style="(fill: none; [^"]*stroke: var\(--series[^"]*)"', svg)
    assert len(set(styles)) == 10


def test_steps_are_whole_numbers():
    svg = line_chart({"one": [(20, 0.1), (40, 0.6)]}, title="t", y_label="y", percent=True)
    assert "22.5" not in words(svg)


def test_groups_stand_side_by_side_with_their_error_bars():
    points = [GroupPoint("1 to 9", 0.8, 0.1), GroupPoint("10", 0.4)]
    svg = group_chart(
        {"one": points, "two": points[:1]},
        title="By length",
        x_label="length",
        y_label="accuracy",
        reference=("majority class", 0.2),
    )
    for name in ("one", "two", "1 to 9", "10", "length", "accuracy", "majority class"):
        assert name in words(svg)
    text = words(svg)
    assert text.index("one") < text.index("two") < text.index("majority class")
    uses = re.findall(r'<use [^>]*x="([\d.]+)" y="([\d.]+)"[^>]*series-0', svg)
    assert len({x for x, _ in uses}) >= 2


def test_a_figure_of_its_own_has_fixed_colours_a_size_and_a_background():
    svg = standalone(line_chart(CURVES, title="Accuracy", y_label="y"))
    root = ElementTree.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert root.get("width").endswith("pt")
    assert root[0].get("fill") == FIGURE_LIGHT["page"]
    assert "var(" not in svg
    assert "inherit" not in svg
    assert FIGURE_LIGHT["series-0"] in svg


def test_both_palettes_have_the_same_names_and_readable_colours():
    def luminance(colour):
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one, other):
        high, low = sorted((luminance(one), luminance(other)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    assert FIGURE_LIGHT.keys() == FIGURE_DARK.keys()
    assert ANALYSIS_LIGHT.keys() == ANALYSIS_DARK.keys()
    for palette in (FIGURE_LIGHT, FIGURE_DARK, ANALYSIS_LIGHT, ANALYSIS_DARK):
        for name, colour in palette.items():
            if name.startswith(("series", "ink", "soft")):
                assert contrast(colour, palette["card"]) >= 4.5, name
            if name.startswith("level") and "on-series" in palette:
                assert contrast(colour, palette["on-series"]) >= 4.5, name

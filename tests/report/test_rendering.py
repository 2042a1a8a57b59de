import pytest

from polyscale.report.rendering import render, trusted

PAGE = {
    "styles": ["base.css", "comparison.css"],
    "light": {"ink": "#111111"},
    "dark": {"ink": "#eeeeee"},
}
COMPARISON = {
    "title": "A page",
    "summary": "In short.",
    "notes": [],
    "scores": {"head": ["one"], "rows": [], "turned": False},
    "table_notes": [],
    "seeds": None,
    "figure_sections": [],
    "task": "The task.",
    "example": None,
    "command": "",
    "environment": "Here.",
    "configurations": [],
}


def page(**changes):
    return render("comparison.html.j2", **PAGE, **{**COMPARISON, **changes})


def test_values_are_escaped_wherever_they_stand():
    hostile = "<script>1</script> & \"two\" 'three'"
    for name in ("title", "summary", "task", "example", "command", "environment"):
        assert "<script>" not in page(**{name: hostile})
    assert "<script>" not in page(notes=[hostile], configurations=[(hostile, hostile)])
    figure = {"svg": "<svg></svg>", "caption": hostile}
    section = {"heading": hostile, "intro": hostile, "figures": [figure]}
    assert "<svg>" not in page(figure_sections=[section])
    assert "<script>" not in page(figure_sections=[section])


def test_markup_of_this_package_is_left_as_it_is():
    figure = {"svg": trusted("<svg></svg>"), "caption": ""}
    section = {"heading": "h", "intro": "", "figures": [figure]}
    assert "<figure><svg></svg></figure>" in page(figure_sections=[section])


def test_lone_surrogates_are_replaced_so_that_the_page_is_utf_8():
    assert "a?b" in page(title="a\ud800b")
    page(title="a\ud800b").encode("utf-8")


def test_colours_of_both_schemes_are_on_the_page():
    light, dark = page().split("prefers-color-scheme: dark", 1)
    assert ":root { color-scheme: light; --ink: #111111; }" in light
    assert ":root { color-scheme: dark; --ink: #eeeeee; }" in dark


def test_a_value_that_is_missing_is_an_error():
    values = {name: value for name, value in COMPARISON.items() if name != "summary"}
    with pytest.raises(Exception, match="'summary' is undefined"):
        render("comparison.html.j2", **PAGE, **values)

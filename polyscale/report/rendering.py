"""Pages from the templates of this package: one file each, which fetches nothing."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

from polyscale._extras import require
from polyscale.report.colours import css_variables


def render(
    template: str,
    *,
    styles: list[str],
    light: Mapping[str, str],
    dark: Mapping[str, str],
    **values: Any,
) -> str:
    """A page from a template; every value is escaped unless it is `trusted`.

    Args:
        template: the name of a file among the templates.
        styles: names of style sheets among the assets.
        light: colours of the page.
        dark: colours of the page on a dark screen.
        **values: what the template names.
    """
    return str(
        _environment()
        .get_template(template)
        .render(
            light=trusted(css_variables("light", light)),
            dark=trusted(css_variables("dark", dark)),
            style=trusted("".join(map(asset, styles))),
            **values,
        )
    )


def trusted(markup: str) -> Any:
    """Markup made by this package, which goes into a page as it is."""
    return require("markupsafe", "train", "a report").Markup(markup)


def asset(name: str) -> str:
    """The text of a style sheet or script among the assets."""
    return (files("polyscale.report") / "assets" / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _environment() -> Any:
    jinja2: Any = require("jinja2", "train", "a report")
    return jinja2.Environment(
        loader=jinja2.PackageLoader("polyscale.report"),
        autoescape=True,
        finalize=_without_surrogates,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _without_surrogates(value: Any) -> Any:
    """Text that UTF-8 can hold: half a token can leave a lone surrogate behind."""
    if type(value) is str:
        return value.encode("utf-8", "replace").decode("utf-8")
    return value

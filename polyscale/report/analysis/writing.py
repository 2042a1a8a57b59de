"""The report on disk: the page, and the same content as JSON beside it."""

from __future__ import annotations

import json
from pathlib import Path

from polyscale._files import write_together
from polyscale.analysis.schema import Analysis
from polyscale.report.analysis.page import analysis_page

PAGE_NAME = "report.html"
DATA_NAME = "report.json"


def write_analysis(analysis: Analysis, output: Path) -> list[Path]:
    """Write the page and its JSON; return both paths, the page first.

    `output` is a folder (for `report.html` and `report.json`) or the name of an HTML file, whose
    JSON then goes beside it. Both files appear complete or not at all; an OSError is passed on.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     written = write_analysis({"meta": {"title": "A model"}}, Path(folder))
    >>> [path.name for path in written]
    ['report.html', 'report.json']
    """
    if output.suffix.lower() in (".html", ".htm") and not output.is_dir():
        page, data = output, output.with_suffix(".json")
    else:
        page, data = output / PAGE_NAME, output / DATA_NAME
    contents = {
        page: analysis_page(analysis),
        data: json.dumps(analysis, allow_nan=False, separators=(",", ":")) + "\n",
    }
    write_together(contents)
    return [page, data]

"""What `polyscale analyze` does: a model and data in, a report out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from polyscale.analysis.folder import analyze_folder
from polyscale.analysis.schema import Analysis
from polyscale.report.analysis.writing import write_analysis


def run_analyze(
    target: str,
    data: str | None,
    output: Path,
    *,
    progress: Callable[[str], None] = lambda step: None,
    **options: Any,
) -> tuple[Analysis, list[Path]]:
    """Analyse the model in a folder and write the report; return the analysis and the files.

    Args:
        target: folder with the model, as in `analyze_folder`.
        data: a text file or the name of a task; None for the task of the run in `target`.
        output: folder for report.html and report.json, or the name of an HTML file.
        progress: called with each step as it begins.
        **options: of `analyze_folder`.

    Raises:
        ValueError: with one line that says what is wrong with an argument or a file.
        FileNotFoundError: if the folder holds no model, or the data are missing.
        OSError: if the report cannot be written.
    """
    analysis = analyze_folder(target, data, progress=progress, **options)
    return analysis, write_analysis(analysis, output)

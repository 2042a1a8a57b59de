"""`polyscale analyze` and `inject`."""

from __future__ import annotations

from pathlib import Path

import typer

from polyscale.cli import options
from polyscale.cli.errors import one_line_errors

_REPORT = typer.Option(Path("report.html"), help="Folder, or HTML file.")
_TEXTS = typer.Option(..., help="Texts to plan with, one per line.")
_INJECTED = typer.Option(..., help="Folder for the injected model.")


def analyze(
    target: str = typer.Argument(help="Folder of a run, or of any Hugging Face model."),
    data: str | None = typer.Option(None, help="Text file or task (that of the run)."),
    output: Path = _REPORT,
    examples: int = typer.Option(8, min=1, help="Samples of a task to look at."),
    max_length: int = typer.Option(1024, min=1, help="Tokens of a text to look at."),
    data_dir: Path | None = options.DATA_DIR,
) -> None:
    """Look into a model: levels, kernel, symmetry, error, normality, attention."""
    with one_line_errors():
        from polyscale.report.analysis.command import run_analyze

        analysis, written = run_analyze(
            target,
            data,
            output,
            data_dir=data_dir,
            examples=examples,
            max_length=max_length,
            progress=lambda step: print(f"{step} ...", flush=True),
        )
        for sentence in analysis.get("summary", ()):
            print(f"- {sentence}")
        print("Report:", *written)


def inject(
    model: str = typer.Argument(help="Folder or Hub name of a Hugging Face model."),
    plan: Path = _TEXTS,
    output: Path = _INJECTED,
    budget: float | None = typer.Option(None, help="Share of attention FLOPs to keep (0.5)."),
    tolerance: float | None = typer.Option(None, help="Tolerated change of the output."),
) -> None:
    """Make a pretrained model cheaper with HSA, with no training."""
    with one_line_errors():
        from polyscale.inject.command import run_inject

        chosen = run_inject(
            model,
            plan,
            output,
            budget=budget,
            tolerance=tolerance,
            say=lambda text: print(text, flush=True),
        )
        print(chosen)
        print(f"Model: {output}")

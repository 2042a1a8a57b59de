"""`polyscale analyze` and `inject`."""

from __future__ import annotations

import sys
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
    tolerance: float | None = typer.Option(
        None, help="Greatest change of the output (0.005 without a speedup)."
    ),
    speedup: float | None = typer.Option(None, help="How many times as fast, such as 1.5."),
    new_tokens: int = typer.Option(128, min=0, help="Tokens that are written after a prompt."),
    max_length: int | None = typer.Option(None, min=1, help="Tokens of a text, at most."),
) -> None:
    """Make a pretrained model faster on texts like yours, with no training."""
    with one_line_errors():
        from polyscale.inject.command import run_inject

        chosen, before_after = run_inject(
            model,
            plan,
            output,
            tolerance=tolerance,
            speedup=speedup,
            new_tokens=new_tokens,
            max_length=max_length,
            progress=sys.stderr.isatty(),
            announce=lambda text: print(text, flush=True),
        )
        print(chosen, end="\n\n")
        if before_after is None:
            print("Nothing was written.")
            return
        print(before_after, end="\n\n")
        print(f"Model: {output}")

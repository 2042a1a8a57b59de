"""`polyscale demo`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyscale.cli.errors import stop

if TYPE_CHECKING:
    from polyscale.report.comparison import Comparison

_OUTPUT = typer.Option(Path("runs/demo"), help="Folder for the report.")


def demo(
    output: Path = _OUTPUT,
    seed: int = typer.Option(0, min=0, help="Seed of the data, the weights and the order."),
    quick: bool = typer.Option(False, "--quick", help="Seconds instead of minutes."),
) -> None:
    """Train HKT and standard attention on ListOps and compare them."""
    from rich.console import Console

    command = ["polyscale", "demo", "--output", str(output), "--seed", str(seed)]
    try:
        with Console().status("Loading torch and transformers"):
            from polyscale.report.comparison import PAGE_NAME
            from polyscale.report.demo import run_demo
        comparison = run_demo(
            output, seed=seed, quick=quick, command=shlex.join(command + ["--quick"] * quick)
        )
    except KeyboardInterrupt:
        stop("stopped; nothing was written", code=130)
    except OSError as error:
        stop(f"cannot write to {output}: {error.strerror or error}", code=1)
    show_comparison(comparison, output / PAGE_NAME)


def show_comparison(comparison: Comparison, page: Path) -> None:
    """Print the table and the summary of a comparison, and the path of its report."""
    from rich.console import Console

    from polyscale.report.tables import terminal_table

    console = Console()
    console.print(terminal_table(comparison))
    console.print(comparison.summary)
    # Not through the console, which would wrap a long path.
    print(f"Report: {page}")

"""`polyscale reproduce`, `status` and `bench`: studies and benchmarks of a checkout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from polyscale.cli import options
from polyscale.cli.errors import one_line_errors, stop

_BENCHMARKS = ("hkt", "hsa", "opened", "levels")
_STUDY = typer.Argument(help="documents, hkt, hsa or hsa-zero-shot.")
_PRESET = typer.Option("cpu", help="cpu or paper.")
_OUTPUT = typer.Option(None, help="Folder (experiments/STUDY).")
_RESULTS = typer.Option(Path("benchmarks/results"), help="Folder for the results.")


def reproduce(
    study: str = _STUDY,
    preset: str = _PRESET,
    output: Path | None = _OUTPUT,
    tables: bool = typer.Option(False, "--tables", help="Only write the tables of finished runs."),
    data_dir: Path | None = options.DATA_DIR,
    resume: bool = options.RESUME,
) -> None:
    """Run the tables of a paper again (in a checkout)."""
    with one_line_errors(resumable=True):
        found = _find_study(study)
        from polyscale.training.processes import join_processes

        folder = output or Path("experiments") / study
        if tables:
            found.write_tables(folder, preset=preset, data_dir=data_dir)
        else:
            found.reproduce(preset, folder, data_dir=data_dir, resume=resume)
        if join_processes().is_main_process:
            print(f"Results: {folder / 'RESULTS.md'}")


def status(study: str = _STUDY, preset: str = _PRESET, output: Path | None = _OUTPUT) -> None:
    """Show the finished runs of a study and the time left (in a checkout)."""
    with one_line_errors():
        from rich.console import Console
        from rich.table import Table

        found = _find_study(study).status(preset, output or Path("experiments") / study)
        if found.rows:
            table = Table()
            for column in found.columns:
                text = column in ("table", "run")
                table.add_column(column, justify="left" if text else "right")
            for row in found.rows:
                table.add_row(*row)
            Console().print(table)
        print(found.summary)


def bench(
    what: str = typer.Argument(help="What to measure: hkt, hsa, opened or levels."),
    output: Path = _RESULTS,
    quick: bool = typer.Option(False, "--quick", help="Small sizes only."),
) -> None:
    """Measure speed and memory on an otherwise idle machine (in a checkout)."""
    if what not in _BENCHMARKS:
        stop(f"what must be one of {', '.join(_BENCHMARKS)}, got {what!r}", code=2)
    with one_line_errors():
        from polyscale._checkout import import_from_checkout

        benchmark = import_from_checkout(f"benchmarks.{what}")
        timing = import_from_checkout("benchmarks.timing")
        result = benchmark.run(
            quick=quick, announce=lambda text: print(f"measuring: {text}", flush=True)
        )
        table = benchmark.to_markdown(result)
        written = timing.write_results(result, table, output / what)
        benchmark.draw(result, output / f"{what}.svg")
    print(table)
    print("Results:", *written, output / f"{what}.svg")


def _find_study(name: str) -> Any:
    from polyscale._checkout import import_from_checkout

    return import_from_checkout("reproduction").find_study(name)

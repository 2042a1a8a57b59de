"""The `polyscale` command: parses, calls, prints.

Only the standard library is imported here, so that the command starts fast and can say what is
missing; everything else is imported by the command that uses it.
"""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import typer

    from polyscale.report.comparison import Comparison

_NEEDED = ("typer", "rich", "transformers", "accelerate", "safetensors", "numpy", "matplotlib")

_BENCHMARKS = ("hkt", "hsa")


def main() -> None:
    """Entry point of the `polyscale` command."""
    missing = [module for module in _NEEDED if find_spec(module) is None]
    if missing:
        names = ", ".join(missing)
        _stop(f"{names} not installed; run: pip install 'polyscale[train]'", code=1)
    _make_app()(prog_name="polyscale")


def _make_app() -> typer.Typer:
    import typer

    app = typer.Typer(
        help="Multi-scale attention for PyTorch.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            from polyscale import __version__

            print(f"polyscale {__version__}")
            raise typer.Exit

    @app.callback()
    def options(
        version: bool = typer.Option(
            False, "--version", help="Show the version.", callback=show_version, is_eager=True
        ),
    ) -> None:
        pass

    @app.command()
    def demo(
        output: Path = typer.Option(Path("runs/demo"), help="Folder for the report."),  # noqa: B008
        seed: int = typer.Option(0, min=0, help="Seed of the data, the weights and the order."),
        quick: bool = typer.Option(False, "--quick", help="Seconds instead of minutes."),
    ) -> None:
        """Train HKT and standard attention on ListOps and compare them."""
        command = ["polyscale", "demo", "--output", str(output), "--seed", str(seed)]
        _run_demo(output, seed, quick, shlex.join(command + ["--quick"] * quick))

    @app.command()
    def bench(
        what: str = typer.Argument(help="What to measure: hkt or hsa."),
        output: Path = typer.Option(Path("benchmarks/results"), help="Folder for the results."),  # noqa: B008
        quick: bool = typer.Option(False, "--quick", help="Small sizes only."),
    ) -> None:
        """Measure speed and memory, best with nothing else running."""
        _run_bench(what, output, quick)

    return app


def _run_bench(what: str, output: Path, quick: bool) -> None:
    if what not in _BENCHMARKS:
        _stop(f"bench takes one of {', '.join(_BENCHMARKS)}, got {what!r}", code=2)
    from polyscale.bench.timing import write_results

    benchmark = import_module(f"polyscale.bench.{what}")
    try:
        result = benchmark.run(
            quick=quick, say=lambda text: print(f"measuring: {text}", flush=True)
        )
        table = benchmark.to_markdown(result)
        written = write_results(result, table, output / what)
        benchmark.draw(result, output / f"{what}.svg")
    except KeyboardInterrupt:
        _stop("stopped; nothing was written", code=130)
    except OSError as error:
        _stop(f"cannot write to {output}: {error.strerror or error}", code=1)
    print(table)
    print("Results:", *written, output / f"{what}.svg")


def _stop(message: str, *, code: int) -> NoReturn:
    print(f"polyscale: {message}", file=sys.stderr)
    sys.exit(code)


def _run_demo(output: Path, seed: int, quick: bool, command: str) -> None:
    from rich.console import Console

    console = Console()
    try:
        with console.status("Loading torch and transformers"):
            from polyscale.report.demo import REPORT_NAME, run_demo
        comparison = run_demo(output, seed=seed, quick=quick, command=command)
    except KeyboardInterrupt:
        _stop("stopped; nothing was written", code=130)
    except OSError as error:
        _stop(f"cannot write to {output}: {error.strerror or error}", code=1)
    console.print(_table(comparison))
    console.print(comparison.summary)
    # Not through the console: it would break a long path into lines.
    print(f"Report: {output / REPORT_NAME}")


def _table(comparison: Comparison) -> Any:
    from rich.table import Table

    table = Table(title=comparison.title)
    table.add_column("")
    for result in comparison.results:
        table.add_column(result.name, justify="right")
    for label, cells in comparison.rows():
        table.add_row(label, *cells)
    return table


if __name__ == "__main__":
    main()

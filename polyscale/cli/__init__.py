"""The `polyscale` command: parses, calls, prints.

Only the standard library is imported here, so that the command starts fast and can say what is
missing. The other modules have one group of commands each; a command imports what it calls.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from polyscale._memory import keep_freed_memory
from polyscale.cli.errors import stop

if TYPE_CHECKING:
    import typer

_NEEDED = (
    "typer",
    "rich",
    "transformers",
    "accelerate",
    "safetensors",
    "numpy",
    "scipy",
    "matplotlib",
    "yaml",
    "tensorboard",
)


def main() -> None:
    """Entry point of the `polyscale` command."""
    missing = [module for module in _NEEDED if find_spec(module) is None]
    if missing:
        names = ", ".join(missing)
        stop(f"{names} not installed; run: pip install 'polyscale[train]'", code=1)
    keep_freed_memory()
    make_app()(prog_name="polyscale")


def make_app() -> typer.Typer:
    """The Typer application with all commands."""
    import typer

    from polyscale.cli import answers, checkout, demo, models, training

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

    for command in (
        demo.demo,
        training.train,
        answers.evaluate,
        answers.predict,
        answers.generate,
        training.compare,
        checkout.reproduce,
        checkout.status,
        models.analyze,
        models.inject,
        checkout.bench,
    ):
        app.command()(command)
    return app

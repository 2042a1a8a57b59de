"""Options that several commands have."""

from __future__ import annotations

import typer

DATA_DIR = typer.Option(
    None,
    envvar="POLYSCALE_DATA",
    help="Folder with the data files; downloads from the Hub if not given.",
)
PRESET = typer.Option("small", help="Size and budget: tiny, small or paper.")
CHANGES = typer.Option(
    [],
    "--set",
    metavar="NAME=VALUE",
    help="Change a value, such as training.steps=200, model.levels=2 or task.length=512.",
)
RESUME = typer.Option(
    False, "--resume", help="Continue unfinished runs; finished ones are not repeated."
)
TEXT_COLUMN = typer.Option(None, help="Column of texts; several, as title,body, are fields.")
LABEL_COLUMN = typer.Option(None, help="Column of labels.")

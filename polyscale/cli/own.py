"""What `polyscale train --data` has besides the options of `train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from polyscale.data.tasks import TaskData
    from polyscale.training.config import RunConfig

DATA = typer.Option(
    None,
    help="Your data: CSV, TSV, JSON lines, a text, a folder, or a Hugging Face dataset.",
    rich_help_panel="Your own data",
)
KIND = typer.Option(None, help="classification or language.", rich_help_panel="Your own data")
LABELS = typer.Option(
    None, help="Table with the labels of a folder's files.", rich_help_panel="Your own data"
)
VALIDATION = typer.Option(
    None, help="Data for validation; otherwise held out.", rich_help_panel="Your own data"
)
TEST = typer.Option(
    None, help="Data for the test; otherwise held out.", rich_help_panel="Your own data"
)
TREES = typer.Option(
    None,
    help="What hsa, fsa and deepset read: documents or windows.",
    rich_help_panel="Your own data",
)
FORMAT = typer.Option(
    None,
    "--format",
    help="Of documents: html, markdown, text, json, python or record.",
    rich_help_panel="Your own data",
)
TOKENIZER = typer.Option(
    None, help="bytes, or a Hugging Face tokenizer.", rich_help_panel="Your own data"
)
LENGTH = typer.Option(
    None, min=1, help="Longest sequence, in tokens.", rich_help_panel="Your own data"
)


def plan(
    of_data: Mapping[str, Any],
    model: str | None,
    kind: str | None,
    trees: str | None,
    preset: str,
    seed: int | None,
    levels: int | None,
    changes: Sequence[str],
) -> tuple[RunConfig, TaskData]:
    """The run and its data; what was guessed and left out is printed."""
    from polyscale.training.config import read_assignment
    from polyscale.training.own import plan_own_run
    from polyscale.training.processes import join_processes

    planned = plan_own_run(
        of_data,
        model=model,
        kind=kind,
        trees=trees,
        preset=preset,
        seed=seed or 0,
        levels=levels,
        changes=dict(map(read_assignment, changes)),
    )
    if join_processes().is_main_process:
        for sentence in planned.said:
            print(f"- {sentence}", flush=True)
    return planned.config, planned.data


def refuse_without_data(options: Mapping[str, Any]) -> None:
    """Raise if an option of own data is given without data."""
    for name, value in options.items():
        if value is not None:
            names = {"text": "text-column", "label": "label-column"}
            raise ValueError(f"--{names.get(name, name)} must come with --data, got it without")

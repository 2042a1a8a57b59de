"""All runs one after the other, with tables that are up to date after each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyscale.experiments.hsa.tables import write_tables
from polyscale.training.compare import PlannedRun, run_all
from polyscale.training.files import sole_use
from polyscale.training.processes import join_processes


def reproduce(
    planned: Sequence[PlannedRun],
    output: Path,
    *,
    command: str,
    data_dir: Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> None:
    """Do the runs; with `resume` what is finished stays and what is not goes on.

    Runs locked by another process are skipped, so that several may share the work.
    """

    def write() -> None:
        with sole_use(output):
            write_tables(output, command=command, data_dir=data_dir)

    run_all(
        planned,
        output,
        data_dir=data_dir,
        resume=resume,
        progress=progress,
        announce=progress,
        after_each=write,
    )
    if join_processes().is_main_process:
        write()

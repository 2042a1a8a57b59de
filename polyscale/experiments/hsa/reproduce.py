"""All runs one after the other, with tables that are up to date after each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyscale.data.tasks import TaskData
from polyscale.experiments.hsa.tables import write_tables
from polyscale.training.compare import PlannedRun, refuse_existing
from polyscale.training.result import RESULT_NAME
from polyscale.training.run import RunInUseError, load_data, run


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

    The data of a table are loaded once for each of its variants: vectors of words take a while. A
    run that another process is at is left to it, so that several may share the work.
    """
    if not resume:
        refuse_existing(planned, output)
    loaded: dict[str, TaskData] = {}
    table = ""
    for number, one in enumerate(planned):
        if one.table != table:
            table = one.table
            loaded.clear()
        folder = one.folder(output)
        data = None
        if not (folder / RESULT_NAME).exists():
            if progress:
                name = f"{one.table}, {one.config.name}, seed {one.config.seed}"
                print(f"run {number + 1} of {len(planned)}: {name}", flush=True)
            key = repr((one.config.task, one.config.task_options, one.config.data_seed))
            if key not in loaded:
                loaded[key] = load_data(one.config, data_dir, progress=progress)
            data = loaded[key]
        try:
            run(one.config, folder, data=data, data_dir=data_dir, resume=resume, progress=progress)
        except RunInUseError as error:
            if progress:
                print(f"{error}: left to it", flush=True)
            continue
        if data is not None:
            write_tables(output, command=command, data_dir=data_dir)
    write_tables(output, command=command, data_dir=data_dir)

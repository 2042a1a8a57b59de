"""Studies whose runs are trainings: each in its own folder, shared between processes by locks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from polyscale._files import write_json
from polyscale.training.compare import PlannedRun, run_all, seconds_left, status
from polyscale.training.locks import locked_folder
from polyscale.training.processes import join_processes
from polyscale.training.result import RunResult
from reproduction.study import RESULTS_JSON, Study, StudyStatus


class TrainingStudy(Study[PlannedRun]):
    """Runs of `polyscale train` in `output/runs`; the subclass has the plan and the tables."""

    def run(
        self,
        planned: Sequence[PlannedRun],
        output: Path,
        *,
        preset: str,
        data_dir: Path | None = None,
        resume: bool = False,
        progress: bool = True,
    ) -> None:
        """Do the runs; with `resume`, those locked by another process are left to it.

        The tables are up to date after every run, whichever process did it.
        """

        def write() -> None:
            with locked_folder(output):
                self.write_tables(output, preset=preset, data_dir=data_dir)

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

    def status(self, preset: str, output: Path) -> StudyStatus:
        """Steps and minutes of every run, and the time left at the pace of the finished ones."""
        found = status(self.plan(preset), output)
        rows = []
        for one in found:
            config = one.planned.config
            steps = "done" if one.finished else f"{one.steps} of {config.training.steps}"
            minutes = "-" if one.seconds is None else f"{one.seconds / 60:.0f}"
            rows.append((one.planned.table, config.name, str(config.seed), steps, minutes))
        left = seconds_left(found)
        done = sum(one.finished for one in found)
        time_left = (
            "unknown until a run is finished" if left is None else f"{left / 3600:.1f} hours"
        )
        return StudyStatus(
            f"{done} of {len(found)} runs done; time left: {time_left}",
            ("table", "run", "seed", "steps", "minutes"),
            rows,
        )


def write_results(output: Path, results: Iterable[RunResult]) -> None:
    """Write all finished runs as one JSON file."""
    write_json(output / RESULTS_JSON, {"runs": [result.as_dict() for result in results]})

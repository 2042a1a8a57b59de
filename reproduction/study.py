"""What a study is: a plan of runs, the runs themselves, and the tables of what is finished."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from polyscale.checks import check_choice

RESULTS_JSON = "results.json"
RESULTS_MARKDOWN = "RESULTS.md"

Run = TypeVar("Run")


@dataclass(frozen=True)
class StudyStatus:
    """How far a study is: one sentence, and a table with a row for each run where there is one."""

    summary: str
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()


class Study(ABC, Generic[Run]):
    """One set of tables, from the plan to the Markdown page.

    A study says what to run and how to present it; how runs are done, saved and resumed is common
    to all studies of a kind: `TrainingStudy` trains models, `MeasuringStudy` takes measurements.

    >>> from reproduction import find_study
    >>> study = find_study("hkt")
    >>> study.command("cpu"), study.plan("cpu")[0].config.model
    ('polyscale reproduce hkt --preset cpu', 'standard')
    """

    name: str
    presets: Mapping[str, Any]  # the sizes of the study, by name

    @abstractmethod
    def plan(self, preset: str) -> list[Run]:
        """All runs, in the order in which they are done."""

    @abstractmethod
    def run(
        self,
        planned: Sequence[Run],
        output: Path,
        *,
        preset: str,
        data_dir: Path | None = None,
        resume: bool = False,
        progress: bool = True,
    ) -> None:
        """Do the runs one after the other, and bring the tables up to date on the way.

        With `resume` finished runs stay and unfinished ones continue; without it, a folder that
        holds results is an error.
        """

    @abstractmethod
    def write_tables(self, output: Path, *, preset: str, data_dir: Path | None = None) -> None:
        """Write RESULTS.md and all other tables and figures of the runs finished so far.

        The same runs give the same files. `data_dir` is for tables that need a model's answers.
        """

    @abstractmethod
    def status(self, preset: str, output: Path) -> StudyStatus:
        """How far the runs in `output` are."""

    def reproduce(
        self,
        preset: str,
        output: Path,
        *,
        data_dir: Path | None = None,
        resume: bool = False,
        progress: bool = True,
    ) -> None:
        """Plan, run and tables: `polyscale reproduce`."""
        self.run(
            self.plan(preset),
            output,
            preset=preset,
            data_dir=data_dir,
            resume=resume,
            progress=progress,
        )

    def sizes(self, preset: str) -> Any:
        """What a preset stands for; an unknown name is an error."""
        check_choice("preset", preset, self.presets)
        return self.presets[preset]

    def command(self, preset: str) -> str:
        """The command that makes the tables, as they quote it."""
        return f"polyscale reproduce {self.name} --preset {preset}"

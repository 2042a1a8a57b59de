"""Several runs of one comparison or one table: each in its own folder, each resumable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polyscale.data.tasks import TaskData
from polyscale.training.config import RunConfig
from polyscale.training.result import RESULT_NAME, RunResult, read_result
from polyscale.training.run import load_data, run, steps_done

RUNS = "runs"


@dataclass(frozen=True)
class PlannedRun:
    """A run and where it belongs: `table` groups what is compared with each other."""

    table: str
    config: RunConfig

    def folder(self, output: Path) -> Path:
        """Where the run lives."""
        return output / RUNS / self.table / f"{self.config.name}-seed-{self.config.seed}"


@dataclass(frozen=True)
class RunStatus:
    """How far a planned run is; `seconds` are those of a finished one."""

    planned: PlannedRun
    steps: int
    seconds: float | None

    @property
    def finished(self) -> bool:
        return self.seconds is not None


def plan_comparison(
    config: RunConfig, models: Sequence[str], seeds: Iterable[int], levels: int
) -> list[PlannedRun]:
    """The runs of `polyscale compare`: every model with every seed, all else equal."""
    planned = []
    for seed in seeds:
        for model in models:
            options = {k: v for k, v in config.model_options.items() if k != "levels"}
            if model == "hkt":
                options["levels"] = levels
            one = replace(config, model=model, name="", model_options=options, seed=seed)
            planned.append(PlannedRun(config.task, one))
    return planned


def run_all(
    planned: Sequence[PlannedRun],
    output: Path,
    *,
    data_dir: Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> list[RunResult]:
    """Do every run in turn; with `resume` what is finished stays and what is not goes on.

    Before the first step all folders are looked at, so that a clash is not found hours later.
    """
    if not resume:
        refuse_existing(planned, output)
    results = []
    loaded: tuple[str, TaskData] | None = None  # data of the last run: seeds and models share them
    for one in planned:
        folder = one.folder(output)
        if (folder / RESULT_NAME).exists():
            data = None
        else:
            key = repr((one.config.task, one.config.task_options, one.config.data_seed))
            if loaded is None or loaded[0] != key:
                loaded = (key, load_data(one.config, data_dir, progress=progress))
            data = loaded[1]
        results.append(
            run(one.config, folder, data=data, data_dir=data_dir, resume=resume, progress=progress)
        )
    return results


def refuse_existing(planned: Sequence[PlannedRun], output: Path) -> None:
    """Raise a FileExistsError that names the first planned run that is there already."""
    for one in planned:
        if one.folder(output).exists():
            raise FileExistsError(f"{one.folder(output)} exists: resume, or choose another folder")


def read_results(output: Path) -> list[RunResult]:
    """All finished runs under a folder."""
    return [read_result(path) for path in sorted((output / RUNS).rglob(RESULT_NAME))]


def status(planned: Sequence[PlannedRun], output: Path) -> list[RunStatus]:
    """How far every planned run is."""
    found = []
    for one in planned:
        folder = one.folder(output)
        if (folder / RESULT_NAME).exists():
            result = read_result(folder / RESULT_NAME)
            found.append(RunStatus(one, result.steps, result.seconds))
        else:
            found.append(RunStatus(one, steps_done(folder), None))
    return found


def seconds_left(found: Sequence[RunStatus]) -> float | None:
    """Time for what is not done, at the pace of the finished runs; None if there are none yet.

    A run goes by the mean pace of its own model on its task, else of its task, else of all.
    """
    done = [one for one in found if one.seconds is not None and one.steps]
    if not done:
        return None
    total = 0.0
    for one in found:
        if one.finished:
            continue
        task, name = one.planned.config.task, one.planned.config.name
        alike = (
            [d for d in done if (d.planned.config.task, d.planned.config.name) == (task, name)]
            or [d for d in done if d.planned.config.task == task]
            or done
        )
        paces = [d.seconds / d.steps for d in alike if d.seconds is not None]
        total += sum(paces) / len(paces) * (one.planned.config.training.steps - one.steps)
    return total

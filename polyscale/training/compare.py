"""The runs of a comparison or a table: each in its own folder, each resumable."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from polyscale.data.tasks import TaskData
from polyscale.training.config import RunConfig
from polyscale.training.processes import decide_on_main, join_processes
from polyscale.training.result import RESULT_NAME, RunResult, read_result
from polyscale.training.run import RunInUseError, load_data, run, steps_done

RUNS = "runs"


@dataclass(frozen=True)
class PlannedRun:
    """A run and its `table`: the runs of one table are compared with each other."""

    table: str
    config: RunConfig

    def folder(self, output: Path) -> Path:
        """The folder of the run."""
        return output / RUNS / self.table / f"{self.config.name}-seed-{self.config.seed}"


@dataclass(frozen=True)
class RunStatus:
    """Progress of a planned run; `seconds` is None until it is finished."""

    planned: PlannedRun
    steps: int
    seconds: float | None

    @property
    def finished(self) -> bool:
        return self.seconds is not None


def plan_comparison(
    config: RunConfig, models: Sequence[str], seeds: Iterable[int], levels: int
) -> list[PlannedRun]:
    """The runs of `polyscale compare`: every model with every seed, otherwise equal."""
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
    announce: bool = False,
    after_each: Callable[[], None] | None = None,
) -> list[RunResult]:
    """Do every run in turn; with `resume` finished runs stay and unfinished ones continue.

    All folders are checked before the first step, so that a conflict is not found hours later. With
    `resume`, runs locked by another process are skipped and tried again at the end, so that several
    processes can share the work. Returns the results of all runs that are finished by then.

    Args:
        planned: the runs; those of one table should be consecutive, because they share their data.
        output: the folder of all runs.
        data_dir: the folder with the data files.
        resume: continue existing runs; without it, a folder that exists is an error.
        progress: show the progress of each run.
        announce: print a line before each run.
        after_each: called on the main process after each run that this call has done.
    """
    main = join_processes().is_main_process
    if not resume:
        refuse_existing(planned, output)
    shared = _SharedData(data_dir, progress=progress and main)
    finished: dict[int, RunResult] = {}
    left = list(range(len(planned)))
    while left:
        skipped = []
        for number in left:
            one = planned[number]
            folder = one.folder(output)
            new = not (folder / RESULT_NAME).exists()
            if new and announce and main:
                name = f"{one.table}, {one.config.name}, seed {one.config.seed}"
                print(f"run {number + 1} of {len(planned)}: {name}", flush=True)
            data = shared.load(one) if new else None
            try:
                finished[number] = run(
                    one.config,
                    folder,
                    data=data,
                    data_dir=data_dir,
                    resume=resume,
                    progress=progress,
                )
            except RunInUseError as error:
                if not resume:
                    raise
                skipped.append(number)
                if announce and main:
                    print(f"{error}: skipped", flush=True)
                continue
            if new and main and after_each is not None:
                after_each()
        if len(skipped) == len(left):
            break
        left = skipped
    return [finished[number] for number in sorted(finished)]


class _SharedData:
    """The data of one table, which its variants and seeds share."""

    def __init__(self, data_dir: Path | None, *, progress: bool) -> None:
        self.data_dir, self.progress = data_dir, progress
        self.table = ""
        self.loaded: dict[str, TaskData] = {}

    def load(self, planned: PlannedRun) -> TaskData:
        """The data of a run; those of other tables are dropped."""
        config = planned.config
        if planned.table != self.table:
            self.table = planned.table
            self.loaded.clear()
        key = repr((config.task, config.task_options, config.data_seed))
        if key not in self.loaded:
            self.loaded[key] = load_data(config, self.data_dir, progress=self.progress)
        return self.loaded[key]


def refuse_existing(planned: Sequence[PlannedRun], output: Path) -> None:
    """Raise a FileExistsError for the first planned run whose folder exists."""

    def check() -> None:
        for one in planned:
            if one.folder(output).exists():
                raise FileExistsError(
                    f"{one.folder(output)} exists: resume, or choose another folder"
                )

    decide_on_main(check)


def read_results(output: Path) -> list[RunResult]:
    """All finished runs under a folder."""
    return [read_result(path) for path in sorted((output / RUNS).rglob(RESULT_NAME))]


def status(planned: Sequence[PlannedRun], output: Path) -> list[RunStatus]:
    """The progress of every planned run."""
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
    """Estimated time of the unfinished steps; None before the first run is finished.

    The estimate for a run uses the mean seconds per step of finished runs of its model on its task,
    or of its task, or of all runs.
    """
    done = [one for one in found if one.seconds is not None and one.steps]
    if not done:
        return None
    total = 0.0
    for one in found:
        if one.finished:
            continue
        task, name = one.planned.config.task, one.planned.config.name
        similar = (
            [d for d in done if (d.planned.config.task, d.planned.config.name) == (task, name)]
            or [d for d in done if d.planned.config.task == task]
            or done
        )
        paces = [d.seconds / d.steps for d in similar if d.seconds is not None]
        total += sum(paces) / len(paces) * (one.planned.config.training.steps - one.steps)
    return total

"""Studies whose runs are measurements: each becomes one record of `results.json`."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from polyscale.training.locks import LOCK_NAME
from polyscale.training.processes import join_processes
from polyscale.training.run import git_commit, installed_versions
from reproduction.records import Records
from reproduction.study import RESULTS_JSON, Study, StudyStatus


@dataclass(frozen=True)
class Measurement:
    """One piece of work, saved when it is complete; its values and its configuration are JSON."""

    id: str
    kind: str  # tables collect the records of a kind
    task: str | None
    config: dict[str, Any]
    measure: Callable[[Any], dict[str, Any]]  # takes what `MeasuringStudy.workspace` gives


class MeasuringStudy(Study[Measurement]):
    """Measurements one after the other in one process; the subclass has the plan and the tables.

    Args:
        redo: prefixes of ids of measurements to take again, such as "timing" on an idle machine.
        announce: called with one line for each measurement.
    """

    format: str  # of results.json: a file of another study is refused
    seed = 0

    def __init__(
        self, *, redo: Sequence[str] = (), announce: Callable[[str], None] = print
    ) -> None:
        self.redo = redo
        self.announce = announce

    @abstractmethod
    def head(self, preset: str) -> dict[str, Any]:
        """What all records have in common, as JSON; records with another head are not mixed in."""

    @abstractmethod
    def workspace(self, preset: str, output: Path, records: Records, data_dir: Path | None) -> Any:
        """What measurements share: models and data, loaded when first used."""

    def run(
        self,
        planned: Sequence[Measurement],
        output: Path,
        *,
        preset: str,
        data_dir: Path | None = None,
        resume: bool = False,
        progress: bool = True,
    ) -> None:
        """Take the measurements that are missing; each is saved as soon as it is taken.

        The folder is locked for the time, and the tables are written after each kind.
        """
        processes = join_processes().num_processes
        if processes > 1:
            raise ValueError(
                f"{self.name} must run in one process, got {processes}; start it without torchrun"
            )
        head = self.head(preset)
        output.mkdir(parents=True, exist_ok=True)
        try:
            with FileLock(output / LOCK_NAME, timeout=0):
                records = self._open(output, head, resume=resume)
                records.drop(self.redo)
                workspace = self.workspace(preset, output, records, data_dir)
                records.head["units"] = [one.id for one in planned]
                commit = git_commit()
                kind = ""
                for number, one in enumerate(planned, start=1):
                    if one.id in records:
                        continue
                    if kind and kind != one.kind:
                        self.write_tables(output, preset=preset, data_dir=data_dir)
                    kind = one.kind
                    line = self._take(one, workspace, records, commit)
                    if progress:
                        self.announce(f"{number} of {len(planned)}: {line}")
                self.write_tables(output, preset=preset, data_dir=data_dir)
        except Timeout as error:
            raise FileExistsError(f"{output} is locked by another process") from error

    def status(self, preset: str, output: Path) -> StudyStatus:
        """How many measurements are taken, the hours they took, and which one is next."""
        if not (output / RESULTS_JSON).is_file():
            raise FileNotFoundError(f"{output} holds no results: {RESULTS_JSON} is missing")
        records = Records.read(output, self.format)
        units = records.head.get("units")
        if not isinstance(units, list):
            raise ValueError(f"{output / RESULTS_JSON} must list its units, got {units!r}")
        left = [name for name in units if name not in records]
        hours = sum(one["seconds"] for one in records.records.values()) / 3600
        summary = f"{len(units) - len(left)} of {len(units)} units done in {hours:.1f} hours"
        return StudyStatus(summary + (f"; next: {left[0]}" if left else ""))

    def _open(self, output: Path, head: dict[str, Any], *, resume: bool) -> Records:
        if not (output / RESULTS_JSON).exists():
            return Records(output, head, self.format)
        if not resume:
            raise FileExistsError(f"{output} holds results: resume, or choose another folder")
        records = Records.read(output, self.format)
        for name, wanted in head.items():
            if records.head.get(name) != wanted:
                raise FileExistsError(
                    f"{output} holds results of another {name} ({_short(records.head.get(name))}, "
                    f"got {_short(wanted)}): choose another folder"
                )
        return records

    def _take(self, one: Measurement, workspace: Any, records: Records, commit: str | None) -> str:
        """Take a measurement and save it; returns a line for the log."""
        began = time.perf_counter()
        values = one.measure(workspace)
        seconds = time.perf_counter() - began
        records.add(
            {
                "id": one.id,
                "kind": one.kind,
                "task": one.task,
                "config": one.config,
                "seed": self.seed,
                "git_commit": commit,
                "environment": _environment(records),
                "seconds": round(seconds, 3),
                "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "values": values,
            }
        )
        return f"{one.id}: {self.describe(values)} ({seconds:.0f} s)"

    def describe(self, values: dict[str, Any]) -> str:
        """The figure of a measurement that its line in the log shows."""
        return "done"


def _environment(records: Records) -> int:
    """The index of this process's versions among those of all records."""
    here = {"versions": installed_versions(), "threads": torch.get_num_threads()}
    known: list[dict[str, Any]] = records.head.setdefault("environments", [])
    if here not in known:
        known.append(here)
    return known.index(here)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:57]}..."

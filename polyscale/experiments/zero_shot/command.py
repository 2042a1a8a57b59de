"""`polyscale reproduce hsa-zero-shot`: all units one after the other, each kept when it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from polyscale.experiments.zero_shot.classify import task_units
from polyscale.experiments.zero_shot.embeddings import embedding_units
from polyscale.experiments.zero_shot.lab import Lab, Unit
from polyscale.experiments.zero_shot.presets import Preset, find_preset
from polyscale.experiments.zero_shot.pretrained import pretrained_model
from polyscale.experiments.zero_shot.records import FILE, Records
from polyscale.experiments.zero_shot.tables import write_tables
from polyscale.experiments.zero_shot.timing import timing_units
from polyscale.training.run import git_commit, installed_versions

SEED = 0


def reproduce(
    output: Path,
    *,
    model: str | None = None,
    data_dir: Path | str | None = None,
    preset: str | Preset = "cpu",
    resume: bool = False,
    again: Sequence[str] = (),
    say: Callable[[str], None] = print,
) -> None:
    """Run the experiment into `output`: results.json, RESULTS.md and figures.

    Every unit of work is kept in results.json as soon as it is done; with `resume` those are left
    alone, and fine-tuning goes on from its last checkpoint. Fine-tuned weights are in `models`.

    Args:
        output: the folder of the results.
        model: a folder or a name on the Hub; None for all-MiniLM-L6-v2 (`pretrained_model`).
        data_dir: the folder with the texts, as for `load_texts`.
        preset: "cpu", "paper", "tiny", or sizes of your own.
        resume: go on with what is there; without it, a folder with results is refused.
        again: beginnings of the names of units to do again, such as "timing" on a quiet machine.
        say: called with a line for each unit.

    >>> reproduce(Path("out"), preset="tiny", data_dir="data")  # doctest: +SKIP
    """
    sizes = find_preset(preset) if isinstance(preset, str) else preset
    source = pretrained_model(model)
    output.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(output / ".lock", timeout=0):
            head = {"model": source.name, "seed": SEED, "preset": sizes.as_dict()}
            records = _open(output, head, resume=resume)
            records.drop(again)
            lab = Lab(sizes, source, records, output, data_dir, SEED, say)
            _work(lab)
    except Timeout as error:
        raise FileExistsError(f"{output} is in use by another process") from error


def _open(output: Path, head: dict[str, Any], *, resume: bool) -> Records:
    if not (output / FILE).exists():
        return Records(output, head)
    if not resume:
        raise FileExistsError(f"{output} holds results: resume them, or choose another folder")
    records = Records.read(output)
    for name, wanted in head.items():
        if records.head.get(name) != wanted:
            raise FileExistsError(
                f"{output} holds results of another {name} (got {_short(wanted)}, there is "
                f"{_short(records.head.get(name))}): choose another folder"
            )
    return records


def all_units(lab: Lab) -> list[Unit]:
    """Everything that is to be done, in order; last what wants a machine to itself."""
    return [
        *(unit for size in lab.preset.tasks for unit in task_units(lab, size)),
        *embedding_units(lab),
        *timing_units(lab),
    ]


def _work(lab: Lab) -> None:
    units = all_units(lab)
    lab.records.head["units"] = [unit.id for unit in units]
    commit = git_commit()
    environment = _environment(lab.records)
    kind = ""
    for number, unit in enumerate(units, start=1):
        if unit.id in lab.records:
            continue
        if kind and kind != unit.kind:
            write_tables(lab.records)
        kind = unit.kind
        began = time.perf_counter()
        values = unit.work()
        seconds = time.perf_counter() - began
        lab.records.add(
            {
                "id": unit.id,
                "kind": unit.kind,
                "task": unit.task,
                "config": unit.config,
                "seed": lab.seed,
                "git_commit": commit,
                "environment": environment,
                "seconds": round(seconds, 3),
                "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "values": values,
            }
        )
        lab.say(f"{number} of {len(units)}: {unit.id}: {_said(values)} ({seconds:.0f} s)")
    write_tables(lab.records)


def _environment(records: Records) -> int:
    """The number of this process's versions among all that had a part in the results."""
    here = {"versions": installed_versions(), "threads": torch.get_num_threads()}
    known: list[dict[str, Any]] = records.head.setdefault("environments", [])
    if here not in known:
        known.append(here)
    return known.index(here)


def _said(values: dict[str, Any]) -> str:
    """The figure of a unit that a reader of the log looks for."""
    if "refused" in values:
        return f"refused: {values['refused']}"
    if "lost" in values:
        return f"{values['accuracy']:.2f} %, {values['lost']:.2f} points lost"
    return "done"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else f"{text[:57]}..."


@dataclass(frozen=True)
class Status:
    """How far an experiment is; `print` shows it in a line.

    >>> print(Status(done=2, units=3, seconds=1800.0, next="timing/512"))
    2 of 3 units done in 0.5 hours; next: timing/512
    """

    done: int
    units: int
    seconds: float  # spent on what is done
    next: str | None  # the unit that comes next

    def __str__(self) -> str:
        spent = f"{self.done} of {self.units} units done in {self.seconds / 3600:.1f} hours"
        return spent if self.next is None else f"{spent}; next: {self.next}"


def status(output: Path) -> Status:
    """Say how far the experiment in a folder is.

    >>> print(status(Path("experiments/hsa-zero-shot")))  # doctest: +SKIP
    """
    if not (output / FILE).is_file():
        raise FileNotFoundError(f"{output} holds no results: {FILE} is missing")
    records = Records.read(output)
    units = records.head.get("units")
    if not isinstance(units, list):
        raise ValueError(f"{output / FILE}: does not say which units there are")
    left = [name for name in units if name not in records]
    seconds = sum(one["seconds"] for one in records.records.values())
    return Status(len(units) - len(left), len(units), seconds, left[0] if left else None)

"""The analysis of a model in a folder, on a text file or on samples of a task."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from polyscale.analysis.dispatch import analyze
from polyscale.analysis.inputs import Examples, read_own, read_task, read_text
from polyscale.analysis.models import find_snapshots, load_model, model_kind
from polyscale.analysis.schema import Analysis, NormalityAtStep
from polyscale.analysis.snapshots import analyze_snapshots
from polyscale.checks import check_integer
from polyscale.data.own.folders import media_of
from polyscale.data.own.tables import is_table
from polyscale.data.tasks import OWN_TASKS, TASKS


def analyze_folder(
    target: str,
    data: str | None,
    *,
    data_dir: Path | str | None = None,
    task_options: Mapping[str, Any] | None = None,
    examples: int = 8,
    max_length: int = 1024,
    title: str | None = None,
    progress: Callable[[str], None] = lambda step: None,
) -> Analysis:
    """The analysis of the model in a folder, with normality over training if it has snapshots.

    Args:
        target: folder with config.json and model.safetensors: a model or run of polyscale, or any
            encoder or decoder of Hugging Face. States in its `snapshots/step-000100` folders
            give normality over training.
        data: a text file, a table, a folder or the name of a task; None for the task of the run in
            `target`. Of a table and a folder, the texts or images are read, as in its training.
        data_dir: where the files of tasks are.
        task_options: of the task; by default those of the run, otherwise the task's own.
        examples: how many samples of a task to use.
        max_length: how many tokens of a text to use.
        title: of the report.
        progress: called with each step as it begins.

    Raises:
        ValueError: with one line that says what is wrong with an argument or a file.
        FileNotFoundError: if the folder holds no model, or the data are missing.
    """
    check_integer("examples", examples, least=1)
    check_integer("max_length", max_length, least=1)
    folder = Path(target)
    if not folder.is_dir():
        raise FileNotFoundError(f"target must be a folder with a model, got {target!r}")
    kind = model_kind(folder)
    progress("loading the model")
    model = load_model(folder)
    progress("reading the data")
    read = _read(data, folder, model, (examples, max_length), data_dir, task_options)
    options: dict[str, Any] = {
        "tokens": read.tokens,
        "text": read.text,
        "title": title or f"{folder.resolve().name} on {read.source}",
    }
    if kind in ("hkt", "transformer"):
        options["max_length"] = max_length
    if kind == "hkt":
        options["examples"] = examples
    progress("analysing")
    with torch.no_grad():
        analysis = analyze(model, read.batch, **options)
        analysis["meta"]["model"] = f"{type(model).__name__} ({target})"
        analysis["meta"]["notes"] = [*read.notes, *analysis["meta"]["notes"]]
        if kind in ("hkt", "transformer"):
            _add_training(analysis, folder, read, progress)
    return analysis


def _read(
    data: str | None,
    folder: Path,
    model: Any,
    limits: tuple[int, int],
    data_dir: Path | str | None,
    task_options: Mapping[str, Any] | None,
) -> Examples:
    """Samples of a task or the beginning of a text; `limits` are those of samples and tokens."""
    data = _task_of_run(folder) if data is None else data
    if data in (*TASKS, *OWN_TASKS):
        return read_task(data, folder, model, limits[0], data_dir, task_options)
    if task_options:
        raise ValueError(f"task_options go with a task ({', '.join(TASKS)}), not with {data!r}")
    return _read_file(data, folder, model, limits)


def _task_of_run(folder: Path) -> str:
    if not (folder / "config.yaml").is_file():
        raise ValueError(
            f"data must be a text file or a task ({', '.join(TASKS)}); it can be left out only for "
            f"a training run, and {folder} has no config.yaml"
        )
    from polyscale.training.config import RunConfig

    return RunConfig.from_yaml(folder / "config.yaml").task


def _read_file(data: str, folder: Path, model: Any, limits: tuple[int, int]) -> Examples:
    path = Path(data)
    if not path.exists():
        raise FileNotFoundError(
            f"data must be a text file or a task ({', '.join(TASKS)}), got {data!r}, "
            "which is neither"
        )
    # Rows of a table are texts of their own; its header and its labels are none.
    is_own = is_table(path) or path.is_dir() or media_of(path) in ("image", "html", "markdown")
    if is_own and (getattr(model, "processor", None) is not None or _has_reader(folder)):
        return read_own(path, folder, model, *limits)
    if is_table(path) or path.is_dir():
        raise ValueError(
            f"data must be the name of a task, got {data}; {folder} has no tokenizer and no "
            "processor that could read its rows"
        )
    if model.config.model_type == "hte":
        raise ValueError("data must be the name of a task for a model over trees, got a text file")
    if getattr(model.config, "input_channels", None) is not None:
        raise ValueError("data must be the name of a task: the model takes numbers, not text")
    return read_text(path, folder, model, limits[1])


def _has_reader(folder: Path) -> bool:
    """Whether texts or images can be read as the model takes them."""
    found = [*folder.glob("tokenizer*"), *folder.glob("vocab.txt")]
    return bool(found) or (folder / "preprocessor_config.json").is_file()


def _add_training(
    analysis: Analysis, folder: Path, read: Examples, progress: Callable[[str], None]
) -> None:
    """Normality at each snapshot, one model in memory at a time."""
    snapshots, total = find_snapshots(folder)
    history: list[NormalityAtStep] = []
    for step, path in snapshots:
        progress(f"analysing step {step}")
        found = analyze_snapshots([(step, load_model(path))], read.batch, maps=False)
        history += found["normality"]["over_training"]
    if not history:
        return
    analysis["normality"]["over_training"] = history
    if len(snapshots) < total:
        note = f"Normality over training uses {len(snapshots)} of {total} snapshots."
        analysis["meta"]["notes"].append(note)

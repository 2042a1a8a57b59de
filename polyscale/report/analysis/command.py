"""What `polyscale analyze` does: a model and something to look at in, a report out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from polyscale.data.tasks import TASKS
from polyscale.report.analysis.examples import Examples, read_task, read_text
from polyscale.report.analysis.models import find_snapshots, load_model, model_kind
from polyscale.report.analysis.writing import write_analysis


def run_analyze(
    target: str,
    data: str | None,
    output: Path,
    *,
    data_dir: Path | str | None = None,
    task_options: Mapping[str, Any] | None = None,
    examples: int = 8,
    max_length: int = 1024,
    title: str | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, Any], list[Path]]:
    """Analyse the model in a folder and write the report; return the analysis and the files.

    Args:
        target: folder with config.json and model.safetensors: a model or run of polyscale, or any
            encoder or decoder of Hugging Face. States in its `snapshots/step-000100` folders
            give normality over training.
        data: a text file or the name of a task; None for the task of the run in `target`.
        output: folder for report.html and report.json, or the name of an HTML file.
        data_dir: where the files of tasks are.
        task_options: of the task; by default those of the run, else the task's own.
        examples: how many samples of a task to look at.
        max_length: how many tokens of a text to look at.
        title: of the report.
        say: is told what is being done.

    Raises:
        ValueError: with one line that says what is wrong with an argument or a file.
        FileNotFoundError: if the folder is no model, or the data are not there.
        OSError: if the report cannot be written.
    """
    for name, value in (("examples", examples), ("max_length", max_length)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} takes a whole number of at least 1, got {value!r}")
    folder = Path(target)
    if not folder.is_dir():
        raise FileNotFoundError(f"target takes a folder with a model, got {target!r}")
    kind = model_kind(folder)
    say("loading the model")
    model = load_model(folder)
    say("reading the data")
    data = _task_of_run(folder) if data is None else data
    if data in TASKS:
        read = read_task(data, folder, model, examples, data_dir, task_options)
    elif task_options:
        raise ValueError(f"task_options go with a task ({', '.join(TASKS)}), not with {data!r}")
    else:
        read = _read_file(data, folder, model, max_length)
    shown: dict[str, Any] = {
        "tokens": read.tokens,
        "text": read.text,
        "title": title or f"{folder.resolve().name} on {read.source}",
    }
    say("analysing")
    with torch.no_grad():
        analysis = _analyze(kind, model, read, shown, examples, max_length)
        analysis["meta"]["model"] = f"{type(model).__name__} ({target})"
        analysis["meta"]["notes"] = [*read.notes, *(analysis["meta"].get("notes") or [])]
        if kind in ("hkt", "transformer"):
            _add_training(analysis, folder, read, say)
    return analysis, write_analysis(analysis, output)


def _task_of_run(folder: Path) -> str:
    if not (folder / "config.yaml").is_file():
        raise ValueError(
            f"data takes a text file or a task ({', '.join(TASKS)}); it can be left out only for "
            f"a training run, and {folder} has no config.yaml"
        )
    from polyscale.training.config import RunConfig

    return RunConfig.from_yaml(folder / "config.yaml").task


def _read_file(data: str, folder: Path, model: Any, max_length: int) -> Examples:
    path = Path(data)
    if not path.is_file():
        raise FileNotFoundError(
            f"data takes a text file or a task ({', '.join(TASKS)}), got {data!r}, which is neither"
        )
    if model.config.model_type == "hte":
        raise ValueError("data: a model over trees takes the name of its task, not a text file")
    if getattr(model.config, "input_channels", None) is not None:
        raise ValueError("data: the model takes numbers, not text; give the name of a task")
    return read_text(path, folder, model, max_length)


def _analyze(
    kind: str, model: Any, read: Examples, shown: dict[str, Any], examples: int, max_length: int
) -> dict[str, Any]:
    from polyscale.theory import analyze_attention, analyze_hkt, analyze_hsa

    if kind == "hkt":
        return analyze_hkt(model, read.batch, examples=examples, max_length=max_length, **shown)
    if kind == "transformer":
        return analyze_attention(model, read.batch, max_length=max_length, **shown)
    return analyze_hsa(model, read.batch, **shown)


def _add_training(
    analysis: dict[str, Any], folder: Path, read: Examples, say: Callable[[str], None]
) -> None:
    """Normality at each snapshot, one model in memory at a time."""
    from polyscale.theory import analyze_snapshots

    snapshots, total = find_snapshots(folder)
    history: list[dict[str, Any]] = []
    for step, path in snapshots:
        say(f"analysing step {step}")
        found = analyze_snapshots([(step, load_model(path))], read.batch, maps=False)
        history += found["normality"]["over_training"]
    if not history:
        return
    analysis.setdefault("normality", {})["over_training"] = history
    if len(snapshots) < total:
        note = f"Normality over training uses {len(snapshots)} of {total} snapshots."
        analysis["meta"]["notes"].append(note)

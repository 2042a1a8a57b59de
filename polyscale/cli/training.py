"""`polyscale train` and `compare`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyscale.cli import options, own
from polyscale.cli.demo import show_comparison
from polyscale.cli.errors import one_line_errors

if TYPE_CHECKING:
    from polyscale.training.config import RunConfig

_CONFIG = typer.Argument(None, help="A YAML file, instead of task and model.")
_RUN_OUTPUT = typer.Option(None, help="Folder of the run (with --data: runs/NAME-MODEL).")
_COMPARE_OUTPUT = typer.Option(None, help="Folder (runs/compare-TASK).")


def train(
    config: Path | None = _CONFIG,
    task: str | None = typer.Option(None, help="Task, such as listops or imdb-char."),
    model: str | None = typer.Option(None, help="standard, hkt, hsa, fsa or deepset."),
    levels: int | None = typer.Option(None, min=1, help="Levels of hkt (3)."),
    preset: str = options.PRESET,
    seed: int | None = typer.Option(None, min=0, help="Of weights, order and dropout (0)."),
    output: Path | None = _RUN_OUTPUT,
    changes: list[str] = options.CHANGES,
    data_dir: Path | None = options.DATA_DIR,
    resume: bool = options.RESUME,
    data: str | None = own.DATA,
    kind: str | None = own.KIND,
    text_column: str | None = options.TEXT_COLUMN,
    label_column: str | None = options.LABEL_COLUMN,
    labels: str | None = own.LABELS,
    validation: str | None = own.VALIDATION,
    test: str | None = own.TEST,
    trees: str | None = own.TREES,
    document_format: str | None = own.FORMAT,
    tokenizer: str | None = own.TOKENIZER,
    length: int | None = own.LENGTH,
) -> None:
    """Train one model on one task, or on your own data (--data)."""
    with one_line_errors(resumable=True):
        from polyscale.training.presets import preset_config
        from polyscale.training.processes import join_processes
        from polyscale.training.run import run

        of_data = {
            "data": data,
            "text": text_column,
            "label": label_column,
            "labels": labels,
            "validation": validation,
            "test": test,
            "format": document_format,
            "tokenizer": tokenizer,
            "length": length,
        }
        loaded = None
        if data is not None:
            if config is not None or task:
                raise ValueError("--data must come without a YAML file and --task, got both")
            chosen, loaded = own.plan(of_data, model, kind, trees, preset, seed, levels, changes)
            output = output or Path("runs") / f"{Path(data).stem}-{chosen.model}"
        else:
            own.refuse_without_data({**of_data, "kind": kind, "trees": trees})
            if config is not None:
                if task or model or levels:
                    raise ValueError(
                        "give either a YAML file or --task and --model (change it with --set)"
                    )
                chosen = _read_config(config, seed)
            elif task and model:
                chosen = preset_config(task, model, preset, seed=seed or 0, levels=levels)
            else:
                raise ValueError("train takes --data, a YAML file, or --task and --model")
            chosen = _changed(chosen, changes)
        if output is None:
            raise ValueError("--output must be a folder for the run, got none")
        result = run(chosen, output, data_dir=data_dir, data=loaded, resume=resume)
        if not join_processes().is_main_process:
            return
        unit = " %" if result.higher_is_better else " bits per token"
        print(f"{result.task}, {result.model}, seed {result.seed}: test {result.score:.2f}{unit}")
        print(f"Run: {output}")


def compare(
    task: str = typer.Option(..., help="Task, such as listops or imdb-char."),
    models: str = typer.Option("standard,hkt", help="Models, the baseline first."),
    seeds: str = typer.Option("0,1,2", help="Seeds; every model runs with each."),
    levels: int = typer.Option(3, min=1, help="Levels of hkt."),
    preset: str = options.PRESET,
    output: Path | None = _COMPARE_OUTPUT,
    changes: list[str] = options.CHANGES,
    data_dir: Path | None = options.DATA_DIR,
    resume: bool = options.RESUME,
) -> None:
    """Train several models under one budget and compare them."""
    with one_line_errors(resumable=True):
        from polyscale.report.comparison import Comparison
        from polyscale.training.compare import plan_comparison, run_all
        from polyscale.training.presets import preset_config
        from polyscale.training.processes import join_processes

        names, numbers = models.split(","), _read_seeds(seeds)
        _refuse_repeated("--models", names)
        _refuse_repeated("--seeds", numbers)
        config = _changed(preset_config(task, names[0], preset), changes)
        planned = plan_comparison(config, names, numbers, levels)
        folder = output or Path("runs") / f"compare-{task}"
        results = run_all(planned, folder, data_dir=data_dir, resume=resume)
        if not join_processes().is_main_process:
            return
        if len(results) < len(planned):
            print(
                f"{len(planned) - len(results)} of {len(planned)} runs are locked by another "
                "process, which will write the comparison; if it was stopped, use --resume"
            )
            return
        command = shlex.join(["polyscale", *sys.argv[1:]])
        comparison = Comparison.from_results(results, baseline=names[0], command=command)
        show_comparison(comparison, comparison.write(folder)[0])


def _read_config(path: Path, seed: int | None) -> RunConfig:
    from polyscale.training.config import RunConfig

    config = RunConfig.from_yaml(path)
    return config if seed is None else config.with_seed(seed)


def _changed(config: RunConfig, changes: Sequence[str]) -> RunConfig:
    from polyscale.training.config import read_assignment

    return config.with_values(dict(map(read_assignment, changes)))


def _read_seeds(text: str) -> list[int]:
    try:
        return [int(seed) for seed in text.split(",")]
    except ValueError:
        raise ValueError(f"--seeds must be integers such as 0,1,2, got {text!r}") from None


def _refuse_repeated(option: str, given: Sequence[object]) -> None:
    if len(set(given)) != len(given):
        raise ValueError(f"{option} must not repeat a value, got {','.join(map(str, given))}")

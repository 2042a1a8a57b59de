"""The table of the HKT paper and its ablations: what to run, and the tables of what came out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from polyscale.report.comparison import Comparison
from polyscale.training.compare import PlannedRun, read_results, run_all
from polyscale.training.config import RunConfig
from polyscale.training.files import sole_use, write_json, write_text
from polyscale.training.presets import plain_hkt_config, preset_config
from polyscale.training.processes import join_processes
from polyscale.training.result import RunResult

PRESETS = {"cpu": "small", "paper": "paper"}
SEEDS = (0, 1, 2)
RESULTS_JSON = "results.json"
RESULTS_MARKDOWN = "RESULTS.md"

# In the order of the runs: first where the paper's gain is largest.
HKT_TASKS = ("imdb-char", "listops", "scifar10")

# Section 4 of the paper: length; standard, HKT, mean and standard deviation over three seeds; gain.
_PAPER = {
    "listops": (512, "50.33 ± 0.12", "55.10 ± 0.29", "+4.77"),
    "scifar10": (1024, "34.01 ± 0.19", "35.45 ± 0.09", "+1.44"),
    "imdb-char": (1024, "62.72 ± 0.40", "70.19 ± 0.57", "+7.47"),
}
# Long Range Arena, for context: other lengths, sizes and budgets.
_ARENA_TASKS = {"listops": "ListOps 2K", "scifar10": "Image", "imdb-char": "Text 4K"}
_ARENA = {
    "Transformer": (36.37, 42.44, 64.27),
    "Longformer": (35.63, 42.22, 62.85),
    "Linformer": (35.70, 38.56, 53.94),
    "BigBird": (36.05, 40.83, 64.02),
    "Performer": (18.01, 42.77, 65.40),
}

# The ablations: what differs from plain HKT with three levels, or from `standard`. L = 1 is
# `standard`. Plain HKT, which is alike on all tasks, is `hkt` itself or `hkt-plain`.
_ABLATIONS: dict[str, dict[str, Any]] = {
    "hkt-2-levels": {"levels": 2},
    "hkt-4-levels": {"levels": 4},
    "hkt-equal-weights": {"level_weights": [1 / 3, 1 / 3, 1 / 3]},
    "hkt-level-1-alone": {"level_weights": [0.0, 1.0, 0.0]},
    "hkt-level-2-alone": {"level_weights": [0.0, 0.0, 1.0]},
    "hkt-mean-downsampling": {"downsampling": "mean"},
    "hkt-own-projections": {"shared_projections": False},
    "hkt-depthwise": {"downsampling": "depthwise"},
    "hkt-width-2": {"downsampling_width": 2},
    "hkt-fine-values": {"values": "fine"},
    "standard-filter": {"downsampling": "dense", "filter_width": 4},
    "hkt-filter": {"filter_width": 4, "values": "fine"},
}
# A filter of level 0 as wide as those between levels, without levels and with them, tells what
# comes from convolution and what from scale.
_FILTERS = ("standard-filter", "hkt-filter")


def plan_hkt(preset: str = "cpu") -> list[PlannedRun]:
    """The paired seeds of the three tasks, those of plain HKT where it differs, the ablations.

    On a CPU the ablations run with one seed on the first task, those of the filter on ListOps, too;
    `paper` runs all of them.

    >>> len(plan_hkt("cpu")), len(plan_hkt("paper"))
    (40, 126)
    """
    if preset not in PRESETS:
        raise ValueError(f"preset takes one of {', '.join(PRESETS)}; got {preset!r}")
    size = PRESETS[preset]
    main = [
        PlannedRun(task, preset_config(task, model, size, seed=seed))
        for task in HKT_TASKS
        for seed in SEEDS
        for model in ("standard", "hkt")
    ]
    plain = [
        PlannedRun(task, plain_hkt_config(task, size, seed=seed))
        for task in HKT_TASKS
        for seed in SEEDS
    ]
    ablations = [
        PlannedRun(task, _ablation(task, name, change, size, seed))
        for task in HKT_TASKS
        for seed in (SEEDS if preset == "paper" else SEEDS[:1])
        for name, change in _ABLATIONS.items()
        if preset == "paper" or task == HKT_TASKS[0] or (task == "listops" and name in _FILTERS)
    ]
    known = [run.config for run in main]
    return [
        *main,
        *(run for run in plain if run.config not in known),
        *(run for run in ablations if replace(run.config, name="hkt") not in known),
    ]


def reproduce(
    planned: Sequence[PlannedRun],
    output: Path,
    *,
    command: str,
    data_dir: Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> None:
    """Do the runs one after the other and bring the tables up to date after each of them.

    Runs locked by another process are skipped, so that several may share the work.
    """

    def write() -> None:
        with sole_use(output):
            write_tables(output, command=command)

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


def write_tables(output: Path, *, command: str) -> None:
    """All finished runs as one JSON file, a comparison for each task, and the paper's table."""
    results = read_results(output)
    write_json(output / RESULTS_JSON, {"runs": [result.as_dict() for result in results]})
    comparisons = {}
    for task in HKT_TASKS:
        runs = [result for result in results if result.task == task]
        if any(result.model == "standard" for result in runs):
            comparisons[task] = Comparison.from_results(
                runs, title=f"HKT and standard attention: {task}", command=command
            )
            comparisons[task].write(output / "tables" / task)
    write_text(output / RESULTS_MARKDOWN, hkt_markdown(comparisons, results, command))


def hkt_markdown(
    comparisons: dict[str, Comparison], results: Sequence[RunResult], command: str
) -> str:
    """The table of the paper with ours beside it, and the ablations."""
    lines = [
        "# HKT against standard attention",
        "",
        f"Made by `{command}`. Test accuracy in percent, mean ± standard deviation over seeds, "
        "of the state best on validation. The gain is paired by seed, with its 95 % interval.",
        "",
        "| task | T | seeds | standard | HKT | gain | majority class "
        "| paper: T | standard | HKT | gain |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for task, comparison in comparisons.items():
        if "hkt" not in comparison.models:
            continue  # its first run is still to come
        length = next(
            run.model_config["max_position_embeddings"] for run in results if run.task == task
        )
        cells = comparison.cells("hkt")
        lines.append(
            f"| {task} | {length:,} | {cells['seeds']} | {comparison.cells('standard')['score']} | "
            f"{cells['score']} | {cells['difference']} | {cells['majority']} | "
            f"{_PAPER[task][0]:,} | {' | '.join(_PAPER[task][1:])} |"
        )
    lines += _filter_lines(results)
    lines += ["", "## Every variant", ""]
    for task, comparison in comparisons.items():
        lines += [f"### {task}", "", comparison.to_markdown_table(), ""]
    lines += [
        "## For context: Long Range Arena",
        "",
        "Published figures of other models, at other lengths, sizes and budgets.",
        "",
        "| model | " + " | ".join(_ARENA_TASKS.values()) + " |",
        "|---|---|---|---|",
        *(
            f"| {name} | " + " | ".join(f"{figure:.2f}" for figure in figures) + " |"
            for name, figures in _ARENA.items()
        ),
    ]
    seconds = sum(result.seconds for result in results)
    lines += ["", f"{len(results)} runs, {seconds / 3600:.1f} hours in all."]
    return "\n".join(lines) + "\n"


def _filter_lines(results: Sequence[RunResult]) -> list[str]:
    """What the levels add where standard attention has a causal filter of the input, too."""
    rows = []
    for task in HKT_TASKS:
        filtered = [
            run for run in results if run.task == task and run.model_config.get("filter_width")
        ]
        standard, hkt = (
            [run for run in filtered if (run.model_config["levels"] > 1) == leveled]
            for leveled in (False, True)
        )
        if not standard or not hkt:
            continue
        seeds = {run.seed for run in standard} & {run.seed for run in hkt}
        comparison = Comparison.from_results(
            [run for run in (*standard, *hkt) if run.seed in seeds], baseline=standard[0].model
        )
        cells = comparison.cells(hkt[0].model)
        rows.append(
            f"| {task} | {cells['seeds']} | {comparison.cells(standard[0].model)['score']} | "
            f"{cells['score']} | {cells['difference']} |"
        )
    if not rows:
        return []
    return [
        "",
        "With one causal filter of level 0 in both, as wide as those between levels, and values of "
        "the fine level: what levels add to it.",
        "",
        "| task | seeds | standard with filter | HKT with filter | gain |",
        "|---|---|---|---|---|",
        *rows,
    ]


def _ablation(task: str, name: str, change: dict[str, Any], size: str, seed: int) -> RunConfig:
    if name.startswith("standard"):
        config = preset_config(task, "standard", size, seed=seed)
    else:
        config = plain_hkt_config(task, size, seed=seed)
    return replace(config, name=name, model_options={**config.model_options, **change})

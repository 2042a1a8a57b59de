"""The tables of the HKT paper with ours beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyscale._files import write_text
from polyscale.report.comparison import Comparison
from polyscale.training.compare import read_results
from polyscale.training.result import RunResult
from reproduction.hkt.plan import HKT_TASKS
from reproduction.study import RESULTS_MARKDOWN
from reproduction.training import write_results

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


def write_tables(output: Path, *, command: str) -> None:
    """All finished runs as one JSON file, a comparison for each task, and the paper's table."""
    results = read_results(output)
    write_results(output, results)
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
    """What the levels add when standard attention has a causal filter at its input too."""
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

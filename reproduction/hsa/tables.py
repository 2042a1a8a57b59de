"""The tables of the HSA paper with ours beside them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyscale._files import write_text
from polyscale.data.tasks import TaskData
from polyscale.report.comparison import Comparison
from polyscale.report.tables import difference_text, score_text
from polyscale.training.compare import RUNS
from polyscale.training.result import RESULT_NAME, RunResult, read_result
from polyscale.training.statistics import PairedDifference, paired, summarise
from reproduction.hsa.plan import DOCUMENTS, EMBEDDINGS, RECORDS, document_table
from reproduction.hsa.predictions import read_macro_f1
from reproduction.study import RESULTS_MARKDOWN
from reproduction.training import write_results

FLAT, TREE, RANDOM = "fsa", "hsa", "hsa-random"

# Flat attention, HSA: accuracy in percent, from Table 1 of the paper.
_PAPER: dict[tuple[str, str], tuple[str, tuple[float, float]]] = {
    ("imdb-words", "word2vec"): ("IMDB, Word2Vec", (67.39, 74.69)),
    ("imdb-words", "minilm"): ("IMDB, T5-small", (75.77, 81.29)),
}
_PAPER_ELSEWHERE = """\
Elec, the paper's other set of documents, cannot be had; AG News and SST-2 stand in for it. The
paper has 71.82 (flat) and 75.49 (HSA) on Elec with Word2Vec, 82.12 and 85.21 with T5-small."""
_PAPER_RECORDS = """\
The paper's records are N24News (an image and four texts, as vectors of ViT and e5): accuracy 75.78
(DeepSet), 79.21 (flat) and 79.52 (HSA), F1 79.02 (flat) and 80.91 (HSA). Ours are COCO18: patches
of photographs of 64 x 64 pixels, and captions. The two cannot be compared."""
_QUESTIONS = {
    TREE: "semantic: paragraphs, sentences, words",
    "hsa-windows": "windows: as many groups, of even sizes",
    RANDOM: "random: the same shape, words shuffled among its leaves",
    "hsa-columns": "semantic, every word with its own query (the column tie, not in the paper)",
    FLAT: "flat attention, texts cut to 512 words",
    "deepset": "no attention",
}


def write_tables(output: Path, *, command: str, data_dir: Path | None = None) -> None:
    """All finished runs as one JSON file, a comparison for each table, and the paper's tables.

    `data_dir` is for macro-F1 of runs that are new since the last time: their models are asked.
    """
    runs = read_runs(output)
    every = [result for results in runs.values() for result in results]
    write_results(output, every)
    comparisons = {}
    for table, results in runs.items():
        if any(result.model == FLAT for result in results):
            comparisons[table] = Comparison.from_results(
                results,
                baseline=FLAT,
                title=f"Hierarchical and flat attention: {table}",
                command=command,
                allow_differences=True,  # flat attention has texts of 512 words, trees all of them
            )
            comparisons[table].write(output / "tables" / table)
    scores = record_scores(output, runs.get(RECORDS, []), data_dir)
    write_text(output / RESULTS_MARKDOWN, hsa_markdown(comparisons, scores, every, command))


def read_runs(output: Path) -> dict[str, list[RunResult]]:
    """The finished runs of every table."""
    tables = [document_table(task, embedding) for task in DOCUMENTS for embedding in EMBEDDINGS]
    found = {}
    for table in (*tables, RECORDS):
        paths = sorted((output / RUNS / table).rglob(RESULT_NAME))
        if paths:
            found[table] = [read_result(path) for path in paths]
    return found


def record_scores(
    output: Path, results: Sequence[RunResult], data_dir: Path | None
) -> dict[str, dict[int, float]]:
    """Macro-F1 in percent of every model and seed on the records."""
    loaded: dict[str, TaskData] = {}
    scores: dict[str, dict[int, float]] = {}
    for result in results:
        folder = output / RUNS / RECORDS / f"{result.model}-seed-{result.seed}"
        score = read_macro_f1(folder, data_dir, loaded)
        if score is not None:
            scores.setdefault(result.model, {})[result.seed] = 100 * score
    return scores


def hsa_markdown(
    comparisons: dict[str, Comparison],
    scores: dict[str, dict[int, float]],
    results: Sequence[RunResult],
    command: str,
) -> str:
    """Documents, records, and the question of the tree."""
    lines = [
        "# HSA trained from scratch",
        "",
        f"Made by `{command}`. Test accuracy in percent, mean ± standard deviation over seeds, of "
        "the state best on validation. Gains are paired by seed, with their 95 % interval.",
        "",
        f"One HTE layer, 3 heads, {_width_text(results)}. Vectors of words are frozen: skip-gram "
        "trained on the training texts, or the input table of all-MiniLM-L6-v2 in place of "
        "T5-small's. HSA reads whole texts, flat attention the first 512 words.",
        "",
        *_document_lines(comparisons),
        *_course_lines(comparisons),
        *_record_lines(comparisons.get(RECORDS), scores),
        *_tree_lines(comparisons.get(document_table(DOCUMENTS[0], EMBEDDINGS[0]))),
        "## Every variant",
        "",
    ]
    for table, comparison in comparisons.items():
        lines += [f"### {table}", "", comparison.to_markdown_table(), ""]
    seconds = sum(result.seconds for result in results)
    lines.append(f"{len(results)} runs, {seconds / 3600:.1f} hours in all.")
    return "\n".join(lines) + "\n"


def _width_text(results: Sequence[RunResult]) -> str:
    widths = sorted({run.config["model_options"]["hidden_size"] for run in results})
    return f"{', '.join(map(str, widths)) or '?'} wide (the paper's 128 is no multiple of 3)"


def _document_lines(comparisons: dict[str, Comparison]) -> list[str]:
    lines = [
        "## Documents",
        "",
        "| data | embedding | train / test | seeds | flat | HSA | gain | paper: flat | paper: HSA "
        "| paper: gain |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for task in DOCUMENTS:
        for embedding in EMBEDDINGS:
            comparison = comparisons.get(document_table(task, embedding))
            if comparison is None or TREE not in comparison.models:
                continue  # its first run is still to come
            splits = comparison.results[0].data.get("splits", {})
            cells = comparison.cells(TREE)
            paper = ["-"] * 3
            if (task, embedding) in _PAPER:
                name, (flat, tree) = _PAPER[task, embedding]
                paper = [f"{flat} ({name})", f"{tree}", f"{tree - flat:+.1f}"]
            lines.append(
                f"| {task} | {embedding} | {splits.get('train', 0):,} / {splits.get('test', 0):,} "
                f"| {cells['seeds']} | {comparison.cells(FLAT)['score']} | {cells['score']} | "
                f"{cells['difference']} | {' | '.join(paper)} |"
            )
    return [
        *lines,
        "",
        _PAPER_ELSEWHERE,
        "",
        "Almost every text of SST-2 is one sentence: its tree is one family, and HSA is flat "
        "attention.",
        "",
    ]


def _course_lines(comparisons: dict[str, Comparison]) -> list[str]:
    """What to expect on the way, and whether a model that ends lower was ever ahead."""
    lines = []
    for table, comparison in comparisons.items():
        courses = {model: _course(comparison, model) for model in (FLAT, TREE)}
        steps = sorted(set(courses[FLAT]) & set(courses[TREE]))
        if steps:
            lines += [
                f"| {table} | step | " + " | ".join(str(step) for step in steps) + " |",
                "|---" * (len(steps) + 2) + "|",
                *(
                    f"| | {model} | " + " | ".join(f"{course[step]:.1f}" for step in steps) + " |"
                    for model, course in courses.items()
                ),
                "",
            ]
    if not lines:
        return []
    return ["## On the way: accuracy on validation texts, mean over seeds", "", *lines]


def _course(comparison: Comparison, model: str) -> dict[int, float]:
    """Validation accuracy in percent by step, where all seeds have one."""
    if model not in comparison.models:
        return {}
    runs = [
        {int(point["step"]): 100 * point["accuracy"] for point in run.validation_curve}
        for run in comparison.runs(model)
    ]
    shared = set.intersection(*(set(run) for run in runs))
    return {step: sum(run[step] for run in runs) / len(runs) for step in shared}


def _record_lines(comparison: Comparison | None, scores: dict[str, dict[int, float]]) -> list[str]:
    if comparison is None:
        return []
    lines = [
        "## Records of an image and a text (COCO18)",
        "",
        "| model | accuracy | gain over flat | macro-F1 | gain over flat |",
        "|---|---|---|---|---|",
    ]
    for row in comparison.rows():
        mine, flat = scores.get(row.model, {}), scores.get(FLAT, {})
        shared = [seed for seed in mine if seed in flat]
        gain = None
        if shared and row.model != FLAT:
            gain = paired([mine[seed] for seed in shared], [flat[seed] for seed in shared])
        lines.append(
            f"| {row.model} | {score_text(comparison, row)} | "
            f"{difference_text(comparison, row.difference)} | {_mean_text(list(mine.values()))} | "
            f"{difference_text(comparison, gain)} |"
        )
    return [*lines, "", _PAPER_RECORDS, ""]


def _tree_lines(comparison: Comparison | None) -> list[str]:
    """The same model on the same words under different trees."""
    if comparison is None or TREE not in comparison.models:
        return []
    lines = [
        "## Does it matter which tree?",
        "",
        f"{comparison.task}, skip-gram vectors, one budget for all.",
        "",
        "| tree | accuracy | HSA on semantic trees is better by |",
        "|---|---|---|",
    ]
    rows = {row.model: row for row in comparison.rows()}
    for model, name in _QUESTIONS.items():
        if model in rows:
            difference = _advantage(comparison, model)
            lines.append(
                f"| {name} | {score_text(comparison, rows[model])} | "
                f"{difference_text(comparison, difference)} |"
            )
    random = _advantage(comparison, RANDOM) if RANDOM in rows else None
    if random is not None:
        lines += ["", _verdict(random)]
    return [*lines, ""]


def _advantage(comparison: Comparison, model: str) -> PairedDifference | None:
    """HSA on semantic trees minus `model`, over the seeds that both have."""
    if model == TREE:
        return None
    tree = {run.seed: run.score for run in comparison.runs(TREE)}
    other = {run.seed: run.score for run in comparison.runs(model)}
    shared = [seed for seed in tree if seed in other]
    return paired([tree[s] for s in shared], [other[s] for s in shared]) if shared else None


def _verdict(random: PairedDifference) -> str:
    if random.count == 1:
        return "With one seed nothing can be said about random trees yet."
    if random.low is None or random.high is None:
        return f"Every seed differs by {random.mean:+.1f} points, so there is no interval."
    if random.low > 0:
        return "Semantic trees are better than random ones of the same shape."
    if random.high < 0:
        return "Random trees of the same shape are better than semantic ones."
    return (
        "Random trees of the same shape are as good as semantic ones, as far as "
        f"{random.count} seeds can tell: the interval of the difference has zero in it."
    )


def _mean_text(values: Sequence[float]) -> str:
    if not values:
        return "-"
    summary = summarise(values)
    spread = summary.standard_deviation
    return f"{summary.mean:.1f}" + ("%" if spread is None else f" ± {spread:.1f} %")

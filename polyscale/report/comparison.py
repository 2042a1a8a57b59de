"""Runs of one task side by side: which model is better, by how much, and how sure that is."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from polyscale._files import write_together
from polyscale.cost.hkt import score_flop_ratio
from polyscale.models import HKTConfig
from polyscale.report.comparability import (
    check_runs,
    differences_between,
    machine_notes,
    missing_seeds,
    notes_on_tests,
)
from polyscale.training.result import RunResult
from polyscale.training.statistics import (
    PairedDifference,
    Summary,
    accuracy_standard_error,
    paired,
    summarise,
)

JSON_NAME, MARKDOWN_NAME, PAGE_NAME = "comparison.json", "comparison.md", "report.html"
FIGURES_NAME = "figures"
FORMAT = 1


@dataclass(frozen=True)
class ModelRow:
    """One model over its seeds. Scores are percent, or bits per token for language tasks."""

    model: str
    name: str  # for people
    seeds: list[int]
    scores: list[float]  # one for each seed
    score: Summary
    difference: PairedDifference | None  # to the baseline, over the seeds both have
    majority_rate: float | None  # percent
    test_standard_error: float | None  # percent points, of one run, from the size of the test set
    levels: int | None
    parameters: int
    flops_per_sample: float
    flop_ratio: float | None  # ratios are to the baseline
    score_flop_ratio: float | None  # of the attention scores, relative to one level
    seconds: float  # mean over the seeds
    seconds_ratio: float | None
    samples_per_second: float


@dataclass(frozen=True)
class Comparison:
    """Models trained under one budget, each with the same seeds.

    >>> results = [read_result(path) for path in Path("runs").rglob("result.json")]
    ... # doctest: +SKIP
    >>> comparison = Comparison.from_results(results)  # doctest: +SKIP
    >>> print(comparison.summary)  # doctest: +SKIP
    >>> comparison.write(Path("report"))  # doctest: +SKIP
    """

    title: str
    results: tuple[RunResult, ...]
    baseline: str | None
    command: str
    notes: tuple[str, ...]  # what a reader must know to judge the figures

    @classmethod
    def from_results(
        cls,
        results: Sequence[RunResult],
        *,
        baseline: str | None = "standard",
        title: str | None = None,
        command: str = "",
        allow_differences: bool = False,
    ) -> Comparison:
        """Group finished runs by model and seed.

        Args:
            results: one for each model and seed, in any order.
            baseline: the model the others are compared with; None for no differences.
            title: of the report; names the models and the task if None.
            command: the command that reproduces these runs.
            allow_differences: whether runs may differ in data and budget; the report then says
                in what. Tasks must always agree.
        """
        if not results:
            raise ValueError("results must hold at least one RunResult, got none")
        models = list(dict.fromkeys(result.model for result in results))
        if baseline is not None and baseline not in models:
            raise ValueError(
                f"baseline must be one of the models compared ({', '.join(models)}) or None, "
                f"got {baseline!r}"
            )
        models.sort(key=lambda model: model != baseline)
        ordered = sorted(results, key=lambda run: (models.index(run.model), run.seed))
        check_runs(ordered)
        differences = list(differences_between(ordered))
        if differences and not allow_differences:
            raise ValueError(
                f"results must have one budget and one data set, but {differences[0]} "
                "(allow_differences=True compares them anyway, and the report says so)"
            )
        if title is None:
            named = [_name(next(r for r in ordered if r.model == model)) for model in models]
            what = _listed(named) if len(named) <= 4 else f"{len(named)} models"
            title = f"{what} on {ordered[0].task}"
        bare = cls(title, tuple(ordered), baseline, command, ())
        notes = [
            *(f"Not the same: {difference}." for difference in differences),
            *missing_seeds(ordered),
            *machine_notes(ordered),
            *notes_on_tests(len(bare.seeds), [d for r in bare.rows() if (d := r.difference)]),
        ]
        return replace(bare, notes=tuple(notes))

    @property
    def models(self) -> list[str]:
        """The baseline, then the others in the order they came in."""
        return list(dict.fromkeys(result.model for result in self.results))

    @property
    def seeds(self) -> list[int]:
        """All seeds of all models."""
        return sorted({result.seed for result in self.results})

    @property
    def task(self) -> str:
        """The task of all runs."""
        return self.results[0].task

    @property
    def is_classification(self) -> bool:
        """Whether scores are accuracies; bits per token otherwise."""
        return self.results[0].metric == "accuracy"

    def runs(self, model: str) -> list[RunResult]:
        """The runs of one model, by seed."""
        return [result for result in self.results if result.model == model]

    def rows(self) -> list[ModelRow]:
        """One row of figures for each model."""
        return list(self._rows)

    @cached_property
    def _rows(self) -> tuple[ModelRow, ...]:
        base = self.runs(self.baseline) if self.baseline is not None else []
        return tuple(_row(self.runs(model), base) for model in self.models)

    @property
    def summary(self) -> str:
        """Sentences on the scores reached and the differences that could be shown."""
        from polyscale.report.tables import summary_of

        return summary_of(self)

    def cells(self, model: str) -> dict[str, str]:
        """The figures of one model as text: `score`, `difference`, `seeds` and `majority`."""
        from polyscale.report.tables import model_cells

        for row in self.rows():
            if row.model == model:
                return model_cells(self, row)
        raise ValueError(f"model must be one of {', '.join(self.models)}, got {model!r}")

    def to_markdown_table(self) -> str:
        """Only the table of all models, as Markdown."""
        from polyscale.report.tables import markdown_table

        return markdown_table(self)

    def as_dict(self) -> dict[str, Any]:
        """Ready for JSON; numbers that are not finite (a diverged training loss) become None."""
        return _finite_only(
            {
                "format": FORMAT,
                "title": self.title,
                "task": self.task,
                "metric": self.results[0].metric,
                "higher_is_better": self.results[0].higher_is_better,
                "baseline": self.baseline,
                "seeds": self.seeds,
                "summary": self.summary,
                "notes": list(self.notes),
                "command": self.command,
                "models": [asdict(row) for row in self.rows()],
                "runs": [result.as_dict() for result in self.results],
            }
        )

    def write(self, output: Path) -> list[Path]:
        """Write comparison.json, comparison.md, report.html and figures/*.svg into a folder.

        All files are written beside their destination first, so that an interruption or a full
        disk leaves earlier files intact. Returns the paths, the page first.
        """
        from polyscale.report.charts import comparison_figures
        from polyscale.report.figures import standalone
        from polyscale.report.html import comparison_page
        from polyscale.report.tables import comparison_markdown

        figures = comparison_figures(self)
        files = {f"{FIGURES_NAME}/{figure.file_name}": standalone(figure.svg) for figure in figures}
        files[MARKDOWN_NAME] = comparison_markdown(self, figures)
        files[JSON_NAME] = json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"
        files[PAGE_NAME] = comparison_page(self, figures)
        write_together({output / name: text for name, text in reversed(files.items())})
        return [output / name for name in reversed(files)]


def _row(runs: list[RunResult], base: list[RunResult]) -> ModelRow:
    first = runs[0]
    scores = {run.seed: run.score for run in runs}
    score = summarise(list(scores.values()))
    difference = flop_ratio = seconds_ratio = None
    seconds = summarise([run.seconds for run in runs]).mean
    if base:
        flop_ratio = _ratio(first.flops_per_sample, base[0].flops_per_sample)
        seconds_ratio = _ratio(seconds, summarise([run.seconds for run in base]).mean)
    base_scores = {run.seed: run.score for run in base}
    shared = [seed for seed in scores if seed in base_scores]
    if shared and first.model != base[0].model:
        difference = paired([scores[s] for s in shared], [base_scores[s] for s in shared])
    size = _test_size(first)
    error = None
    if first.metric == "accuracy" and size is not None:
        error = 100 * accuracy_standard_error(score.mean / 100, size)
    levels = _levels(first)
    majority = [100 * run.majority_rate for run in runs if run.majority_rate is not None]
    return ModelRow(
        model=first.model,
        name=_name(first),
        seeds=list(scores),
        scores=list(scores.values()),
        score=score,
        difference=difference,
        majority_rate=summarise(majority).mean if majority else None,
        test_standard_error=error,
        levels=levels,
        parameters=first.parameters,
        flops_per_sample=first.flops_per_sample,
        flop_ratio=flop_ratio,
        score_flop_ratio=_score_flop_ratio(first, levels),
        seconds=seconds,
        seconds_ratio=seconds_ratio,
        samples_per_second=summarise([run.samples_per_second for run in runs]).mean,
    )


def _ratio(value: float, base: float) -> float | None:
    return value / base if base > 0 else None


def _name(run: RunResult) -> str:
    """The name of the model for readers; a variant keeps its own."""
    if run.model == "hkt" and (levels := _levels(run)) is not None:
        return f"HKT ({levels} levels)"
    return {"standard": "Standard attention", "hkt": "HKT", "hsa": "HSA"}.get(run.model, run.model)


def _levels(run: RunResult) -> int | None:
    if run.level_weights_curve:
        return len(run.level_weights_curve[-1]["weights"][0][0])
    levels = run.model_config.get("levels")
    return levels if isinstance(levels, int) else None


def _score_flop_ratio(run: RunResult, levels: int | None) -> float | None:
    if levels is None:
        return None
    # Saved configurations leave out defaults.
    default = HKTConfig().max_position_embeddings
    return score_flop_ratio(levels, run.model_config.get("max_position_embeddings", default))


def _test_size(run: RunResult) -> int | None:
    splits = run.data.get("splits")
    size = splits.get("test") if isinstance(splits, dict) else None
    return size if isinstance(size, int) and size > 0 else None


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _finite_only(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite_only(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite_only(part) for part in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value

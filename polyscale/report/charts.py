"""The figures of a comparison: curves, level weights, and accuracy by group."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from polyscale.report.comparison import Comparison, ModelRow
from polyscale.report.figures import Band, Curve, GroupPoint, group_chart, level_chart, line_chart
from polyscale.training.result import RunResult
from polyscale.training.statistics import accuracy_standard_error, summarise


class NamedFigure(NamedTuple):
    """A figure and its caption; `section` is where the page shows it."""

    section: str  # "training", "levels" or "groups"
    file_name: str
    title: str
    caption: str
    svg: str


def comparison_figures(comparison: Comparison) -> list[NamedFigure]:
    """Every figure that the runs have the numbers for.

    Points that are not finite (a diverged training loss) are left out of curves; the notes of the
    comparison name such runs.
    """
    return [
        *_curves(comparison),
        *(figure for row in comparison.rows() for figure in _level_figures(comparison, row)),
        *_group_figures(comparison),
    ]


def _curves(comparison: Comparison) -> list[NamedFigure]:
    first = comparison.results[0]
    metric = first.metric
    rate = first.majority_rate
    label = "accuracy" if comparison.is_classification else "bits per token"
    if not all(metric in point for run in comparison.results for point in run.validation_curve):
        metric, label = "loss", "cross-entropy"
    figures = []
    for name, title, y_label, curve_of, percent in (
        (
            "validation",
            f"{label.capitalize()} on validation",
            label,
            lambda run: _points(run.validation_curve, metric),
            metric == "accuracy",
        ),
        (
            "training-loss",
            "Training loss",
            "cross-entropy",
            lambda run: _points(run.train_curve, "loss"),
            False,
        ),
    ):
        curves, bands = _means(comparison, curve_of)
        if curves:
            svg = line_chart(
                curves,
                title=title,
                y_label=y_label,
                percent=percent,
                bands=bands,
                reference=("majority class", rate) if percent and rate is not None else None,
            )
            caption = "Mean over the seeds; the band reaches from the lowest seed to the highest."
            caption = caption if any(bands.values()) else ""
            figures.append(NamedFigure("training", f"{name}.svg", title, caption, svg))
    return figures


def _points(curve: Sequence[dict[str, float]], key: str) -> list[tuple[float, float]]:
    found = [(point["step"], point.get(key)) for point in curve]
    return [(step, y) for step, y in found if y is not None and math.isfinite(y)]


def _means(
    comparison: Comparison, curve_of: Callable[[RunResult], Curve]
) -> tuple[dict[str, Curve], dict[str, Band]]:
    """For each model with points at all: mean, lowest and highest over its seeds, by step."""
    curves: dict[str, Curve] = {}
    bands: dict[str, Band] = {}
    for row in comparison.rows():
        by_step: dict[float, list[float]] = {}
        for run in comparison.runs(row.model):
            for step, value in curve_of(run):
                by_step.setdefault(step, []).append(value)
        if by_step:
            curves[row.name], bands[row.name] = _mean_and_band(by_step)
    return curves, bands


def _mean_and_band(by_step: dict[float, list[float]]) -> tuple[Curve, Band]:
    curve = [(step, summarise(by_step[step]).mean) for step in sorted(by_step)]
    if max(map(len, by_step.values())) == 1:
        return curve, []
    return curve, [(step, min(by_step[step]), max(by_step[step])) for step in sorted(by_step)]


def _level_figures(comparison: Comparison, row: ModelRow) -> list[NamedFigure]:
    """How the levels were weighed, for a model that has more than one."""
    runs = [run for run in comparison.runs(row.model) if run.level_weights_curve]
    if not runs or (row.levels or 1) < 2:
        return []
    by_level: list[dict[float, list[float]]] = [{} for _ in range(row.levels or 0)]
    for run in runs:
        for point in run.level_weights_curve:
            for heads in point["weights"]:
                for head in heads:
                    for level, weight in enumerate(head):
                        by_level[level].setdefault(point["step"], []).append(weight)
    found = [_mean_and_band(by_step) for by_step in by_level]
    names = [f"level {level}" for level in range(len(found))]
    figures = []
    title = f"{row.name}: level weights over training"
    if len(found[0][0]) > 1:
        svg = line_chart(
            {name: curve for name, (curve, _) in zip(names, found, strict=True)},
            title=title,
            y_label="weight",
            bands={name: band for name, (_, band) in zip(names, found, strict=True)},
            levels=True,
        )
        caption = "Mean over heads, layers and seeds; the band holds every single head."
        name = f"level-weights-over-training-{_slug(row.model)}.svg"
        figures.append(NamedFigure("levels", name, title, caption, svg))
    title = f"{row.name}: level weights"
    several = len(runs) > 1
    figures.append(
        NamedFigure(
            "levels",
            f"level-weights-{_slug(row.model)}.svg",
            title,
            "At the end of training" + (", mean over the seeds." if several else "."),
            level_chart(_mean_weights(runs), title=title),
        )
    )
    return figures


def _mean_weights(runs: Sequence[RunResult]) -> list[list[list[float]]]:
    """Layer, head, level: the last weights of every run, averaged."""
    last = [run.level_weights_curve[-1]["weights"] for run in runs]
    return [
        [
            [summarise(weights).mean for weights in zip(*heads, strict=True)]
            for heads in zip(*layers, strict=True)
        ]
        for layers in zip(*last, strict=True)
    ]


def _group_figures(comparison: Comparison) -> list[NamedFigure]:
    groupings = list(dict.fromkeys(name for run in comparison.results for name in run.accuracy_by))
    return [
        figure
        for name in groupings
        if (figure := _group_figure(comparison, name, f"Accuracy by {name}")) is not None
    ]


def _group_figure(comparison: Comparison, grouping: str, title: str) -> NamedFigure | None:
    parts = sorted(
        {
            (part["low"], part["high"])
            for run in comparison.results
            for part in run.accuracy_by.get(grouping, [])
        }
    )
    series = {}
    for row in comparison.rows():
        runs = comparison.runs(row.model)
        points = [_group_point(runs, grouping, low, high) for low, high in parts]
        series[row.name] = [point for point in points if point is not None]
    if not any(series.values()):
        return None
    rate = comparison.results[0].majority_rate
    svg = group_chart(
        series,
        title=title,
        x_label=grouping,
        y_label="accuracy",
        reference=None if rate is None else ("majority class", rate),
    )
    counts = {len(row.seeds) > 1 for row in comparison.rows()}
    of_seeds = "one standard deviation over the seeds" if True in counts else ""
    of_group = "the binomial standard error of the group" if False in counts else ""
    between = ", or, for one seed, " if len(counts) == 2 else ""
    caption = f"On the test set; error bars are {of_seeds}{between}{of_group}."
    return NamedFigure("groups", f"accuracy-by-{_slug(grouping)}.svg", title, caption, svg)


def _group_point(
    runs: Sequence[RunResult], grouping: str, low: float, high: float
) -> GroupPoint | None:
    found = [
        part
        for run in runs
        for part in run.accuracy_by.get(grouping, [])
        if (part["low"], part["high"]) == (low, high) and part["count"] > 0
    ]
    if not found:
        return None
    accuracy = summarise([part["accuracy"] for part in found])
    error = accuracy.standard_deviation
    if error is None:
        error = accuracy_standard_error(accuracy.mean, int(found[0]["count"]))
    label = f"{low:g}" if low == high else f"{low:g} to {high:g}"
    return GroupPoint(label, accuracy.mean, error)


def _slug(name: str) -> str:
    return re.sub(r"\W+", "-", name.lower()).strip("-")

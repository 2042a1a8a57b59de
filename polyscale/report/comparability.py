"""Which runs can be compared, and what a reader must know about them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

from polyscale.training.result import RunResult
from polyscale.training.statistics import PairedDifference, smallest_wilcoxon_p

# What runs of one comparison may differ in; the rest of a configuration is the task, the data and
# the budget. Models may differ in their attention, but not in the options of their body.
_OF_THE_RUN = ("seed",)
_OF_THE_MODEL = ("seed", "model", "name", "model_options")
_BODY = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "dropout",
    "positions",
    "pooling",
)


def check_runs(results: Sequence[RunResult]) -> None:
    """Raise unless these are single runs of one task, each with a score."""
    seen = set()
    first = results[0]
    for run in results:
        label = f"{run.model}, seed {run.seed}"
        if (run.model, run.seed) in seen:
            raise ValueError(
                f"results must hold one run for each model and seed, got two of {label}"
            )
        seen.add((run.model, run.seed))
        for name in ("task", "kind"):
            if getattr(run, name) != getattr(first, name):
                raise ValueError(
                    f"results must be runs of one task, but {name} is {getattr(first, name)!r} in "
                    f"{first.model}, seed {first.seed} and {getattr(run, name)!r} in {label}"
                )
        if not math.isfinite(run.score):
            raise ValueError(
                f"results must have a finite {run.metric} on the test set, "
                f"got {run.score} in {label}: it diverged"
            )


def differences_between(results: Sequence[RunResult]) -> Iterator[str]:
    """Differences of runs beyond model and seed, in words; at most one for each run."""
    first = results[0]
    of_model: dict[str, RunResult] = {}
    of_seed: dict[int, RunResult] = {}
    for run in results:
        same_model = of_model.setdefault(run.model, run)
        same_seed = of_seed.setdefault(run.seed, run)
        found = (
            _difference("config", first, run, _budget(first), _budget(run))
            or _difference("config.model_options", first, run, *_bodies(first, run))
            or _difference("config", same_model, run, _all_but_seed(same_model), _all_but_seed(run))
            or _difference("data", same_seed, run, same_seed.data, run.data)
        )
        if found is not None:
            yield found


def _difference(
    part: str, one: RunResult, other: RunResult, of_one: dict[str, Any], of_other: dict[str, Any]
) -> str | None:
    left, right = dict(_flat(of_one)), dict(_flat(of_other))
    for path in sorted({*left, *right}):
        if left.get(path) != right.get(path):
            return (
                f"{part}.{path} is {left.get(path)!r} in {one.model}, seed {one.seed} "
                f"and {right.get(path)!r} in {other.model}, seed {other.seed}"
            )
    return None


def _budget(run: RunResult) -> dict[str, Any]:
    budget = {name: value for name, value in run.config.items() if name not in _OF_THE_MODEL}
    # Only HKT has filters, so their rate belongs to the model, not to the budget.
    training = {**budget.get("training", {}), "filter_rate": None}
    return {**budget, "training": training}


def _all_but_seed(run: RunResult) -> dict[str, Any]:
    rest = {name: value for name, value in run.config.items() if name not in _OF_THE_RUN}
    # Runs made before this option existed do not name it.
    return {**rest, "training": {"filter_rate": 1.0, **rest.get("training", {})}}


def _bodies(one: RunResult, other: RunResult) -> tuple[dict[str, Any], dict[str, Any]]:
    options = [run.config.get("model_options", {}) for run in (one, other)]
    shared = [name for name in _BODY if all(name in of for of in options)]
    return {n: options[0][n] for n in shared}, {n: options[1][n] for n in shared}


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _flat(part, f"{path}.{key}" if path else str(key))
    else:
        yield path, list(value) if isinstance(value, tuple) else value


def missing_seeds(results: Sequence[RunResult]) -> list[str]:
    """A note for models that lack seeds others have."""
    every = {run.seed for run in results}
    lacking: dict[tuple[int, ...], list[str]] = {}
    for model in dict.fromkeys(run.model for run in results):
        missing = sorted(every - {run.seed for run in results if run.model == model})
        if missing:
            lacking.setdefault(tuple(missing), []).append(model)
    return [
        f"Without seed{'s' * (len(missing) > 1)} {', '.join(map(str, missing))}: "
        f"{', '.join(models)}. Differences use the seeds that both models have."
        for missing, models in lacking.items()
    ]


def machine_notes(results: Sequence[RunResult]) -> list[str]:
    """Why times, versions or lengths of runs cannot be compared."""
    notes = []
    if len({(run.device, run.processes, run.threads) for run in results}) > 1:
        notes.append("Runs used different devices, processes or threads: do not compare times.")
    for what, values in (
        ("versions of packages", {json.dumps(run.versions, sort_keys=True) for run in results}),
        ("commits", {run.git_commit for run in results}),
    ):
        if len(values) > 1:
            notes.append(f"Runs were made with different {what}; comparison.json has them.")
    if len({run.steps for run in results}) > 1:
        notes.append("Runs stopped after different numbers of steps (early stopping).")
    diverged = [
        f"{run.model}, seed {run.seed}"
        for run in results
        if any(not _is_finite(point["loss"]) for point in run.train_curve)
    ]
    if diverged:
        notes.append(f"The training loss was not finite in {'; '.join(diverged)}.")
    return notes


def _is_finite(number: float | None) -> bool:
    return number is not None and math.isfinite(number)


def notes_on_tests(seeds: int, found: Sequence[PairedDifference]) -> list[str]:
    """What the tests can and cannot show with this many seeds and models."""
    notes = []
    if seeds == 1:
        notes.append(
            "One seed: a demonstration, not a benchmark. Another seed would give other figures, "
            "so there are no intervals and no tests."
        )
    tested = [difference for difference in found if difference.count > 1]
    fewest = min((difference.count for difference in tested), default=0)
    if fewest and smallest_wilcoxon_p(fewest) > 0.05:
        notes.append(
            f"With {fewest} seeds Wilcoxon's test cannot give a p-value below "
            f"{smallest_wilcoxon_p(fewest):g}, however clear the difference; it takes 6 seeds "
            "to get below 0.05. The t interval assumes that differences are normally distributed."
        )
    if len(tested) > 1:
        notes.append(
            f"{len(tested)} models are tested against one baseline without correction for multiple "
            "tests: one 95 % interval in twenty excludes zero by chance."
        )
    return notes

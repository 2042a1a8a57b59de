"""Two or more runs of one task side by side: what a report shows and results.json holds."""

from __future__ import annotations

import json
import platform
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import polyscale
from polyscale.training.classification import TrainingResult


@dataclass(frozen=True)
class Comparison:
    """Runs under one budget, with what is needed to make them again."""

    title: str
    results: tuple[TrainingResult, ...]
    score_flop_ratios: tuple[float, ...]  # one for each result; 1 is standard attention
    data: dict[str, Any]
    example: str  # one test sample with its answer
    seed: int
    command: str
    versions: dict[str, str]

    def __post_init__(self) -> None:
        if not self.results:
            raise ValueError("results takes at least one TrainingResult, got none")
        if len(self.score_flop_ratios) != len(self.results):
            raise ValueError(
                f"score_flop_ratios takes one number for each of {len(self.results)} results, "
                f"got {len(self.score_flop_ratios)}"
            )

    @property
    def summary(self) -> str:
        """One sentence: who reached what, and what no learning at all would give."""
        first, *others = self.results
        rest = "".join(f", {other.name} {other.test_accuracy:.1%}" for other in others)
        return (
            f"{first.name} answers {first.test_accuracy:.1%} of unseen expressions correctly"
            f"{rest}; always giving the most frequent class would score {first.majority_rate:.1%}."
        )

    def rows(self) -> list[tuple[str, list[str]]]:
        """The table: a label, and a cell for each result."""
        results = self.results
        return [
            ("Test accuracy", [f"{result.test_accuracy:.1%}" for result in results]),
            ("Majority-class rate", [f"{result.majority_rate:.1%}" for result in results]),
            ("Parameters", [f"{result.parameters:,}" for result in results]),
            ("Samples per second", [f"{result.samples_per_second:,.0f}" for result in results]),
            ("Attention score FLOPs", [f"{ratio:.3f} x" for ratio in self.score_flop_ratios]),
        ]

    def as_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "summary": self.summary,
            "seed": self.seed,
            "command": self.command,
            "versions": self.versions,
            "data": self.data,
            "results": [
                {**result.as_dict(), "score_flop_ratio": ratio}
                for result, ratio in zip(self.results, self.score_flop_ratios, strict=True)
            ],
        }

    def write_json(self, path: Path) -> None:
        # allow_nan=False: a diverged run must not become a file that JSON readers reject.
        text = json.dumps(self.as_dict(), indent=2, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")


def installed_versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the figures."""
    versions = {"python": platform.python_version(), "polyscale": polyscale.__version__}
    for package in ("torch", "transformers", "accelerate", "numpy"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "not installed"
    return versions

"""HSA trained from scratch: documents as trees, records of images and texts, and other trees."""

from __future__ import annotations

from pathlib import Path

from polyscale.training.compare import PlannedRun
from reproduction.hsa.plan import PRESETS, plan_hsa
from reproduction.hsa.tables import write_tables
from reproduction.training import TrainingStudy


class HSAStudy(TrainingStudy):
    """HSA against flat attention and none, on documents and on records."""

    name = "hsa"
    presets = PRESETS

    def plan(self, preset: str) -> list[PlannedRun]:
        """All runs, IMDB first."""
        return plan_hsa(self.sizes(preset))

    def write_tables(self, output: Path, *, preset: str, data_dir: Path | None = None) -> None:
        """A comparison for each table, the paper's tables with ours beside them, macro-F1."""
        write_tables(output, command=self.command(preset), data_dir=data_dir)


STUDY = HSAStudy()

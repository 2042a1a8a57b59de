"""HKT against standard attention at equal budgets, with ablations."""

from __future__ import annotations

from pathlib import Path

from polyscale.training.compare import PlannedRun
from reproduction.hkt.plan import PRESETS, plan_hkt
from reproduction.hkt.tables import write_tables
from reproduction.training import TrainingStudy


class HKTStudy(TrainingStudy):
    """The table of the HKT paper and its ablations."""

    name = "hkt"
    presets = PRESETS

    def plan(self, preset: str) -> list[PlannedRun]:
        """The paired seeds of the three tasks first, then the ablations."""
        return plan_hkt(self.sizes(preset))

    def write_tables(self, output: Path, *, preset: str, data_dir: Path | None = None) -> None:
        """A comparison for each task, and the paper's table with ours beside it."""
        write_tables(output, command=self.command(preset))


STUDY = HKTStudy()

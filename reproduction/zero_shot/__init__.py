"""HSA in a pretrained model without training: what it costs in accuracy, what it saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from reproduction.measuring import Measurement, MeasuringStudy
from reproduction.records import Records
from reproduction.zero_shot.classify import task_units
from reproduction.zero_shot.embeddings import embedding_units
from reproduction.zero_shot.lab import Lab
from reproduction.zero_shot.presets import PRESETS, Preset
from reproduction.zero_shot.pretrained import Pretrained, pretrained_model
from reproduction.zero_shot.tables import write_tables
from reproduction.zero_shot.timing import timing_units

__all__ = ["STUDY", "ZeroShotStudy"]


class ZeroShotStudy(MeasuringStudy):
    """Every hierarchy in every set of layers of a fine-tuned classifier, with no training.

    Fine-tuned weights are in `models` below the folder of the results; fine-tuning resumes from its
    last checkpoint.

    Args:
        model: a folder or a name on the Hub; None for all-MiniLM-L6-v2 (`pretrained_model`).
        presets: sizes by name.
        redo: see `MeasuringStudy`.
        announce: see `MeasuringStudy`.

    >>> ZeroShotStudy().reproduce("tiny", Path("out"), data_dir=Path("data"))  # doctest: +SKIP
    """

    name = "hsa-zero-shot"
    format = "polyscale.zero-shot"

    def __init__(
        self,
        model: str | None = None,
        presets: Mapping[str, Preset] = PRESETS,
        *,
        redo: Sequence[str] = (),
        announce: Callable[[str], None] = print,
    ) -> None:
        super().__init__(redo=redo, announce=announce)
        self.model = model
        self.presets = presets

    @cached_property
    def source(self) -> Pretrained:
        """Where the model comes from."""
        return pretrained_model(self.model)

    def plan(self, preset: str) -> list[Measurement]:
        """All measurements; timing comes last, because it needs an otherwise idle machine."""
        return all_units(self.sizes(preset), self.source.layers())

    def head(self, preset: str) -> dict[str, Any]:
        """Model, seed and sizes."""
        sizes: Preset = self.sizes(preset)
        return {"model": self.source.name, "seed": self.seed, "preset": sizes.as_dict()}

    def workspace(self, preset: str, output: Path, records: Records, data_dir: Path | None) -> Lab:
        """The model, the texts and the fine-tuned weights."""
        return Lab(self.sizes(preset), self.source, records, output, data_dir, self.seed)

    def write_tables(self, output: Path, *, preset: str, data_dir: Path | None = None) -> None:
        """RESULTS.md and figures; the preset is that of the records."""
        write_tables(Records.read(output, self.format))

    def describe(self, values: dict[str, Any]) -> str:
        """Accuracy and points lost, or why a setting was refused."""
        if "refused" in values:
            return f"refused: {values['refused']}"
        if "lost" in values:
            return f"{values['accuracy']:.2f} %, {values['lost']:.2f} points lost"
        return "done"


def all_units(preset: Preset, layers: int) -> list[Measurement]:
    """The measurements of a model with so many attention layers."""
    return [
        *(unit for size in preset.tasks for unit in task_units(preset, size, layers)),
        *embedding_units(preset, layers),
        *timing_units(preset),
    ]


STUDY = ZeroShotStudy()

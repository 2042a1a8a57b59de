"""Long documents with a structure: does a tree of sections, paragraphs and sentences pay?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polyscale.data.files import find_folder
from reproduction.documents.measures import Desk, units
from reproduction.documents.presets import PRESETS
from reproduction.documents.tables import write_tables
from reproduction.measuring import Measurement, MeasuringStudy
from reproduction.records import Records
from reproduction.zero_shot.pretrained import pretrained_model

__all__ = ["STUDY", "DocumentStudy"]


class DocumentStudy(MeasuringStudy):
    """Classifiers on frozen sentence vectors with and without a tree, and simple baselines.

    Settings are chosen on validation documents, two tries a row; vectors are in `vectors` below
    the folder of the results.
    """

    name = "documents"
    format = "polyscale.documents"
    presets = PRESETS

    def plan(self, preset: str) -> list[Measurement]:
        """Vectors, then all tries, then the test figures, task by task."""
        return units(self.sizes(preset))

    def head(self, preset: str) -> dict[str, Any]:
        """Encoder, seed and sizes."""
        sizes = self.sizes(preset).as_dict()
        return {"model": pretrained_model().name, "seed": self.seed, "preset": _plain(sizes)}

    def workspace(self, preset: str, output: Path, records: Records, data_dir: Path | None) -> Desk:
        """The documents and vectors of a task at a time."""
        folder = find_folder(data_dir)
        if folder is None:
            raise FileNotFoundError("data_dir must be a folder with enwik8, got None")
        return Desk(self.sizes(preset), records, output, folder, self.seed)

    def write_tables(self, output: Path, *, preset: str, data_dir: Path | None = None) -> None:
        """RESULTS.md; the preset is that of the records."""
        write_tables(Records.read(output, self.format))

    def describe(self, values: dict[str, Any]) -> str:
        """Accuracy on the documents of a part."""
        return f"{100 * values['accuracy']:.2f} %" if "accuracy" in values else "done"


def _plain(sizes: dict[str, Any]) -> dict[str, Any]:
    """As JSON reads it back."""
    return {k: list(v) if isinstance(v, tuple) else v for k, v in sizes.items()}


STUDY = DocumentStudy()

"""What all analyses share: the dict they fill, its `meta` section and its notes."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyscale.analysis.schema import FORMAT, Analysis, check_schema
from polyscale.analysis.summary import summary_sentences
from polyscale.analysis.values import as_json

SHOWN_TOKENS = 128

SCORES_NOTE = (
    "Scores are taken before the mask, so the kernel and symmetry parts are about all pairs of "
    "tokens, also those that the mask of a causal model hides."
)
NORMALITY_NOTE = (
    "Normality: the points are the rows of a head's scores on their leading principal components. "
    "Rows of one sequence are not independent, so p-values describe rather than decide."
)


class AnalysisBuilder:
    """Collects `meta` and the notes of one analysis; `build` adds the sections."""

    def __init__(self, kind: str, model: str, title: str | None) -> None:
        self.start = time.perf_counter()
        self.notes: list[str] = []
        self.meta: dict[str, Any] = {"title": title or f"Analysis of {model}", "model": model}
        self.meta |= {"kind": kind, "layers": 0, "heads": 0, "levels": None, "tokens": None}
        self.meta |= {"text": None, "length": 0, "rows_used": 0}

    def note_once(self, note: str) -> None:
        """Add a note unless it is there already."""
        if note not in self.notes:
            self.notes.append(note)

    def set_example(
        self, length: int, tokens: Sequence[str] | None, text: str | None, real: Tensor | None
    ) -> None:
        """The example shown.

        `tokens` names all its columns, of which `real` tells padding from tokens, or its tokens
        without padding.
        """
        names = None
        if tokens is not None:
            names = [str(token) for token in tokens]
            if real is not None and len(names) == len(real):
                names = [name for name, kept in zip(names, real.tolist(), strict=True) if kept]
            if len(names) < length:
                raise ValueError(
                    f"tokens must name each of the {length} tokens of the example, "
                    f"got {len(tokens)}"
                )
            names = names[:length]
        if names is not None and length > SHOWN_TOKENS:
            self.notes.append(f"Tokens are not listed: {length} are more than {SHOWN_TOKENS}.")
            names = None
        self.meta |= {"length": length, "tokens": names, "text": text}

    def build(self, sections: dict[str, Any]) -> Analysis:
        """The whole analysis as plain values, with its summary."""
        from polyscale import __version__

        self.meta["versions"] = {"polyscale": __version__, "torch": torch.__version__}
        transformers = sys.modules.get("transformers")
        if transformers is not None:
            self.meta["versions"]["transformers"] = transformers.__version__
        self.meta["notes"] = self.notes
        self.meta["seconds"] = time.perf_counter() - self.start
        analysis: Analysis = as_json(
            {"format": FORMAT, "meta": self.meta, "summary": [], **sections}
        )
        check_schema(analysis)
        analysis["summary"] = summary_sentences(analysis)
        return analysis

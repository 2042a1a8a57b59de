"""What all analyses share: the head of the dict, and its end."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyscale.theory.plain import plain
from polyscale.theory.summary import summary

FORMAT = 1
SHOWN_TOKENS = 128

SCORES_NOTE = (
    "Scores are taken before the mask, so the kernel and symmetry parts are about all pairs of "
    "tokens, also those that a causal model never lets meet."
)
NORMALITY_NOTE = (
    "Normality: the points are the rows of a head's scores on their leading principal components. "
    "Rows of one sequence are not independent, so p-values describe rather than decide."
)


class Frame:
    """An analysis that is being gathered."""

    def __init__(self, kind: str, model: str, title: str | None) -> None:
        self.start = time.perf_counter()
        self.notes: list[str] = []
        self.meta: dict[str, Any] = {"title": title or f"Analysis of {model}", "model": model}
        self.meta |= {"kind": kind, "layers": 0, "heads": 0, "levels": None, "tokens": None}
        self.meta |= {"text": None, "length": 0, "rows_used": 0}

    def example(
        self, length: int, tokens: Sequence[str] | None, text: str | None, real: Tensor | None
    ) -> None:
        """The example shown: its tokens by column (`real` says which are not padding) or alone."""
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

    def finish(self, sections: dict[str, Any]) -> dict[str, Any]:
        """The whole analysis as plain numbers."""
        from polyscale import __version__

        self.meta["versions"] = {"polyscale": __version__, "torch": torch.__version__}
        transformers = sys.modules.get("transformers")
        if transformers is not None:
            self.meta["versions"]["transformers"] = transformers.__version__
        self.meta["notes"] = self.notes
        self.meta["seconds"] = time.perf_counter() - self.start
        analysis = plain({"format": FORMAT, "meta": self.meta, "summary": [], **sections})
        analysis["summary"] = summary(analysis)
        return analysis

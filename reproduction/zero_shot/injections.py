"""What is injected: layers, hierarchy, tie and sinks as data with a name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from polyscale.inject import HSASettings, attention_flops, inject_hsa
from polyscale.inject.api import sentence_end_ids
from polyscale.inject.settings import SENTENCES
from reproduction.zero_shot.flops_plan import FlopsPlan

GONE = (
    "opening the heaviest nodes of fixed trees has been removed; polyscale.inject_opened opens "
    "attention where the queries look"
)
EDGES = (0, -1)  # the first and the last token of a text: [CLS] and [SEP]


@dataclass(frozen=True)
class Injection:
    """Layers (counted from 0) and how they are injected.

    >>> Injection((3, 5), (2, 4, 8, 16), "blocks").name
    '2,4,8,16 blocks, sinks, layers 3 5'
    """

    layers: tuple[int, ...]
    hierarchy: tuple[int, ...] | str
    tie: str
    sinks: tuple[int, ...] = EDGES
    sink_ids: tuple[int, ...] = ()
    open_blocks: int = 0  # of records from when layers could open blocks; names them

    @property
    def kind(self) -> str:
        """A short name of everything but the layers."""
        tree = self.hierarchy if isinstance(self.hierarchy, str) else _join(self.hierarchy, ",")
        sinks = "no sinks" if not self.sinks else "sinks"
        if self.sinks not in ((), EDGES):
            sinks = f"sinks at {_join(self.sinks)}"
        if self.sink_ids:
            sinks += f" and ids {_join(self.sink_ids)}"
        opened = f", {self.open_blocks} opened" if self.open_blocks else ""
        return f"{tree} {self.tie}, {sinks}{opened}"

    @property
    def name(self) -> str:
        return f"{self.kind}, layers {_join(self.layers)}"

    def apply(
        self, model: PreTrainedModel, tokenizer: Any, dropout: str = "refuse"
    ) -> PreTrainedModel:
        """Inject into a model, in place."""
        if self.open_blocks:
            raise ValueError(f"open_blocks must be 0, got {self.open_blocks}; {GONE}")
        return inject_hsa(
            model,
            self.layers,
            self.hierarchy,
            self.tie,
            self.sinks,
            sink_ids=self.sink_ids,
            tokenizer=tokenizer if self.hierarchy == SENTENCES else None,
            dropout=dropout,
        )

    def settings(self, tokenizer: Any) -> HSASettings:
        """The settings of the injected layers."""
        return HSASettings(
            self.hierarchy,
            self.tie,
            self.sinks,
            self.sink_ids,
            sentence_ends=sentence_end_ids(tokenizer) if self.hierarchy == SENTENCES else (),
        )

    def saved_at(self, length: int, heads: int, width: int) -> float | None:
        """The share of a replaced layer's attention FLOPs that is saved for texts of a length.

        None for sentences, and for sinks by their ids: their cost depends on the text.
        """
        if isinstance(self.hierarchy, str) or self.sink_ids or self.open_blocks:
            return None
        after = attention_flops(
            length,
            heads,
            width,
            self.hierarchy,
            self.tie,
            sinks=len(self.sinks),
        )
        return 1 - after.total / attention_flops(length, heads, width).total

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-compatible data."""
        hierarchy = self.hierarchy if isinstance(self.hierarchy, str) else list(self.hierarchy)
        return {
            "layers": list(self.layers),
            "hierarchy": hierarchy,
            "tie": self.tie,
            "sinks": list(self.sinks),
            "sink_ids": list(self.sink_ids),
            "open_blocks": self.open_blocks,
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Injection:
        """Undo `as_dict`."""
        fields: dict[str, Any] = {
            name: tuple(part) if isinstance(part, list) else part for name, part in data.items()
        }
        return cls(**fields)

    @classmethod
    def from_plan(cls, plan: FlopsPlan) -> Injection:
        """The injection that a plan proposes."""
        return cls(plan.layers, plan.hierarchy, plan.tie, plan.sinks, plan.sink_ids)


def layer_sets(count: int) -> dict[str, tuple[int, ...]]:
    """Return the sets of layers that are tried, counted from 0, by name.

    "alternate 4" starts at the fourth layer and takes every other one; "consecutive 4" takes the
    same number of consecutive layers. A set is listed once.

    >>> layer_sets(6)["alternate 4"], layer_sets(6)["consecutive 4"]
    ((3, 5), (3, 4))
    """
    found: dict[str, tuple[int, ...]] = {}
    for start in range(count):
        alternate = tuple(range(start, count, 2))
        found[f"alternate {start + 1}"] = alternate
        if len(alternate) > 1:
            found[f"consecutive {start + 1}"] = tuple(range(start, start + len(alternate)))
    if tuple(range(count)) not in found.values():
        found["all"] = tuple(range(count))
    return found


def _join(numbers: tuple[int, ...], by: str = " ") -> str:
    return by.join(str(number) for number in numbers)

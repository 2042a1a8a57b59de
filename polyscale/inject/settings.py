"""What an injected layer is told: its hierarchy, its tie, its sinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from polyscale.trees import SignalTree

TIES = ("columns", "blocks")
SINK_QUERIES = ("exact", "tied")
DROPOUTS = ("refuse", "off")
SENTENCES = "sentences"

Hierarchy = tuple[int, ...] | str | SignalTree


@dataclass(frozen=True)
class HSASettings:
    """The settings of the injected layers of a model.

    `sinks` are positions among the real tokens, negative ones from the end; `sink_ids` and
    `sentence_ends` are token ids.

    >>> HSASettings(hierarchy=(16, 16), tie="columns", sinks=(0, -1)).as_dict()["hierarchy"]
    [16, 16]
    """

    hierarchy: Hierarchy
    tie: str = "columns"
    sinks: tuple[int, ...] = ()
    sink_ids: tuple[int, ...] = ()
    sink_queries: str = "exact"
    sentence_ends: tuple[int, ...] = ()
    dropout: str = "refuse"

    def __post_init__(self) -> None:
        object.__setattr__(self, "hierarchy", check_hierarchy(self.hierarchy))
        _check_choice("tie", self.tie, TIES)
        _check_choice("sink_queries", self.sink_queries, SINK_QUERIES)
        _check_choice("dropout", self.dropout, DROPOUTS)
        for name in ("sinks", "sink_ids", "sentence_ends"):
            object.__setattr__(self, name, whole_numbers(name, getattr(self, name)))
        for name in ("sink_ids", "sentence_ends"):
            if any(number < 0 for number in getattr(self, name)):
                raise ValueError(f"{name} must be token ids, 0 or more, got {getattr(self, name)}")
        if self.hierarchy == SENTENCES and not self.sentence_ends:
            raise ValueError(
                'hierarchy="sentences" needs to know which tokens end a sentence: pass '
                "tokenizer=... or sentence_ends=(ids...)"
            )
        if isinstance(self.hierarchy, SignalTree) and (self.sinks or self.sink_ids):
            raise ValueError(
                "sinks: a given SignalTree says itself where every token hangs; pass sinks=None "
                "or put the leaves under the root of the tree"
            )

    @property
    def needs_tokens(self) -> bool:
        """Whether the structure depends on the token ids, not on their number alone."""
        return self.hierarchy == SENTENCES or bool(self.sink_ids)

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON; a given tree has to be saved on its own."""
        hierarchy: Any = self.hierarchy
        if isinstance(hierarchy, SignalTree):
            raise ValueError("hierarchy: a SignalTree is not plain data; save it with tree.save")
        return {
            "hierarchy": hierarchy if isinstance(hierarchy, str) else list(hierarchy),
            "tie": self.tie,
            "sinks": list(self.sinks),
            "sink_ids": list(self.sink_ids),
            "sink_queries": self.sink_queries,
            "sentence_ends": list(self.sentence_ends),
            "dropout": self.dropout,
        }


def check_hierarchy(hierarchy: Any) -> Hierarchy:
    """Return windows as a tuple of whole numbers, anything else as it is; refuse the rest."""
    expected = 'windows such as (2, 4, 8, 16), "sentences", or a SignalTree'
    if isinstance(hierarchy, SignalTree):
        return hierarchy
    if isinstance(hierarchy, str):
        if hierarchy != SENTENCES:
            raise ValueError(f"hierarchy must be {expected}, got {hierarchy!r}")
        return hierarchy
    if not isinstance(hierarchy, Sequence):
        raise TypeError(f"hierarchy must be {expected}, got {type(hierarchy).__name__}")
    windows = whole_numbers("hierarchy", hierarchy)
    if any(window < 2 for window in windows):
        raise ValueError(f"hierarchy must be windows of 2 or more, got {hierarchy!r}")
    return windows


def whole_numbers(name: str, values: Any) -> tuple[int, ...]:
    """Return a sequence of whole numbers as a tuple; refuse anything else."""
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise TypeError(f"{name} must be a sequence of whole numbers, got {values!r}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name} must be whole numbers, got {value!r} among {values!r}")
    return tuple(values)


def _check_choice(name: str, got: Any, choices: tuple[str, ...]) -> None:
    if got not in choices:
        expected = " or ".join(f'"{choice}"' for choice in choices)
        raise ValueError(f"{name} must be {expected}, got {got!r}")

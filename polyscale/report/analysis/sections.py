"""The sections of the page: their titles, how to read them, and when they are shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Section:
    """One section: `name` is its key in the analysis and its anchor on the page."""

    name: str
    title: str
    text: str
    has_data: Callable[[Any], bool]


def _has_items(value: Any) -> bool:
    return isinstance(value, list) and len(value) > 0


def _has_any(*keys: str) -> Callable[[Any], bool]:
    def check(value: Any) -> bool:
        return isinstance(value, dict) and any(value.get(key) for key in keys)

    return check


def _has_weights(value: Any) -> bool:
    """Whether there is more than one level: the weight of a single one is always 1."""
    weights = value.get("weights") if isinstance(value, dict) else None
    return bool(weights and weights[0] and weights[0][0] and len(weights[0][0]) > 1)


SECTIONS: tuple[Section, ...] = (
    Section(
        "attention",
        "Attention",
        "Each row is a query, each column a key; the darker a cell (brighter on a dark page), the "
        "more the query attends to that key. Where there are levels, level 0 sees every position, "
        "each further level half as many, and “merged” is the attention the model uses.",
        _has_items,
    ),
    Section(
        "levels",
        "What the levels are worth",
        "The scores of a head are a learned, convex mix of levels, so every bar adds up to 100 %. "
        "A long first part means the head mostly works at full resolution, as standard attention "
        "does; click a bar to choose its layer or head.",
        _has_weights,
    ),
    Section(
        "kernel",
        "Kernel: are the scores a similarity?",
        "The symmetric part of a head's scores is a kernel if none of its eigenvalues is negative "
        "(the PSD condition). Blue eigenvalues agree with that, orange ones break it; the margin "
        "is how far the smallest one is on the good or the bad side.",
        _has_any("forms", "scores"),
    ),
    Section(
        "symmetry",
        "Symmetry: similarity and direction",
        "Every score matrix is the sum of a reciprocal part (i sees j as j sees i) and a "
        "directional part (one sees the other). In the maps blue is positive, orange negative; "
        "the directional map changes sign across its diagonal.",
        _has_any("parts", "maps"),
    ),
    Section(
        "error",
        "Error: how far from flat attention",
        "The KL divergence from flat attention (only level 0) splits exactly in three: what is "
        "lost inside blocks (resolution), how far coarse scores move (drift), and a non-Gaussian "
        "rest, which may be negative. The tail is what all levels from there on can still change.",
        _has_any("rows", "tail", "decay"),
    ),
    Section(
        "normality",
        "Normality of the scores",
        "Mardia's tests ask whether the scores look like a multivariate normal sample: points on "
        "the dashed line do, points leaving it upwards have heavier tails. “Not normal” means that "
        "one of the two p-values is below 0.025, which makes the pair a test at 5 %.",
        _has_any("levels", "over_training"),
    ),
    Section(
        "cost",
        "Cost",
        "Counted work and memory of the attention, level by level, beside standard attention on "
        "the same sequence.",
        _has_any("levels", "standard"),
    ),
    Section(
        "hsa",
        "The tree: where it loses",
        "Hierarchical attention gives one shared weight to whole blocks of leaves; each family of "
        "siblings adds its share to the KL divergence from flat softmax. Families with a high KL "
        "are those where a finer tree would help most.",
        _has_any("layers"),
    ),
)


def present_sections(analysis: Mapping[str, Any]) -> list[Section]:
    """The sections that have something to show, in the order of the page."""
    return [section for section in SECTIONS if section.has_data(analysis.get(section.name))]

"""The analysis of HKT models: kernel, symmetry, error, normality, cost and attention maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyscale.analysis.builder import NORMALITY_NOTE, SCORES_NOTE, AnalysisBuilder
from polyscale.analysis.entries import (
    NORMALITY_ROWS,
    Entry,
    eigen_rows,
    error_rows,
    form_entry,
    normality_entries,
    query_rows,
    score_entries,
    symmetry_entries,
    tail_entries,
)
from polyscale.analysis.maps import MapCollection
from polyscale.analysis.recording import capture, real_columns
from polyscale.analysis.schema import Analysis
from polyscale.checks import check_integer
from polyscale.cost.hkt import attention_cost
from polyscale.layers.hkt import HKTAttention
from polyscale.theory.kernel import bilinear_forms
from polyscale.theory.levels import LEVELS, LevelScores, level_scores, upsample

PAIRS = 1024 * 1024  # of tokens, in all examples together

FORMS_NOTE = (
    "Eigenvalues of M_s = (M + M^T) / 2 with M = W_Q W_K^T, not scaled by 1 / sqrt(D); those not "
    "listed are 0. fraction_negative is over the eigenvalues that are not 0, negative_share weighs "
    "them by absolute value. A head with independent query and key weights and d_model >= 2 D has "
    "exactly as many negative as positive ones. *_with_bias: the form that decides where "
    "projections have biases."
)


def analyze_hkt(
    model: nn.Module,
    batch: Any,
    *,
    tokens: Sequence[str] | None = None,
    text: str | None = None,
    title: str | None = None,
    example: int = 0,
    examples: int = 8,
    max_length: int = 1024,
    levels: int = LEVELS,
    maps: bool = True,
) -> Analysis:
    """Kernel, symmetry, error, normality, cost and attention maps of an HKT model on a batch.

    The model runs once; the scores are recomputed in float64 from the inputs of its layers.

    Args:
        model: any module with `HKTAttention` layers, or one such layer.
        batch: what the model takes: a tensor, a tuple of arguments, or a dict of named ones.
        tokens: names of the shown example's tokens, padding left out or not.
        text: the text of the shown example.
        title: of the report.
        example: the entry of the batch that is shown, and that the kernel section is about.
        examples: at most this many entries, from `example` on, for error, symmetry and normality;
            fewer if they are long (together 1024 x 1024 pairs).
        max_length: longer sequences are cut.
        levels: the error section covers one level up to this many.
        maps: whether to add attention and score matrices for display.

    Returns:
        A dict of plain numbers (`polyscale.analysis.schema`); `meta.notes` lists what was left out.

    Example:
        >>> layer = HKTAttention(16, num_heads=2, levels=2)
        >>> found = analyze_hkt(layer, torch.randn(1, 12, 16))
        >>> found["meta"]["levels"], found["cost"]["ratio"]
        (2, 1.25)
    """
    check_integer("examples", examples, least=1)
    check_integer("max_length", max_length, least=1)
    check_integer("levels", levels, least=1)
    builder = AnalysisBuilder("hkt", type(model).__name__, title)
    layers = [(layer, _sequences(call)) for layer, call in capture(model, batch, HKTAttention)]
    first, sequences = layers[0]
    _check_alike([layer for layer, _ in layers])
    chosen = _choose(sequences, example, examples, max_length, builder.notes)
    length = min(len(sequences[example]), max_length)
    builder.meta |= {"layers": len(layers), "heads": first.num_heads, "levels": first.levels}
    builder.set_example(length, tokens, text, real_columns(batch, example))
    builder.notes += _notes(first, levels)
    entries = _HKTEntries(len(layers), first, length, levels)
    if entries.eigen_rows < length:
        note = f"Eigenvalues of scores are those of the first {entries.eigen_rows} tokens."
        builder.notes.append(note)
    collection = _maps(len(layers), first, length if maps else 0)
    for number, (layer, inputs) in enumerate(layers):
        found = [
            level_scores(layer, inputs[at][:max_length], max(levels, layer.levels)) for at in chosen
        ]
        entries.add(number, layer, found)
        if maps:
            _add_maps(collection, number, found[0])
    builder.meta["rows_used"] = entries.rows_used
    total = sum(min(len(sequences[at]), max_length) for at in chosen)
    builder.notes += [*_sampling_notes(entries.rows_used, total), *collection.notes]
    return builder.build(
        {
            "levels": {"weights": [layer.level_weights.detach() for layer, _ in layers]},
            **entries.sections(collection),
            "cost": _cost_section(first, length),
            "attention": collection.attention,
        }
    )


class _HKTEntries:
    """The entries of all sections, collected layer by layer."""

    def __init__(self, layers: int, first: HKTAttention, length: int, levels: int) -> None:
        sizes = [-(-length // 2**level) for level in range(first.levels)] + [length]
        self.eigen_rows = eigen_rows(sizes * (layers * first.num_heads))
        self.levels = levels
        self.rows_used = 0
        self.forms: list[Entry] = []
        self.scores: list[Entry] = []
        self.parts: list[Entry] = []
        self.normality: list[Entry] = []
        names = ("rows", "strides", "levels", "tail", "decay")
        self.error: dict[str, list[Entry]] = {name: [] for name in names}

    def add(self, number: int, layer: HKTAttention, found: list[LevelScores]) -> None:
        """Add all that is measured on one layer's scores of the chosen examples."""
        self.rows_used = sum(len(one) for one in query_rows(found))
        self.forms += [
            form_entry(number, one.head, one.level, one.form, one.with_bias)
            for one in bilinear_forms(layer)
        ]
        trained = found[0].trained
        for level in range(trained):
            scores = [one.scores[level] for one in found]
            self._add_scores(number, level, scores)
            self.normality += normality_entries(number, level, scores)
        self._add_scores(number, "merged", [one.merged(trained) for one in found])
        measured = (
            *error_rows(found, number, max(self.levels, trained)),
            *tail_entries(found, number),
        )
        for entries, new in zip(self.error.values(), measured, strict=True):
            entries += new

    def _add_scores(self, number: int, level: int | str, scores: list[Tensor]) -> None:
        self.scores += score_entries(number, level, scores[0], self.eigen_rows)
        self.parts += symmetry_entries(number, level, scores)

    def sections(self, collection: MapCollection) -> dict[str, Any]:
        """Kernel, symmetry, error and normality."""
        return {
            "kernel": {"forms": self.forms, "scores": self.scores, "note": FORMS_NOTE},
            "symmetry": {"parts": self.parts, "maps": collection.parts},
            "error": self.error,
            "normality": {"levels": self.normality, "over_training": []},
        }


def hkt_normality(
    model: nn.Module,
    batch: Any,
    *,
    example: int = 0,
    examples: int = 8,
    max_length: int = 1024,
    **_: Any,
) -> list[Entry]:
    """The normality entries of `analyze_hkt` without QQ points, and nothing else."""
    entries: list[Entry] = []
    for number, (layer, call) in enumerate(capture(model, batch, HKTAttention)):
        sequences = _sequences(call)
        chosen = _choose(sequences, example, examples, max_length, [])
        found = [level_scores(layer, sequences[at][:max_length]) for at in chosen]
        for level in range(layer.levels):
            scores = [one.scores[level] for one in found]
            entries += normality_entries(number, level, scores, qq=False)
    return entries


def _check_alike(layers: list[HKTAttention]) -> None:
    shapes = {(layer.levels, layer.num_heads, layer.head_dim) for layer in layers}
    if len(shapes) > 1:
        raise ValueError(
            "model must have layers of one kind (levels, heads and head size), "
            f"got {len(shapes)} kinds"
        )


def _sequences(call: dict[str, Any]) -> list[Tensor]:
    """The real tokens `[T, C]` of each batch entry."""
    if call["cu_seqlens"] is not None:
        raise ValueError("batch must not be packed (cu_seqlens): pad the sequences instead")
    x, mask, lengths = call["x"].detach(), call["key_padding_mask"], call["lengths"]
    if mask is not None:
        return [row[~ignored] for row, ignored in zip(x, mask, strict=True)]
    if lengths is not None:
        return [row[:n] for row, n in zip(x, lengths.tolist(), strict=True)]
    return list(x)


def _choose(
    sequences: list[Tensor],
    example: int,
    examples: int,
    max_length: int,
    notes: list[str],
) -> list[int]:
    """The batch entries to analyze: `example`, and those after it within the limit of pairs."""
    if not 0 <= example < len(sequences):
        raise ValueError(f"example must be from 0 to {len(sequences) - 1}, got {example}")
    if not len(sequences[example]):
        raise ValueError(f"example {example} must have at least one token, got only padding")
    longest = len(sequences[example])
    if longest > max_length:
        notes.append(
            f"Sequences are cut to their first {max_length} tokens (the example has {longest}); "
            "inputs of deeper layers are computed from the whole sequence."
        )
    chosen, pairs = [example], min(longest, max_length) ** 2
    for at in range(example + 1, min(len(sequences), example + examples)):
        size = min(len(sequences[at]), max_length) ** 2
        if size and pairs + size <= PAIRS:
            chosen.append(at)
            pairs += size
    if len(chosen) < len(sequences):
        notes.append(f"{len(chosen)} of the batch's {len(sequences)} entries are used.")
    return chosen


def _notes(layer: HKTAttention, levels: int) -> list[str]:
    """How to read the figures of this layer's options."""
    notes = [SCORES_NOTE, NORMALITY_NOTE]
    if levels > layer.levels:
        notes.append(
            f"The model has {layer.levels} levels. In the error section further levels are means "
            "of two entries of the level before, with the coarsest level's projections and weight "
            "(weights are then normalised again); they were not trained."
        )
    notes.append("Error with fewer levels than the model has: their weights are normalised again.")
    if layer.rotary and layer.kernel != "psd":
        notes.append(
            "Rotary positions: the forms are those at distance 0, and their condition does not "
            "carry over to the scores; the eigenvalues on data include the rotation."
        )
    if len(layer.relative_bias):
        notes.append(
            "Relative terms are part of the scores on data, but not of the bilinear forms."
        )
    if layer.kernel == "psd":
        notes.append("kernel='psd': M_s is a Gram matrix of the weights by construction.")
    return notes


def _sampling_notes(used: int, total: int) -> list[str]:
    notes = []
    if used < total:
        notes.append(f"The error section uses {used} of {total} query rows, evenly spaced.")
    if total > NORMALITY_ROWS:
        notes.append(
            f"Normality uses at most {NORMALITY_ROWS} rows of a level's scores, evenly spaced."
        )
    return notes


def _cost_section(layer: HKTAttention, length: int) -> Entry:
    cost = attention_cost(layer.levels, length, layer.head_dim, layer.num_heads)
    return {
        "levels": [
            {"level": level, "flops": one.flops, "bytes": one.bytes}
            for level, one in enumerate(cost.levels)
        ],
        "standard": {"flops": cost.standard.flops, "bytes": cost.standard.bytes},
        "ratio": cost.ratio,
        "whole_ratio": cost.whole_ratio,
    }


def _maps(layers: int, layer: HKTAttention, length: int) -> MapCollection:
    """An empty collection for the maps of a model; it stays empty if the length is 0."""
    if not length:
        return MapCollection(layers, [], [])
    sizes = [-(-length // 2**level) for level in range(layer.levels)] + [length]
    heads = layer.num_heads
    return MapCollection(layers, [length] * (len(sizes) * heads), sizes * heads)


def _add_maps(collection: MapCollection, number: int, found: LevelScores) -> None:
    hidden = ~found.allowed()

    def attention(scores: Tensor) -> Tensor:
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)

    for level in range(found.trained):
        full_length = upsample(found.scores[level], level, found.length)
        collection.add(number, level, attention(full_length), found.scores[level])
    merged = found.merged(found.trained)
    collection.add(number, "merged", attention(merged), merged)

"""The whole theory for a model, gathered into one dict that JSON can hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyscale.cost.hkt import attention_cost
from polyscale.layers.hkt import HKTAttention
from polyscale.theory.analyze_transformer import analyze_attention, transformer_normality
from polyscale.theory.analyze_trees import analyze_hsa
from polyscale.theory.capture import layer_inputs, real_columns
from polyscale.theory.frame import NORMALITY_NOTE, SCORES_NOTE, Frame
from polyscale.theory.kernel import bilinear_forms
from polyscale.theory.levels import LEVELS, LevelScores, level_scores, upsample
from polyscale.theory.plain import plain
from polyscale.theory.sections import (
    NORMALITY_ROWS,
    Entry,
    Maps,
    eigen_rows,
    error_rows,
    normality_entries,
    query_rows,
    score_entries,
    spectrum_entry,
    symmetry_entries,
    tail_entries,
)

__all__ = ["analyze_attention", "analyze_hkt", "analyze_hsa", "analyze_snapshots"]

PAIRS = 1024 * 1024  # of tokens, in all examples together

FORMS_NOTE = (
    "Eigenvalues of M_s = (M + M^T) / 2 with M = W_Q W_K^T, not scaled by 1 / sqrt(D); those not "
    "listed are 0. fraction_negative counts those that are not 0, negative_share weighs them by "
    "size. A head with independent query and key weights and d_model >= 2 D has exactly as many "
    "negative as positive ones. *_with_bias: the form that decides where projections have biases."
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
) -> dict[str, Any]:
    """Kernel, symmetry, error, normality, cost and attention maps of an HKT model on a batch.

    The model runs as it is; from what its layers get, scores are computed again in float64.

    Args:
        model: any module with `HKTAttention` layers, or one such layer.
        batch: what the model takes: a tensor, a tuple of arguments, or a dict of named ones.
        tokens: names of the shown example's tokens, padding left out or not.
        text: the text of the shown example.
        title: of the report.
        example: the entry of the batch that is shown, and that the kernel part looks at.
        examples: at most this many entries, from `example` on, for error, symmetry and normality;
            fewer if they are long (together 1024 x 1024 pairs).
        max_length: longer sequences are cut.
        levels: the error analysis goes from one level to this many.
        maps: whether to add matrices to look at.

    Returns:
        A dict of plain numbers; what was left out or taken instead stands in `meta.notes`.

    Example:
        >>> layer = HKTAttention(16, num_heads=2, levels=2)
        >>> found = analyze_hkt(layer, torch.randn(1, 12, 16))
        >>> found["meta"]["levels"], found["cost"]["ratio"]
        (2, 1.25)
    """
    _check_counts(examples=examples, max_length=max_length, levels=levels)
    frame = Frame("hkt", type(model).__name__, title)
    layers = [(layer, _sequences(call)) for layer, call in layer_inputs(model, batch, HKTAttention)]
    chosen = _choose(layers[0][1], example, examples, max_length, frame.notes)
    shapes = {(layer.levels, layer.num_heads, layer.head_dim) for layer, _ in layers}
    if len(shapes) > 1:
        raise ValueError(f"model must have layers of one kind, got {len(shapes)} kinds")
    first = layers[0][0]
    length = min(len(layers[0][1][example]), max_length)
    frame.meta |= {
        "layers": len(layers),
        "heads": first.num_heads,
        "levels": first.levels,
    }
    frame.example(length, tokens, text, real_columns(batch, example))
    _hkt_notes(frame, first, levels)
    everything = sum(min(len(layers[0][1][at]), max_length) for at in chosen)

    sizes = [-(-length // 2**level) for level in range(first.levels)] + [length]
    rows = eigen_rows(sizes * (len(layers) * first.num_heads))
    if rows < length:
        frame.notes.append(f"Eigenvalues of scores are those of the first {rows} tokens.")
    weights = [layer.level_weights.detach() for layer, _ in layers]
    forms: list[Entry] = []
    lists: dict[str, list[Entry]] = {
        name: []
        for name in ("scores", "parts", "rows", "strides", "levels", "tail", "decay", "normality")
    }
    gallery = _gallery(len(layers), first, length if maps else 0)
    for number, (layer, sequences) in enumerate(layers):
        forms += _form_entries(number, layer)
        found = [
            level_scores(layer, sequences[at][:max_length], max(levels, layer.levels))
            for at in chosen
        ]
        frame.meta["rows_used"] = sum(len(one) for one in query_rows(found))
        _layer_entries(number, found, rows, levels, lists)
        if maps:
            _add_maps(gallery, number, found[0])
    if frame.meta["rows_used"] < everything:
        used = frame.meta["rows_used"]
        frame.notes.append(f"The error part uses {used} of {everything} query rows, evenly spaced.")
    if everything > NORMALITY_ROWS:
        frame.notes.append(
            f"Normality uses at most {NORMALITY_ROWS} rows of a level's scores, evenly spaced."
        )
    frame.notes += gallery.notes
    cost = attention_cost(first.levels, length, first.head_dim, first.num_heads)
    return frame.finish(
        {
            "levels": {"weights": weights},
            "kernel": {"forms": forms, "scores": lists["scores"], "note": FORMS_NOTE},
            "symmetry": {"parts": lists["parts"], "maps": gallery.parts},
            "error": {name: lists[name] for name in ("rows", "strides", "levels", "tail", "decay")},
            "normality": {"levels": lists["normality"], "over_training": []},
            "cost": {
                "levels": [
                    {"level": level, "flops": one.flops, "bytes": one.bytes}
                    for level, one in enumerate(cost.levels)
                ],
                "standard": {"flops": cost.standard.flops, "bytes": cost.standard.bytes},
                "ratio": cost.ratio,
                "whole_ratio": cost.whole_ratio,
            },
            "attention": gallery.attention,
        }
    )


def _check_counts(**counts: int) -> None:
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")


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
    """The batch entries to look at: `example`, and those after it that fit."""
    if not 0 <= example < len(sequences):
        raise ValueError(f"example must be from 0 to {len(sequences) - 1}, got {example}")
    if not len(sequences[example]):
        raise ValueError(f"example {example} must have at least one token, got padding alone")
    longest = len(sequences[example])
    if longest > max_length:
        notes.append(
            f"Sequences are cut to their first {max_length} tokens (the example has {longest}); "
            "inputs of deeper layers are those of the whole sequence."
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


def _hkt_notes(frame: Frame, layer: HKTAttention, levels: int) -> None:
    frame.notes += [SCORES_NOTE, NORMALITY_NOTE]
    if levels > layer.levels:
        frame.notes.append(
            f"The model has {layer.levels} levels. In the error part further ones are means of two "
            "entries of the level before, with the coarsest level's projections and its weight "
            "before all weights are normalised again; they were not trained."
        )
    frame.notes.append(
        "Error with fewer levels than the model has: their weights are normalised again."
    )
    if layer.rotary and layer.kernel != "psd":
        frame.notes.append(
            "Rotary positions: the forms are those at distance 0, and their condition does not "
            "carry over to the scores; the eigenvalues on data are with rotation."
        )
    if len(layer.relative_bias):
        frame.notes.append(
            "Relative terms are part of the scores on data, but not of the bilinear forms."
        )
    if layer.kernel == "psd":
        frame.notes.append("kernel='psd': M_s is a Gram matrix of the weights by construction.")


def _form_entries(number: int, layer: HKTAttention) -> list[Entry]:
    entries = []
    for one in bilinear_forms(layer):
        entry: Entry = {"layer": number, "head": one.head, "level": one.level}
        entry |= spectrum_entry(one.form)
        if one.with_bias is not None:
            entry |= {
                "psd_with_bias": bool(one.with_bias.psd),
                "smallest_with_bias": one.with_bias.smallest,
                "margin_with_bias": one.with_bias.margin,
            }
        entries.append(entry)
    return entries


def _layer_entries(
    number: int, found: list[LevelScores], rows: int, levels: int, lists: dict[str, list[Entry]]
) -> None:
    """Add all that is measured on one layer's scores."""
    trained = found[0].trained
    merged = [one.merged(trained) for one in found]
    for level in range(trained):
        scores = [one.scores[level] for one in found]
        lists["scores"] += score_entries(number, level, scores[0], rows)
        lists["parts"] += symmetry_entries(number, level, scores)
        lists["normality"] += normality_entries(number, level, scores)
    lists["scores"] += score_entries(number, "merged", merged[0], rows)
    lists["parts"] += symmetry_entries(number, "merged", merged)
    by_levels, by_stride, by_level = error_rows(found, number, max(levels, trained))
    tail, decay = tail_entries(found, number)
    lists["rows"] += by_levels
    lists["strides"] += by_stride
    lists["levels"] += by_level
    lists["tail"] += tail
    lists["decay"] += decay


def _gallery(layers: int, layer: HKTAttention, length: int) -> Maps:
    """Room for the maps of a model; none if the length is 0."""
    if not length:
        return Maps(layers, [], [])
    sizes = [-(-length // 2**level) for level in range(layer.levels)] + [length]
    heads = layer.num_heads
    return Maps(layers, [length] * (len(sizes) * heads), sizes * heads)


def _add_maps(gallery: Maps, number: int, found: LevelScores) -> None:
    hidden = ~found.allowed()

    def attention(scores: Tensor) -> Tensor:
        return scores.masked_fill(hidden, -torch.inf).softmax(-1)

    for level in range(found.trained):
        alone = upsample(found.scores[level], level, found.length)
        gallery.add(number, level, attention(alone), found.scores[level])
    merged = found.merged(found.trained)
    gallery.add(number, "merged", attention(merged), merged)


def analyze_snapshots(
    snapshots: Sequence[tuple[int, nn.Module]], batch: Any, **options: Any
) -> dict[str, Any]:
    """The analysis of the last of several snapshots of a model, with normality over training.

    Args:
        snapshots: `(step, model)` in any order; HKT models, or Hugging Face models.
        batch: what the models take.
        **options: of `analyze_hkt` or `analyze_attention`.

    Example:
        >>> steps = [(step, HKTAttention(16, 2, levels=2)) for step in (0, 100)]
        >>> found = analyze_snapshots(steps, torch.randn(1, 64, 16), maps=False)
        >>> [(entry["step"], entry["level"]) for entry in found["normality"]["over_training"]]
        [(0, 0), (0, 1), (100, 0), (100, 1)]
    """
    if not snapshots:
        raise ValueError("snapshots must hold at least one (step, model), got none")
    ordered = sorted(snapshots, key=lambda pair: pair[0])
    last = ordered[-1][1]
    is_hkt = any(isinstance(module, HKTAttention) for module in last.modules())
    analyze = analyze_hkt if is_hkt else analyze_attention
    normality = _hkt_normality if is_hkt else transformer_normality
    history: list[Entry] = []
    for step, model in ordered[:-1]:
        history += _means(int(step), plain(normality(model, batch, **options)))
    analysis = analyze(last, batch, **options)
    history += _means(int(ordered[-1][0]), analysis["normality"]["levels"])
    analysis["normality"]["over_training"] = plain(history)
    return analysis


def _hkt_normality(
    model: nn.Module,
    batch: Any,
    *,
    example: int = 0,
    examples: int = 8,
    max_length: int = 1024,
    **_: Any,
) -> list[Entry]:
    """The normality entries of `analyze_hkt` alone, without QQ points."""
    entries: list[Entry] = []
    for number, (layer, call) in enumerate(layer_inputs(model, batch, HKTAttention)):
        sequences = _sequences(call)
        chosen = _choose(sequences, example, examples, max_length, [])
        found = [level_scores(layer, sequences[at][:max_length]) for at in chosen]
        for level in range(layer.levels):
            scores = [one.scores[level] for one in found]
            entries += normality_entries(number, level, scores, qq=False)
    return entries


def _means(step: int, entries: list[Entry]) -> list[Entry]:
    """Skewness and kurtosis of a snapshot, means over the heads of a layer."""
    groups: dict[tuple[int, int], list[Entry]] = {}
    for entry in entries:
        if entry["skewness"] is not None:
            groups.setdefault((entry["layer"], entry["level"]), []).append(entry)
    names = ("skewness", "kurtosis", "kurtosis_expected")
    return [
        {
            "step": step,
            "layer": layer,
            "level": level,
            **{name: sum(one[name] for one in group) / len(group) for name in names},
        }
        for (layer, level), group in groups.items()
    ]

"""One model at several steps of its training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from polyscale.analysis.entries import Entry
from polyscale.analysis.hkt import analyze_hkt, hkt_normality
from polyscale.analysis.schema import Analysis
from polyscale.analysis.transformer import analyze_attention, transformer_normality
from polyscale.analysis.values import as_json
from polyscale.layers.hkt import HKTAttention


def analyze_snapshots(
    snapshots: Sequence[tuple[int, nn.Module]], batch: Any, **options: Any
) -> Analysis:
    """The analysis of a model's last snapshot, with normality over training from all of them.

    Args:
        snapshots: `(step, model)` in any order; HKT models, or Hugging Face models.
        batch: what the models take.
        **options: of `analyze_hkt` or `analyze_attention`.

    Example:
        >>> import torch
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
    normality = hkt_normality if is_hkt else transformer_normality
    history: list[Entry] = []
    for step, model in ordered[:-1]:
        history += _means(int(step), as_json(normality(model, batch, **options)))
    analysis = analyze(last, batch, **options)
    history += _means(int(ordered[-1][0]), analysis["normality"]["levels"])
    analysis["normality"]["over_training"] = as_json(history)
    return analysis


def _means(step: int, entries: Sequence[Mapping[str, Any]]) -> list[Entry]:
    """Skewness and kurtosis of a snapshot, means over the heads of a layer."""
    groups: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
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

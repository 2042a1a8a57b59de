"""Measurements as entries: one dict per layer, head and level, in the fields of the schema.

Values may still be tensors; `as_json` makes them plain once the analysis is complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyscale.theory.error import (
    ErrorParts,
    analyse_levels,
    decay_ratio,
    level_contributions,
    tail_bound,
)
from polyscale.theory.kernel import Spectrum, spectrum
from polyscale.theory.levels import LevelScores
from polyscale.theory.normality import mardia, principal_components, qq_points
from polyscale.theory.symmetry import energy_shares

SHOWN_EIGENVALUES = 64
EIGEN_BUDGET = 5e10  # sum of cubed sizes: some ten seconds
ERROR_ROWS = 256
NORMALITY_ROWS = 512
COMPONENTS = 5

Entry = dict[str, Any]


def spectrum_entry(found: Spectrum, shown: int | None = None) -> Entry:
    """The fields of a spectrum; of more than `shown` eigenvalues the outer ones are kept."""
    values = found.eigenvalues
    if shown is not None and len(values) > shown:
        values = torch.cat((values[: shown // 2], values[-(shown - shown // 2) :]))
    return {
        "eigenvalues": values,
        "size": found.size,
        "fraction_negative": found.fraction_negative,
        "negative_share": found.negative_share,
        "smallest": found.smallest,
        "psd": bool(found.psd),
        "margin": found.margin,
    }


def form_entry(
    layer: int, head: int, level: int | None, form: Spectrum, with_bias: Spectrum | None
) -> Entry:
    """The bilinear form of a head, and whether biases keep its condition."""
    entry: Entry = {"layer": layer, "head": head, "level": level, **spectrum_entry(form)}
    if with_bias is not None:
        entry |= {
            "psd_with_bias": bool(with_bias.psd),
            "smallest_with_bias": with_bias.smallest,
            "margin_with_bias": with_bias.margin,
        }
    return entry


def eigen_rows(sizes: Sequence[int]) -> int:
    """How many rows of matrices of these sizes have their eigenvalues computed in the budget."""
    largest = max(sizes)
    while sum(min(size, largest) ** 3 for size in sizes) > EIGEN_BUDGET:
        largest = int(largest * 0.9)
    return largest


def score_entries(layer: int, level: int | str, scores: Tensor, rows: int) -> list[Entry]:
    """Eigenvalues of the scores `[H, n, n]` of each head, of their first `rows` rows."""
    cut = scores[:, :rows, :rows]
    entries = []
    for head, matrix in enumerate(cut):
        found = spectrum_entry(spectrum(matrix), SHOWN_EIGENVALUES)
        entries.append({"layer": layer, "head": head, "level": level, **found})
    return entries


def symmetry_entries(layer: int, level: int | str, examples: Sequence[Tensor]) -> list[Entry]:
    """Shares of both parts of the scores `[H, n, n]`, energies added over the examples."""
    found = [energy_shares(scores) for scores in examples]
    energy = torch.stack([part[2] for part in found])  # [E, H]
    total = energy.sum(0)
    shares = [
        (torch.stack([part[at] for part in found]) * energy).sum(0) / total.clamp(min=1e-300)
        for at in (0, 1)
    ]
    return [
        {
            "layer": layer,
            "head": head,
            "level": level,
            "reciprocal": shares[0][head] if total[head] > 0 else None,
            "directional": shares[1][head] if total[head] > 0 else None,
            "energy": total[head],
        }
        for head in range(len(total))
    ]


def query_rows(found: Sequence[LevelScores]) -> list[Tensor]:
    """The query rows of each example that the error section uses, evenly spaced."""
    share = ERROR_ROWS // len(found)
    chosen = []
    for one in found:
        count = min(share, one.length)
        chosen.append(torch.linspace(0, one.length - 1, count, dtype=torch.float64).round().long())
    return chosen


def error_rows(
    found: Sequence[LevelScores], layer: int, levels: int
) -> tuple[list[Entry], list[Entry], list[Entry]]:
    """The decomposition from one level to `levels`, means over the query rows of the examples.

    Returns rows by number of levels used, rows by stride for the layer's own levels, and the share
    of each of its levels.
    """
    trained = found[0].trained
    heads = len(found[0].scores[0])
    chosen = query_rows(found)
    entries: list[Entry] = []
    strides: list[Entry] = []
    for used in range(1, levels + 1):
        if not found[0].can_merge(used):
            continue
        analyses = [
            analyse_levels(one, used, rows) for one, rows in zip(found, chosen, strict=True)
        ]
        own = 2 ** (used - 1)
        entries += _error_entries([one.parts(own) for one in analyses], layer, used, own)
        if used == trained:
            for stride in (2**at for at in range(levels)):
                parts = [one.parts(stride) for one in analyses]
                strides += _error_entries(parts, layer, used, stride)
    shares = []
    contributions = torch.cat(
        [level_contributions(one, trained, rows) for one, rows in zip(found, chosen, strict=True)],
        -1,
    )  # [H, L, Q]
    for head in range(heads):
        for level in range(trained):
            gaussian = contributions[head, level].mean()
            shares.append({"layer": layer, "head": head, "level": level, "gaussian": gaussian})
    return entries, strides, shares


def _error_entries(parts: list[ErrorParts], layer: int, used: int, stride: int) -> list[Entry]:
    names = (
        "kl",
        "resolution",
        "drift",
        "non_gaussian",
        "third_cumulant_term",
        "fourth_cumulant_term",
        "total_variation",
    )
    means = {
        name: torch.cat([getattr(part, name) for part in parts], -1).mean(-1) for name in names
    }
    return [
        {
            "layer": layer,
            "head": head,
            "levels_used": used,
            "stride": stride,
            **{name: mean[head] for name, mean in means.items()},
        }
        for head in range(len(means["kl"]))
    ]


def tail_entries(found: Sequence[LevelScores], layer: int) -> tuple[list[Entry], list[Entry]]:
    """The tail from each level on, bound and measured, largest over the examples; and the decay."""
    trained = found[0].trained
    weights = found[0].weights(trained)
    tails = [tail_bound(one.scores[:trained], weights, one.allowed()) for one in found]
    bound, measured, terms = (
        torch.stack([getattr(tail, name) for tail in tails]).amax(0)
        for name in ("bound", "measured", "terms")
    )  # [H, L]
    entries = [
        {
            "layer": layer,
            "head": head,
            "level": level,
            "bound": bound[head, level],
            "measured": measured[head, level],
        }
        for head in range(len(bound))
        for level in range(trained)
    ]
    decay = [
        {"layer": layer, "head": head, "ratio": ratio, "terms": terms[head]}
        for head, ratio in enumerate(decay_ratio(terms))
    ]
    return entries, decay


def score_rows(examples: Sequence[Tensor]) -> Tensor:
    """Rows of the scores `[H, n, n]` of all examples as points, `[H, points, columns]`.

    Columns are cut to the shortest example; of many rows evenly spaced ones are taken.
    """
    width = min(scores.shape[-1] for scores in examples)
    rows = torch.cat([scores[..., :width] for scores in examples], 1)
    chosen = torch.linspace(0, rows.shape[1] - 1, min(NORMALITY_ROWS, rows.shape[1]))
    return rows[:, chosen.round().long()]


def normality_entries(
    layer: int, level: int, examples: Sequence[Tensor], qq: bool = True
) -> list[Entry]:
    """Mardia's tests of the rows of the scores, on their leading principal components."""
    entries = []
    for head, points in enumerate(score_rows(examples)):
        entry: Entry = {"layer": layer, "head": head, "level": level, "n": len(points)}
        components = principal_components(points, COMPONENTS)
        entry["dimensions"] = components.shape[1]
        # Fewer than five points per dimension are not enough for a test.
        if components.shape[1] and len(points) >= 5 * components.shape[1]:
            found = mardia(components)
            entry |= {
                "skewness": found.skewness,
                "skewness_p": found.skewness_p,
                "kurtosis": found.kurtosis,
                "kurtosis_p": found.kurtosis_p,
                "kurtosis_expected": found.kurtosis_expected,
                "qq": qq_points(components) if qq else [],
            }
        else:
            names = ("skewness", "skewness_p", "kurtosis", "kurtosis_p", "kurtosis_expected")
            entry |= {**dict.fromkeys(names), "qq": []}
        entries.append(entry)
    return entries

"""What an analysis shows, in sentences; the most important first."""

from __future__ import annotations

from collections.abc import Sequence

from polyscale.analysis.schema import Analysis


def summary_sentences(analysis: Analysis) -> list[str]:
    """Sentences about every section that is present."""
    parts = (_levels, _kernel, _error, _trees, _symmetry, _normality, _cost)
    return [sentence for part in parts for sentence in part(analysis)]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _mean(values: Sequence[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return sum(numbers) / len(numbers) if numbers else None


def _levels(analysis: Analysis) -> list[str]:
    sentences = []
    for layer, heads in enumerate(analysis.get("levels", {}).get("weights", [])):
        means = [sum(column) / len(heads) for column in zip(*heads, strict=True)]
        if len(means) < 2:
            continue
        largest = max(range(len(means)), key=lambda level: means[level])
        if max(means) - min(means) < 1e-3:
            sentences.append(f"All levels carry the same weight in layer {layer}.")
            continue
        sentence = (
            f"Level {largest} carries {_percent(means[largest])} of the weight in layer {layer}"
        )
        if largest:
            sentence += f", level 0 (the tokens themselves) {_percent(means[0])}"
        sentences.append(sentence + ".")
    return sentences


def _kernel(analysis: Analysis) -> list[str]:
    kernel = analysis.get("kernel", {})
    sentences = []
    forms = kernel.get("forms", [])
    if forms:
        broken = sum(not form["psd"] for form in forms)
        worst = min(forms, key=lambda form: form["margin"])
        what = "bilinear form" if len(forms) == 1 else "bilinear forms"
        if broken:
            share = _mean([form["negative_share"] for form in forms])
            sentences.append(
                f"{broken} of {len(forms)} {what} break the PSD condition; on average "
                f"{_percent(share or 0)} of the eigenvalues' size is negative. The worst is head "
                f"{worst['head']} of layer {worst['layer']}, with a smallest eigenvalue of "
                f"{worst['smallest']:.3g}."
            )
        else:
            sentences.append(
                f"The PSD condition holds for all {len(forms)} {what}; the smallest eigenvalue is "
                f"{worst['smallest']:.3g}."
            )
    scores = kernel.get("scores", [])
    merged = [entry for entry in scores if entry["level"] == "merged"] or scores
    if merged:
        good = sum(entry["psd"] for entry in merged)
        sentences.append(
            f"On this input the symmetric part of the scores is positive semidefinite in {good} of "
            f"{len(merged)} heads."
        )
    return sentences


def _error(analysis: Analysis) -> list[str]:
    rows = analysis.get("error", {}).get("rows", [])
    levels = analysis["meta"].get("levels")
    own = [row for row in rows if row["levels_used"] == levels]
    kl = _mean([row["kl"] for row in own])
    if kl is None or not levels or levels < 2:
        return []
    parts = {
        "what is lost inside blocks (resolution)": _mean([row["resolution"] for row in own]),
        "coarse scores that moved (drift)": _mean([row["drift"] for row in own]),
        "the non-Gaussian rest": _mean([row["non_gaussian"] for row in own]),
    }
    largest = max(parts, key=lambda name: abs(parts[name] or 0))
    sentences = [
        f"The {levels} levels together are {kl:.3g} nats from flat attention on average; the "
        f"largest part is {largest}, {parts[largest]:.3g}."
    ]
    tail = [entry for entry in analysis["error"].get("tail", []) if entry["level"] == levels - 1]
    bound, measured = (_mean([entry[name] for entry in tail]) for name in ("bound", "measured"))
    ratio = _mean([entry["ratio"] for entry in analysis["error"].get("decay", [])])
    if bound is not None and measured is not None and ratio is not None:
        sentences.append(
            f"The coarsest level changes a score by at most {measured:.3g} (bound {bound:.3g}); "
            f"from level to level the bound shrinks by a factor of {ratio:.2f}."
            if ratio <= 1
            else f"The coarsest level changes a score by at most {measured:.3g} (bound "
            f"{bound:.3g}); the bound grows from level to level, by a factor of {ratio:.2f}."
        )
    return sentences


def _trees(analysis: Analysis) -> list[str]:
    layers = analysis.get("hsa", {}).get("layers", [])
    if not layers:
        return []
    length = max(1, analysis["meta"]["length"])
    total = _mean([entry["kl_total"] for entry in layers])
    sentences = []
    if total is not None:
        sentences.append(
            f"The tree costs {total / length:.3g} nats a token against flat softmax, mean over "
            f"{len(layers)} heads."
        )
    losses: dict[tuple[int, str], float] = {}
    for entry in layers:
        for family in entry["families"]:
            place = (family["node"], family["label"])
            losses[place] = losses.get(place, 0.0) + (family["kl"] or 0.0)
    whole = sum(losses.values())
    if whole > 0:
        (node, label), loss = max(losses.items(), key=lambda pair: pair[1])
        sentences.append(
            f"It loses most in the family of node {node} ({label}): {_percent(loss / whole)} of "
            "all that is lost."
        )
    gains = [
        1 - finer["kl_after"] / finer["kl_before"]
        for entry in layers
        for finer in entry["finer"][:1]
        if finer["kl_before"]
    ]
    if gains:
        sentences.append(
            f"Opening the worst family of each head one level would take away "
            f"{_percent(sum(gains) / len(gains))} of the loss on average."
        )
    return sentences


def _symmetry(analysis: Analysis) -> list[str]:
    parts = analysis.get("symmetry", {}).get("parts", [])
    merged = [part for part in parts if part["level"] == "merged"] or parts
    share = _mean([part["directional"] for part in merged])
    if share is None:
        return []
    most = max(merged, key=lambda part: part["directional"] or 0.0)
    return [
        f"{_percent(share)} of the scores' energy is directional; most in head {most['head']} of "
        f"layer {most['layer']}, {_percent(most['directional'] or 0.0)}."
    ]


def _normality(analysis: Analysis) -> list[str]:
    entries = analysis.get("normality", {}).get("levels", [])
    tested = [
        (skewness, kurtosis)
        for entry in entries
        if (skewness := entry["skewness_p"]) is not None
        and (kurtosis := entry["kurtosis_p"]) is not None
    ]
    if not tested:
        return []
    rejected = sum(min(both) < 0.025 for both in tested)
    return [
        f"Mardia's tests reject a Gaussian for {rejected} of {len(tested)} sets of scores at the "
        "5 % level (both tests at 2.5 %)."
    ]


def _cost(analysis: Analysis) -> list[str]:
    cost = analysis.get("cost")
    if not cost:
        return []
    return [f"Score products cost {cost['ratio']:.4g} times those of standard attention."]

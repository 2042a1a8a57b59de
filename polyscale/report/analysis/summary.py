"""A summary in plain words, for an analysis that comes without one."""

from __future__ import annotations

from typing import Any


def summarise(analysis: dict[str, Any]) -> list[str]:
    """The sentences of the analysis itself, or a few made from its numbers.

    >>> summarise({"levels": {"weights": [[[0.25, 0.75], [0.5, 0.5]]]}})
    ['In layer 0, level 1 carries most of the weight: 62 %.']
    """
    given = [str(sentence) for sentence in analysis.get("summary") or []]
    if given:
        return given
    return [*_heaviest_level(analysis), *_kernel(analysis), *_tree(analysis), *_cost(analysis)]


def _heaviest_level(analysis: dict[str, Any]) -> list[str]:
    means = [
        (sum(head[level] for head in heads) / len(heads), layer, level)
        for layer, heads in enumerate((analysis.get("levels") or {}).get("weights") or [])
        for level in range(1, len(heads[0]) if heads else 0)
        if all(head[level] is not None for head in heads)
    ]
    if not means:
        return []
    share, layer, level = max(means)
    most = "most of the weight" if share > 0.5 else "more than any other coarse level in any layer"
    return [f"In layer {layer}, level {level} carries {most}: {100 * share:.0f} %."]


def _kernel(analysis: dict[str, Any]) -> list[str]:
    forms = (analysis.get("kernel") or {}).get("forms") or []
    if not forms:
        return []
    heads = {(form.get("layer"), form.get("head")) for form in forms}
    broken = {(form.get("layer"), form.get("head")) for form in forms if not form.get("psd")}
    if not broken:
        return [f"All {len(heads)} heads meet the PSD condition."]
    return [f"{len(broken)} of {len(heads)} heads break the PSD condition."]


def _tree(analysis: dict[str, Any]) -> list[str]:
    layers = (analysis.get("hsa") or {}).get("layers") or []
    totals = [layer["kl_total"] for layer in layers if layer.get("kl_total") is not None]
    if not totals:
        return []
    return [
        f"The tree costs {sum(totals) / len(totals):.3g} nats of KL to flat softmax, "
        "mean over layers and heads."
    ]


def _cost(analysis: dict[str, Any]) -> list[str]:
    ratio = (analysis.get("cost") or {}).get("ratio")
    if ratio is None:
        return []
    return [f"The attention scores cost {ratio:.3g} times those of standard attention."]

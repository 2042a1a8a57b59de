"""Made-up analyses of every kind, in the shape that the theory functions give."""

from __future__ import annotations

import math
import random
from typing import Any

# Tokens that try to leave the script, break strings, or cannot be encoded.
HOSTILE = [
    "</script><script>window.broken=1</script>",
    "<!--",
    "]]>",
    "\"quoted\" 'twice' \\ \\u003c",
    "<img src=x onerror=window.broken=1>",
    "\x00\x01\n\t\x7f",
    "\u2028\u2029\u202e",
    "\ud800",
    "var(--ink)",
    "&lt;b&gt;",
    "שלום",
    "🌳",
]


def _softmax(scores: list[float]) -> list[float]:
    top = max(scores)
    weights = [math.exp(score - top) for score in scores]
    return [weight / sum(weights) for weight in weights]


def _attention(rows: int, stride: int, rng: random.Random) -> list[list[float]]:
    """Rows that look to themselves, to the start and to a few blocks, and never ahead."""
    favourites = [rng.randrange(rows) for _ in range(3)]
    result = []
    for i in range(rows):
        scores = [
            -abs(i - j) / (6 / stride)
            + (2.5 if j // 4 in {f // 4 for f in favourites} else 0)
            + (1.5 if j == 0 else 0)
            + rng.gauss(0, 0.4)
            for j in range(i + 1)
        ]
        result.append(_softmax(scores) + [0.0] * (rows - i - 1))
    return [[round(value, 6) for value in row] for row in result]


def _eigenvalues(count: int, rng: random.Random) -> dict[str, Any]:
    values = sorted((rng.gauss(0.4, 1) * 2 / (1 + k / 4) for k in range(count)), reverse=True)
    if rng.random() < 0.4:
        values = [abs(value) for value in values]
        values.sort(reverse=True)
    return {
        "eigenvalues": [round(value, 5) for value in values],
        "size": count,
        "fraction_negative": sum(value < 0 for value in values) / count,
        "negative_share": -sum(min(value, 0) for value in values) / sum(map(abs, values)),
        "smallest": values[-1],
        "psd": values[-1] >= 0,
        "margin": values[-1] / values[0],
    }


def _base(kind: str, layers: int, heads: int, length: int, tokens: list[str] | None) -> dict:
    return {
        "format": 1,
        "meta": {
            "title": f"A small {kind} model",
            "model": "runs/example",
            "kind": kind,
            "layers": layers,
            "heads": heads,
            "levels": None,
            "tokens": tokens,
            "text": "".join(tokens) if tokens else None,
            "length": length,
            "rows_used": 8,
            "notes": ["Eigenvalues on data: 64 of 512 are shown."],
            "versions": {"polyscale": "0.1.0", "torch": "2.13"},
            "seconds": 12.5,
        },
        "summary": ["A sentence about the model."],
    }


def hkt_sample(
    layers: int = 2, heads: int = 4, levels: int = 3, length: int = 48, seed: int = 0
) -> dict[str, Any]:
    """Every section that an HKT model can have."""
    rng = random.Random(seed)
    words = "[MAX 2 9 [MIN 4 7 ] 0 ] the cat sat on the mat and slept "
    tokens = list((words * 4)[:length]) if length <= 128 else None
    analysis = _base("hkt", layers, heads, length, tokens)
    analysis["meta"]["levels"] = levels
    analysis["summary"] = [
        "Level 2 carries 41 % of the weight in layer 1.",
        f"3 of {layers * heads} heads break the PSD condition.",
        "Attention differs from flat attention by 0.21 nats on average, most of it drift.",
    ]
    where = [(layer, head) for layer in range(layers) for head in range(heads)]
    every: list[int | str] = [*range(levels), "merged"]
    analysis["levels"] = {
        "weights": [
            [_softmax([rng.gauss(0, 1) for _ in range(levels)]) for _ in range(heads)]
            for _ in range(layers)
        ]
    }
    analysis["kernel"] = {
        "forms": [
            {"layer": layer, "head": head, "level": None, **_eigenvalues(16, rng)}
            for layer, head in where
        ],
        "scores": [
            {"layer": layer, "head": head, "level": level, **_eigenvalues(48, rng)}
            for layer, head in where
            for level in every
        ],
        "note": "Rotary positions are not part of the bilinear form.",
    }
    parts, maps, attention = [], [], []
    cells = min(length, 128)
    for layer, head in where:
        for level in every:
            share = rng.random()
            place = {"layer": layer, "head": head, "level": level}
            parts.append(
                {**place, "reciprocal": share, "directional": 1 - share, "energy": rng.random() * 9}
            )
            stride = 2**level if isinstance(level, int) else 1
            size = math.ceil(cells / stride)
            pooled = length if length > 128 else None
            attention.append({**place, "map": _attention(size, stride, rng), "pooled_from": pooled})
            raw = [[round(rng.gauss(0, 1) + 2 * math.sin((i + j) / 5), 3) for j in range(size)]
                   for i in range(size)]  # fmt: skip
            span = range(size)
            maps.append(
                {
                    **place,
                    "symmetric": [[(raw[i][j] + raw[j][i]) / 2 for j in span] for i in span],
                    "antisymmetric": [[(raw[i][j] - raw[j][i]) / 2 for j in span] for i in span],
                    "pooled_from": pooled,
                }
            )
    analysis["attention"] = attention
    analysis["symmetry"] = {"parts": parts, "maps": maps}
    analysis["error"] = {
        "rows": [
            _error_row(layer, head, used, rng) for layer, head in where for used in range(1, 7)
        ],
        "tail": [
            {
                "layer": layer,
                "head": head,
                "level": level,
                "bound": 3 * 0.4**level,
                "measured": rng.random() * 2 * 0.4**level,
            }
            for layer, head in where
            for level in range(1, levels + 1)
        ],
        "strides": [
            {**_error_row(layer, head, levels, rng), "stride": 2**k}
            for layer, head in where
            for k in range(4)
        ],
        "levels": [
            {"layer": layer, "head": head, "level": level, "gaussian": rng.gauss(0, 0.1)}
            for layer, head in where
            for level in range(levels)
        ],
        "decay": [
            {
                "layer": layer,
                "head": head,
                "ratio": rng.random(),
                "terms": [3 * 0.5**level for level in range(levels)],
            }
            for layer, head in where
        ],
    }
    analysis["normality"] = {
        "levels": [
            {"layer": layer, "head": head, "level": level, "n": 512, "dimensions": 4,
             "skewness": rng.random() * 3, "skewness_p": rng.random() ** 6,
             "kurtosis": 24 + rng.gauss(0, 2), "kurtosis_p": rng.random() ** 4,
             "kurtosis_expected": 24.0,
             "qq": [[k / 6, k / 6 + (k / 40) ** 3 + rng.random() / 4] for k in range(1, 64)]}
            for layer, head in where
            for level in range(levels)
        ],
        "over_training": [
            {"step": step, "layer": layer, "level": level,
             "skewness": 1 + level + step / 400 + rng.random() / 4,
             "kurtosis": 24 + level * step / 300 + rng.random(), "kurtosis_expected": 24.0}
            for step in range(0, 1001, 100)
            for layer in range(layers)
            for level in range(levels)
        ],
    }  # fmt: skip
    flops = 4 * length * length * 16
    analysis["cost"] = {
        "levels": [
            {"level": level, "flops": flops // 4**level, "bytes": 8 * length * 16 // 2**level}
            for level in range(levels)
        ],
        "standard": {"flops": flops, "bytes": 8 * length * 16},
        "ratio": sum(4.0**-level for level in range(levels)),
        "whole_ratio": sum(4.0**-level for level in range(levels)) / 2 + 0.5,
    }
    return analysis


def _error_row(layer: int, head: int, used: int, rng: random.Random) -> dict[str, Any]:
    resolution, drift = 0.05 * used * rng.random(), 0.1 * (used - 1) * rng.random()
    rest = 0.04 * (used - 1) * rng.gauss(0, 1)
    return {
        "layer": layer, "head": head, "levels_used": used, "stride": 2 ** (used - 1),
        "kl": resolution + drift + rest, "resolution": resolution, "drift": drift,
        "non_gaussian": rest, "third_cumulant_term": rest * 0.7, "fourth_cumulant_term": None,
        "total_variation": rng.random() / 5,
    }  # fmt: skip


def hsa_sample(layers: int = 2, heads: int = 3, seed: int = 0) -> dict[str, Any]:
    """A text as paragraphs, sentences and words, with a KL for every family."""
    rng = random.Random(seed)
    text = [
        ["Trees hold the words .", "Each family shares a weight ."],
        ["A finer tree loses less .", "It also costs more time .", "Choose ."],
    ]
    parent, label, inner = [-1], ["text"], [(0, -1, 0)]
    for number, paragraph in enumerate(text):
        parent.append(0)
        label.append(f"paragraph {number + 1}")
        paragraph_node = len(parent) - 1
        inner.append((paragraph_node, 0, 1))
        for sentence in paragraph:
            parent.append(paragraph_node)
            label.append(sentence)
            node = len(parent) - 1
            inner.append((node, paragraph_node, 2))
            for word in sentence.split():
                parent.append(node)
                label.append(word)
    leaf_nodes = sorted(set(range(len(parent))) - set(parent))
    tokens = [label[node] + " " for node in leaf_nodes]
    analysis = _base("hsa", layers, heads, len(tokens), tokens)

    def leaves(node: int) -> int:
        children = [child for child, above in enumerate(parent) if above == node]
        return sum(map(leaves, children)) if children else 1

    entries = []
    for layer in range(layers):
        for head in range(heads):
            families = [
                {"node": node, "parent": above, "depth": depth, "leaves": leaves(node),
                 "label": label[node], "kl": round(rng.random() ** 3, 5),
                 "energy": round(rng.gauss(0, 2), 4), "dilution": round(1 + 4 * rng.random(), 3)}
                for node, above, depth in inner
            ]  # fmt: skip
            worst = sorted(families, key=lambda family: -family["kl"])[:3]
            entries.append(
                {
                    "layer": layer, "head": head,
                    "kl_total": sum(family["kl"] for family in families), "families": families,
                    "kl_unlisted": 0.0,
                    "finer": [
                        {"node": family["node"], "kl_before": family["kl"],
                         "kl_after": family["kl"] * rng.random(),
                         "scores_before": 200, "scores_after": 260}
                        for family in worst
                    ],
                }
            )  # fmt: skip
    analysis["hsa"] = {
        "layers": entries,
        "tree": {
            "parent": parent,
            "label": label,
            "leaf_tokens": tokens,
            "leaf_nodes": leaf_nodes,
        },
    }
    analysis["attention"] = [
        {"layer": layer, "head": head, "level": "merged", "pooled_from": None,
         "map": _attention(len(tokens), 1, rng)}
        for layer in range(layers)
        for head in range(heads)
    ]  # fmt: skip
    return analysis


def transformer_sample(layers: int = 12, heads: int = 12, seed: int = 0) -> dict[str, Any]:
    """A larger model with maps, kernel and symmetry only."""
    small = hkt_sample(layers, heads, levels=1, length=24, seed=seed)
    small["meta"] |= {"kind": "transformer", "levels": None, "title": "A transformer"}
    for name in ("levels", "error", "cost"):
        small.pop(name)
    small["attention"] = [entry for entry in small["attention"] if entry["level"] == "merged"]
    small["symmetry"]["maps"] = []
    small["normality"]["over_training"] = []
    return small


def hostile_sample() -> dict[str, Any]:
    """Every text of an analysis replaced by something that could break a page."""
    analysis = hkt_sample(layers=1, heads=2, levels=2, length=len(HOSTILE))
    text = "".join(HOSTILE)
    analysis["meta"] |= {
        "tokens": list(HOSTILE), "text": text, "title": HOSTILE[0] + HOSTILE[7], "model": text,
        "notes": [text], "versions": {HOSTILE[0]: HOSTILE[4]},
    }  # fmt: skip
    analysis["summary"] = list(HOSTILE)
    analysis["kernel"]["note"] = text
    tree = hsa_sample(layers=1, heads=2)["hsa"]
    tree["tree"]["label"] = [
        HOSTILE[node % len(HOSTILE)] for node in range(len(tree["tree"]["parent"]))
    ]
    for layer in tree["layers"]:
        for family in layer["families"]:
            family["label"] = HOSTILE[family["node"] % len(HOSTILE)]
    analysis["hsa"] = tree
    return analysis

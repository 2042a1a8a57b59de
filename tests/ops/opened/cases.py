"""Problems for the tests, and the definition of opened attention once more: in loops."""

import math
from dataclasses import dataclass, replace

import torch

from polyscale.ops.opened.places import Places, sink_columns
from polyscale.ops.opened.settings import Settings, check_settings

DEFAULTS = {
    "causal": True,
    "block": 64,
    "key_block": 16,
    "near": 64,
    "heavy": 64,
    "mass": None,
    "sample": 8,
    "rest": "drop",
    "strict": False,
}


def random_case(
    length, keys=None, *, batch=2, heads=4, key_heads=2, width=16, value_width=8, **options
):
    """Query, key and value that require gradients."""
    dtype = options.get("dtype", torch.float64)
    keys = keys or length
    return [
        torch.randn(batch, *shape, dtype=dtype).requires_grad_()
        for shape in (
            (heads, length, width),
            (key_heads, keys, width),
            (key_heads, keys, value_width),
        )
    ]


def settings_of(width=16, **options) -> Settings:
    return check_settings(**{**DEFAULTS, "scale": width**-0.5, **options})


def places_of(query, key, padding=None, cu_seqlens=None, sinks=16) -> Places:
    if cu_seqlens is None:
        places = Places.of_rows(len(query), query.shape[2], key.shape[2], padding, query.device)
    else:
        places = Places.packed(cu_seqlens, query.device)
    sinks = torch.tensor(sinks)[None] if isinstance(sinks, list) else sinks
    return replace(places, sinks=sink_columns(places, sinks))


def padding_of(side, keys):
    """Two rows, padded on a side by different amounts, or here and there."""
    mask = torch.zeros(2, keys, dtype=torch.bool)
    if side == "between":
        return torch.rand(2, keys, generator=torch.Generator().manual_seed(3)) < 0.3
    for row, amount in enumerate((keys // 3, keys // 10)):
        mask[row, slice(amount) if side == "left" else slice(-amount, None)] = True
    return mask


@dataclass
class Looped:
    """What the loops find for one row of a batch, no padding."""

    output: torch.Tensor  # [H, N, Dv]
    opened: list[list[set[int]]]  # of each key head and query block
    kept: dict[int, list[float]]  # of each sampled position, by head
    seen: torch.Tensor  # bool [H, N, N]


def in_loops(query, key, value, settings, sinks):
    """The definition, position by position, for one sequence `[H, N, D]` that is all queries."""
    s = settings
    heads, length = query.shape[:2]
    group = heads // key.shape[0]
    scores = [(query[h] @ key[h // group].T) * s.scale for h in range(heads)]

    def softmax(h, i, keys):
        top = max(scores[h][i, j].item() for j in keys)
        weights = {j: math.exp(scores[h][i, j].item() - top) for j in keys}
        return {j: weight / sum(weights.values()) for j, weight in weights.items()}

    def visible(i):
        return range(i + 1) if s.causal else range(length)

    sampled = [
        i
        for i in range(length)
        if (i % s.sample == 0 if s.strict else (i + 1) % s.sample == 0 or i == length - 1)
    ]
    rows = {(h, i): softmax(h, i, visible(i)) for h in range(heads) for i in sampled}
    result = Looped(
        torch.zeros(heads, length, value.shape[2], dtype=value.dtype),
        [[] for _ in range(key.shape[0])],
        {i: [0.0] * heads for i in sampled},
        torch.zeros(heads, length, length, dtype=torch.bool),
    )
    for key_head in range(key.shape[0]):
        mine = range(key_head * group, (key_head + 1) * group)
        for first in range(0, length, s.unit):
            last = min(first + s.unit, length)
            seen = set(range(max(0, first - s.near), last)) | {x for x in sinks if x < length}
            if not s.causal:
                seen |= set(range(last, min(length, first + s.unit + s.near)))
            may = range(last) if s.causal else range(length)
            seen &= set(may)
            back = s.block - s.unit
            choosers = [rows[h, i] for h in mine for i in sampled if first - back <= i < last]
            heavy = _heavy(s, choosers, seen, may)
            result.opened[key_head].append(heavy)
            seen |= {j for j in may if j // s.key_block in heavy}
            for h in mine:
                for i in range(first, last):
                    keys = [j for j in visible(i) if j in seen]
                    for j, weight in softmax(h, i, keys).items():
                        result.output[h, i] += weight * value[key_head, j]
                        result.seen[h, i, j] = True
                    if i in sampled:
                        result.kept[i][h] = sum(rows[h, i][j] for j in keys)
    return result


def _heavy(s, choosers, seen, may):
    mass, added = {}, {}
    for j in may:
        block = j // s.key_block
        here = sum(row.get(j, 0.0) for row in choosers)
        mass[block] = mass.get(block, 0.0) + here
        if j not in seen:
            added[block] = added.get(block, 0.0) + here
    candidates = sorted((b for b in added if mass[b] > 0), key=lambda b: (mass[b], b), reverse=True)
    if s.mass is None:
        return set(candidates[: s.heavy // s.key_block])
    kept = sum(row.get(j, 0.0) for row in choosers for j in seen)
    heavy = set()
    for block in candidates:
        if kept >= s.mass * len(choosers):
            break
        heavy.add(block)
        kept += added[block]
    return heavy

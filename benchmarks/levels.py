"""Decoding over a store of levels against softmax attention over dense caches: attention alone.

`polyscale bench levels` runs everything here and writes JSON, a Markdown table and a plot. One
token attends in the caches of all layers, one after the other, as a model would have it: what one
layer read is out of the processor's caches before it is read again.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.timing import best_seconds, machine
from polyscale.ops.levels import LevelSettings, LevelStore, level_attention

# Query heads, heads of keys, width: SmolLM2-135M and Qwen2.5-Coder-1.5B.
SHAPES = {"SmolLM2-135M": (9, 3, 64), "Qwen2.5-Coder-1.5B": (12, 2, 128)}
LAYERS = 30
STORES = {
    "(4, 4)": LevelSettings((4, 4)),
    "(4, 2)": LevelSettings((4, 2)),
    "(4, 4), 8bit": LevelSettings((4, 4), "8bit"),
}
DENSE = {"gqa": "SDPA, enable_gqa", "repeated": "SDPA, keys repeated"}
NEAR, SINKS, HEAVY = 64, 16, 64
# What is asked of the code: times faster than either dense cache, from so many tokens on.
BARS = {256: 0.97, 8192: 3.0, 32768: 5.0}
MEMORY_BAR = 0.27
Row = dict[str, Any]


def run(quick: bool = False, announce: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure everything; `quick` leaves out long caches."""
    torch.manual_seed(0)
    sizes = (256, 1024) if quick else (256, 512, 1024, 2048, 8192, 32768)
    rows = []
    for model in SHAPES:
        for size in sizes:
            announce(f"{model}, {size:,} tokens")
            rows.append(compare(model, size, rounds=3 if quick else 9 if size < 8192 else 4))
    return {
        "benchmark": "levels",
        "machine": machine(),
        "layers": LAYERS,
        "opened": {"near": NEAR, "sinks": SINKS, "heavy": HEAVY},
        "bars": {str(size): bar for size, bar in BARS.items()},
        "memory_bar": MEMORY_BAR,
        "rows": rows,
    }


def compare(model: str, size: int, rounds: int) -> Row:
    """One new token in the caches of all layers: seconds per layer, and bytes per layer."""
    heads, key_heads, width = SHAPES[model]
    layers = LAYERS if size <= 8192 else LAYERS // 3  # far more than the processor's caches hold
    keys, values = (
        [torch.randn(1, key_heads, size, width) for _ in range(layers)] for _ in range(2)
    )
    query = torch.randn(1, heads, 1, width)
    stores = {}
    for name, settings in STORES.items():
        stores[name] = [LevelStore.empty(1, key_heads, width, settings=settings) for _ in keys]
        for store, key, value in zip(stores[name], keys, values, strict=True):
            store.append(key, value)
    candidates: dict[str, Callable[[], object]] = {
        "gqa": partial(_dense, query, keys, values, 1),
        "repeated": partial(_dense, query, keys, values, heads // key_heads),
    }
    candidates |= {name: partial(_levels, query, kept) for name, kept in stores.items()}
    with torch.no_grad():
        seconds = best_seconds(candidates, rounds)
    dense = 2 * keys[0].numel() * keys[0].element_size()
    read = {}
    for name, kept in stores.items():
        parts = kept[0].bytes_read(NEAR + SINKS + HEAVY)
        read[name] = key_heads * sum(parts.values())
    return {
        "model": model,
        "heads": [heads, key_heads, width],
        "size": size,
        "bar": max((n for n in BARS if n <= size), default=None),
        "seconds": {name: total / layers for name, total in seconds.items()},
        "dense_bytes": dense,
        "bytes_held": {name: kept[0].bytes_held() for name, kept in stores.items()},
        "bytes_read": read,
    }


def _dense(query: Tensor, keys: list[Tensor], values: list[Tensor], repeats: int) -> None:
    for key, value in zip(keys, values, strict=True):
        if repeats == 1:
            scaled_dot_product_attention(query, key, value, enable_gqa=True)
        else:
            scaled_dot_product_attention(query, _repeat(key, repeats), _repeat(value, repeats))


def _repeat(x: Tensor, repeats: int) -> Tensor:
    """As transformers repeats keys and values."""
    batch, heads, size, width = x.shape
    wide = x[:, :, None].expand(batch, heads, repeats, size, width)
    return wide.reshape(batch, heads * repeats, size, width)


def _levels(query: Tensor, stores: list[LevelStore]) -> None:
    for store in stores:
        level_attention(query, store, near=NEAR, heavy=HEAVY)


def speedups(row: Row, name: str) -> dict[str, float]:
    """Times faster than each dense cache."""
    return {dense: row["seconds"][dense] / row["seconds"][name] for dense in DENSE}


def to_markdown(result: dict[str, Any]) -> str:
    """The tables that stand beside the JSON."""
    about, opened = result["machine"], result["opened"]
    lines = [
        "# Level attention: speed and memory",
        "",
        f"Attention alone, one new token, batch 1, float32, the caches of {result['layers']} "
        f"layers in turn (a third of them at 32,768 tokens); near {opened['near']}, sinks "
        f"{opened['sinks']}, heavy {opened['heavy']}. {about['processor']}, {about['threads']} "
        f"threads, torch {about['torch']}, {about['date']}. Candidates take turns in one process; "
        "the best time counts. Made by `polyscale bench levels`.",
        "",
        "Columns of stores: microseconds per layer, and times faster than SDPA with `enable_gqa` / "
        "than SDPA with the keys repeated.",
        "",
        "| heads | tokens | SDPA, gqa | SDPA, repeated | " + " | ".join(STORES) + " | target |",
        "|---|---|---|---|" + "---|" * (len(STORES) + 1),
    ]
    for row in result["rows"]:
        cells = [f"{1e6 * row['seconds'][name]:,.0f} us" for name in DENSE]
        for name in STORES:
            faster = speedups(row, name)
            cells.append(
                f"{1e6 * row['seconds'][name]:,.0f} us "
                f"({faster['gqa']:.2f}x / {faster['repeated']:.2f}x)"
            )
        bar = "" if row["bar"] is None else f"{result['bars'][str(row['bar'])]:g}x"
        heads = "/".join(map(str, row["heads"]))
        lines.append(f"| {heads} | {row['size']:,} | {' | '.join(cells)} | {bar} |")
    lines += [
        "",
        "Bytes of one layer, as a share of the dense float32 cache. Read: by one query, the coarse "
        f"level and what it opens. Target: at most {result['memory_bar']:g} held with 8bit.",
        "",
        "| heads | tokens | dense | " + " | ".join(f"{name}: held, read" for name in STORES) + " |",
        "|---|---|---|" + "---|" * len(STORES),
    ]
    for row in result["rows"]:
        dense = row["dense_bytes"]
        cells = [
            f"{row['bytes_held'][name] / dense:.3f}, {row['bytes_read'][name] / dense:.3f}"
            for name in STORES
        ]
        heads = "/".join(map(str, row["heads"]))
        lines.append(
            f"| {heads} | {row['size']:,} | {dense / 2**20:,.2f} MiB | {' | '.join(cells)} |"
        )
    return "\n".join(lines) + "\n"


def draw(result: dict[str, Any], path: Path) -> None:
    """Time against the length of the cache, both axes logarithmic."""
    from polyscale._extras import require

    figure = require("matplotlib.figure", "train", "a plot").Figure(
        figsize=(9, 4), layout="constrained"
    )
    for axes, model in zip(figure.subplots(1, len(SHAPES)), SHAPES, strict=True):
        rows = [row for row in result["rows"] if row["model"] == model]
        sizes = [row["size"] for row in rows]
        for name, label in (DENSE | {name: name for name in STORES}).items():
            style = "s--" if name in DENSE else "o-"
            axes.loglog(sizes, [row["seconds"][name] for row in rows], style, label=label)
        axes.set_xlabel("tokens in the cache")
        axes.set_ylabel("seconds, one token, one layer")
        axes.set_title(f"heads of {model}", loc="left")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path)

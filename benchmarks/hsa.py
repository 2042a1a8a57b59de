"""Speed and memory of HSA against softmax attention and against peers.

`polyscale bench hsa` runs everything here and writes JSON, a Markdown table and a plot.
"""

from __future__ import annotations

import math
import random
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.peers import compare_with_peers, peer_lines
from benchmarks.timing import (
    added_memory,
    best_seconds,
    fitted_exponent,
    machine,
    milliseconds,
)
from polyscale.layers.hsa import HSAAttention
from polyscale.layers.hsa_cache import HSACache
from polyscale.ops.hsa import hsa_attention
from polyscale.trees import SignalTree

HEADS, WIDTH = 8, 64
WINDOWS = (2, 4, 8, 16, 16, 16, 16)
DECODE_WINDOW = 16
Row = dict[str, Any]

# Targets by (case, N, pass): at least this many times faster than SDPA.
BARS = {
    ("blocks", 1024, "forward"): 1.0,
    ("blocks", 8192, "forward"): 10.0,
    ("blocks", 8192, "forward+backward"): 5.0,
    ("blocks", 65536, "forward"): 60.0,
    ("columns, causal", 65536, "forward"): 15.0,
    ("256 texts", 256, "forward"): 1.0,
}
EXPONENT_BAR = 1.15  # at most
DECODE_BAR = 2.0  # time per token at 65,536 over that at 1,024, at most


def run(quick: bool = False, announce: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure everything; `quick` measures small sizes only."""
    torch.manual_seed(0)
    sizes = (1024, 2048) if quick else (1024, 8192, 65536)
    rows = []
    for size in sizes:
        rounds = 3 if quick else {1024: 15, 8192: 9, 65536: 3}[size]
        announce(f"windows, N = {size:,}")
        rows.append(compare_windows(size, rounds=rounds))
        if size <= 8192:
            rows.append(compare_windows(size, grad=True, rounds=rounds))
        rows.append(compare_windows(size, tie="columns", rounds=rounds))
        rows.append(compare_windows(size, tie="columns", causal=True, rounds=rounds))
    texts = 16 if quick else 256
    announce(f"{texts} different text trees")
    rows.append(compare_texts(texts, rounds=3 if quick else 9))
    rows.append(compare_texts(texts, grad=True, rounds=3))
    for row in rows:
        row["speedup"] = row["sdpa_seconds"] / row["hsa_seconds"]
        row["bar"] = BARS.get((row["case"], row["size"], row["pass"]))
    forward = [row for row in rows if row["case"] == "blocks" and row["pass"] == "forward"]
    announce("layers and peers")
    layer_sizes = (1024,) if quick else (1024, 8192)
    announce("decoding")
    contexts = (256, 1024) if quick else (1024, 65536)
    return {
        "benchmark": "hsa",
        "machine": machine(),
        "heads": HEADS,
        "width": WIDTH,
        "windows": list(WINDOWS),
        "operation": rows,
        "exponent": fitted_exponent(
            [row["size"] for row in forward], [row["hsa_seconds"] for row in forward]
        ),
        "exponent_bar": EXPONENT_BAR,
        "layers": [
            entry for size in layer_sizes for entry in compare_layers(size, 3 if quick else 5)
        ],
        "decoding": [decode_seconds(context) for context in contexts],
        "decoding_bar": DECODE_BAR,
        "peak_bytes": {str(size): peak_bytes(size) for size in sizes},
    }


def compare_windows(
    size: int, *, tie: str = "blocks", causal: bool = False, grad: bool = False, rounds: int = 3
) -> Row:
    """`hsa_attention` on a tree of windows against `scaled_dot_product_attention`.

    Softmax attention costs the same for every head, so beyond 8,192 rows it is timed on one head
    and multiplied.
    """
    tree = SignalTree.from_windows(size, WINDOWS)
    ours = _inputs(1, HEADS, size, WIDTH, grad=grad)
    timed_heads = HEADS if size <= 8192 else 1
    theirs = _inputs(1, timed_heads, size, WIDTH, grad=grad)
    seconds = best_seconds(
        {
            "hsa": _step(
                lambda q, k, v: hsa_attention(q, k, v, tree, tie=tie, causal=causal), ours, grad
            ),
            "sdpa": _step(
                lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal),
                theirs,
                grad,
            ),
        },
        rounds,
    )
    return {
        "case": tie + (", causal" if causal else ""),
        "size": size,
        "pass": "forward+backward" if grad else "forward",
        "hsa_seconds": seconds["hsa"],
        "sdpa_seconds": seconds["sdpa"] * HEADS / timed_heads,
        "sdpa_heads_timed": timed_heads,
    }


def text_tree(rng: random.Random, tokens: int = 250) -> SignalTree:
    """A tree shaped like a text: paragraphs, sentences, tokens, a special token at either end."""
    parents = [-1, 0]
    left = max(3, round(rng.gauss(tokens, tokens / 6))) - 2
    while left > 0:
        parents.append(0)
        paragraph = len(parents) - 1
        for _ in range(rng.randint(1, 6)):
            if left <= 0:
                break
            parents.append(paragraph)
            length = min(left, max(1, round(rng.gauss(22, 10))))
            parents.extend([len(parents) - 1] * length)
            left -= length
    parents.append(0)
    return SignalTree.from_parents(parents)


def compare_texts(texts: int, *, grad: bool = False, rounds: int = 3) -> Row:
    """A batch of different text trees, packed, against SDPA on the padded batch with its mask."""
    rng = random.Random(0)
    trees = [text_tree(rng) for _ in range(texts)]
    forest = SignalTree.batch(trees)
    lengths = torch.tensor([tree.num_rows for tree in trees])
    longest = int(lengths.max())
    mask = (torch.arange(longest) < lengths[:, None])[:, None, None, :]
    ours = _inputs(HEADS, forest.num_rows, WIDTH, grad=grad)
    theirs = _inputs(texts, HEADS, longest, WIDTH, grad=grad)
    seconds = best_seconds(
        {
            "hsa": _step(lambda q, k, v: hsa_attention(q, k, v, forest), ours, grad),
            "sdpa": _step(
                lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask),
                theirs,
                grad,
            ),
        },
        rounds,
    )
    return {
        "case": f"{texts} texts",
        "size": texts,
        "pass": "forward+backward" if grad else "forward",
        "tokens": forest.num_rows,
        "padded_tokens": texts * longest,
        "hsa_seconds": seconds["hsa"],
        "sdpa_seconds": seconds["sdpa"],
        "sdpa_heads_timed": HEADS,
    }


def compare_layers(size: int, rounds: int) -> list[Row]:
    """HSA with both ties, and every peer."""
    d_model = HEADS * WIDTH
    tree = SignalTree.from_windows(size, WINDOWS)
    ours: dict[str, Callable[[Tensor], Tensor]] = {
        f"HSA, {tie}": partial(HSAAttention(d_model, HEADS, tie=tie), tree=tree)
        for tie in ("blocks", "columns")
    }
    return compare_with_peers(ours, size, d_model, HEADS, rounds)


def decode_seconds(context: int, tokens: int = 64, rounds: int = 5) -> Row:
    """Time per token of a causal layer whose cache holds `context` tokens already."""
    layer = HSAAttention(HEADS * WIDTH, HEADS, tie="columns", causal=True).eval()
    x = torch.randn(1, 1, HEADS * WIDTH)
    keys, values = (torch.randn(1, HEADS, context, WIDTH) for _ in range(2))
    closes = _closes(torch.arange(context + tokens), context + tokens)[None]

    best = math.inf
    with torch.no_grad():
        for _ in range(rounds + 1):
            cache = HSACache()
            cache.start(keys, values, closes[:, :context], torch.tensor([context]))
            begin = time.perf_counter()
            for t in range(context, context + tokens):
                layer(x, cache=cache, closes=closes[:, t : t + 1])
            best = min(best, time.perf_counter() - begin)
    return {"context": context, "seconds_per_token": best / tokens, "entries": cache.size}


def _closes(position: Tensor, longest: int) -> Tensor:
    """How many levels of equal windows close before each position."""
    closes = torch.zeros_like(position)
    size = DECODE_WINDOW
    while size < longest:
        closes += ((position % size == 0) & (position > 0)).long()
        size *= DECODE_WINDOW
    return closes


def peak_bytes(size: int) -> int:
    """What a forward and backward pass adds to the peak memory of a fresh process."""
    code = f"from benchmarks.hsa import _peak_here; print(_peak_here({size}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(run.stdout)


def _peak_here(size: int) -> int:
    def once(rows: int) -> None:
        tensors = _inputs(1, HEADS, rows, WIDTH, grad=True)
        tree = SignalTree.from_windows(rows, WINDOWS)
        _step(lambda q, k, v: hsa_attention(q, k, v, tree), tensors, True)()

    once(64)
    return added_memory(lambda: once(size))


def _inputs(*shape: int, grad: bool) -> list[Tensor]:
    return [torch.randn(*shape).requires_grad_(grad) for _ in range(3)]


def _step(
    attend: Callable[[Tensor, Tensor, Tensor], Tensor], tensors: list[Tensor], grad: bool
) -> Callable[[], None]:
    def once() -> None:
        if not grad:
            with torch.no_grad():
                attend(*tensors)
            return
        output = attend(*tensors)
        torch.autograd.grad(output, tensors, output.detach())

    return once


def to_markdown(result: dict[str, Any]) -> str:
    """The tables that stand beside the JSON."""
    about = result["machine"]
    lines = [
        "# HSA: speed and memory",
        "",
        f"{result['heads']} heads of width {result['width']}, float32, {about['processor']}, "
        f"{about['threads']} threads, torch {about['torch']}, {about['date']}. Candidates take "
        "turns in one process; the best time counts. Made by `polyscale bench hsa`.",
        "",
        f"## The operation against scaled_dot_product_attention, windows {result['windows']}",
        "",
        "| case | N | pass | HSA | SDPA | speed-up | asked for |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["operation"]:
        scaled = "" if row["sdpa_heads_timed"] == result["heads"] else " (from 1 head)"
        bar = "" if row["bar"] is None else f"{row['bar']:g}x"
        lines.append(
            f"| {row['case']} | {row['size']:,} | {row['pass']} | "
            f"{milliseconds(row['hsa_seconds'])} | {milliseconds(row['sdpa_seconds'])}{scaled} | "
            f"{row['speedup']:.2f}x | {bar} |"
        )
    lines += [
        "",
        f"Time (blocks, forward) grows as N^{result['exponent']:.2f}; "
        f"asked for: at most {result['exponent_bar']}.",
        "",
        "| N | peak memory of forward+backward | per row |",
        "|---|---|---|",
    ]
    for size, count in result["peak_bytes"].items():
        per_row = count / int(size) / 1024
        lines.append(f"| {int(size):,} | {count / 2**20:,.0f} MiB | {per_row:.1f} KiB |")
    lines += [
        "",
        "## Decoding, one layer, windows of 16",
        "",
        "| context | time per token | entries in the cache |",
        "|---|---|---|",
    ]
    for row in result["decoding"]:
        micro = row["seconds_per_token"] * 1e6
        lines.append(f"| {row['context']:,} | {micro:,.0f} us | {row['entries']} |")
    ratio = result["decoding"][-1]["seconds_per_token"] / result["decoding"][0]["seconds_per_token"]
    lines += [
        "",
        f"The longest context takes {ratio:.2f} times as long per token as the shortest; asked "
        f"for: at most {result['decoding_bar']:g}.",
        "",
        "## Layers, projections included, forward",
        "",
        *peer_lines(result["layers"], "N"),
    ]
    return "\n".join(lines) + "\n"


def draw(result: dict[str, Any], path: Path) -> None:
    """Time against N, both axes logarithmic."""
    from polyscale._extras import require

    figure = require("matplotlib.figure", "train", "a plot").Figure(
        figsize=(6, 4), layout="constrained"
    )
    axes = figure.add_subplot()
    forward = [row for row in result["operation"] if row["pass"] == "forward"]
    for case in ("blocks", "columns", "columns, causal"):
        rows = [row for row in forward if row["case"] == case]
        sizes = [row["size"] for row in rows]
        axes.loglog(sizes, [row["hsa_seconds"] for row in rows], "o-", label=f"HSA, {case}")
        if case != "columns":
            label = "SDPA" + (", causal" if "causal" in case else "")
            axes.loglog(sizes, [row["sdpa_seconds"] for row in rows], "s--", label=label)
    axes.set_xlabel("N")
    axes.set_ylabel("seconds, forward")
    axes.set_title(f"HSA (blocks) grows as N^{result['exponent']:.2f}", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)

"""Speed and memory of HSA against softmax attention and against peers.

`polyscale bench hsa` runs everything here and writes JSON, a Markdown table and a plot.
"""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.hsa_report import draw, to_markdown
from benchmarks.hsa_texts import text_trees
from benchmarks.peers import compare_with_peers
from benchmarks.timing import added_memory, best_seconds, fitted_exponent, machine
from polyscale._memory import keep_freed_memory
from polyscale.layers.hsa import HSAAttention, HTELayer
from polyscale.layers.hsa_cache import HSACache
from polyscale.ops.hsa import hsa_attention
from polyscale.trees import SignalTree

__all__ = ["PARTS", "draw", "run", "to_markdown"]

HEADS, WIDTH = 8, 64
WINDOWS = (2, 4, 8, 16)
DECODE_WINDOW = 16
Row = dict[str, Any]

# Batch and length; and how many times faster than SDPA blocks (forward, and with backward) and
# causal columns (forward) are to be.
SHAPES = ((16, 64), (16, 128), (16, 256), (8, 512), (4, 1024), (2, 2048), (1, 4096), (1, 8192))
BLOCKS_BARS = (3.0, 6.0, 12.0, 20.0, 30.0, 50.0, 100.0, 150.0)
CAUSAL_BARS = (2.0, 4.0, 8.0, 10.0, 14.0, 20.0, 30.0, 50.0)
TEXTS_BAR = 6.0
STEP_BAR = 1.5
EXPONENT_BAR = 1.15  # at most
DECODE_BAR = 2.0  # time per token at 65,536 over that at 1,024, at most


def run(
    quick: bool = False,
    announce: Callable[[str], None] = print,
    parts: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Measure everything, or the named parts; `quick` leaves out what takes minutes."""
    torch.manual_seed(0)
    keep_freed_memory()
    result: dict[str, Any] = {
        "benchmark": "hsa",
        "machine": machine(),
        "heads": HEADS,
        "width": WIDTH,
        "windows": list(WINDOWS),
    }
    for name in PARTS if parts is None else parts:
        announce(name)
        result[name] = PARTS[name](quick)
    return result


def operation(quick: bool) -> list[Row]:
    """Both ties at every shape, forward and with backward."""
    rows = []
    for number, (batch, size) in enumerate(SHAPES[:3] if quick else SHAPES):
        blocks, causal = BLOCKS_BARS[number], CAUSAL_BARS[number]
        # Softmax attention over long texts takes seconds.
        rounds = 3 if quick else min(15, max(3, 8192 // size))
        for tie, causal_tie, grad, bar in (
            ("blocks", False, False, blocks),
            ("blocks", False, True, blocks),
            ("columns", False, False, None),
            ("columns", True, False, causal),
            ("columns", True, True, None),
        ):
            row = compare_windows(
                size, batch=batch, tie=tie, causal=causal_tie, grad=grad, rounds=rounds
            )
            rows.append({**row, "bar": bar})
    return rows


def texts(quick: bool) -> list[Row]:
    """Different trees, packed."""
    count = 16 if quick else 256
    rows = []
    for tie, grad in (("blocks", False), ("blocks", True), ("columns", False)):
        bar = TEXTS_BAR if tie == "blocks" and not grad else None
        rows.append({**compare_texts(count, tie=tie, grad=grad, rounds=3), "bar": bar})
    return rows


def growth(quick: bool) -> dict[str, Any]:
    """How time grows with N, forward."""
    sizes = (1024, 2048) if quick else (1024, 8192, 65536)
    seconds = []
    for size in sizes:
        tree = SignalTree.from_windows(size, (*WINDOWS, 16, 16, 16))
        tensors = _inputs(1, HEADS, size, WIDTH, grad=False)
        attend = partial(hsa_attention, tree=tree)
        step = _step(lambda q, k, v, attend=attend: attend(q, k, v), tensors, False)
        seconds.append(best_seconds({"hsa": step}, 5)["hsa"])
    exponent = fitted_exponent(sizes, seconds)
    return {"sizes": list(sizes), "seconds": seconds, "exponent": exponent, "bar": EXPONENT_BAR}


def layers(quick: bool) -> list[Row]:
    """Projections included, beside other efficient attentions."""
    sizes = (1024,) if quick else (1024, 8192)
    return [entry for size in sizes for entry in compare_layers(size, 3)]


def decoding(quick: bool) -> list[Row]:
    """One token at a time, beside a dense cache."""
    contexts = (256, 1024) if quick else (1024, 4096, 16384, 65536)
    return [decode_seconds(context) for context in contexts]


def memory(quick: bool) -> dict[str, int]:
    """What a forward and backward pass adds to the peak memory of a fresh process."""
    return {
        str(size): peak_bytes(size) for size in ((1024, 2048) if quick else (1024, 8192, 65536))
    }


def compare_windows(
    size: int,
    *,
    batch: int = 1,
    tie: str = "blocks",
    causal: bool = False,
    grad: bool = False,
    rounds: int = 3,
) -> Row:
    """`hsa_attention` on a tree of windows against `scaled_dot_product_attention`, and a copy."""
    tree = SignalTree.from_windows(size, WINDOWS)
    tensors = _inputs(batch, HEADS, size, WIDTH, grad=grad)
    read, written = tensors[0].detach().clone(), torch.empty_like(tensors[0])
    seconds = best_seconds(
        {
            "hsa": _step(
                lambda q, k, v: hsa_attention(q, k, v, tree, tie=tie, causal=causal), tensors, grad
            ),
            "sdpa": _step(
                lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=causal),
                tensors,
                grad,
            ),
            # Reads one and writes one of the four.
            "copy": lambda: written.copy_(read),
        },
        rounds,
    )
    return {
        "case": tie + (", causal" if causal else ""),
        "batch": batch,
        "size": size,
        "pass": "forward+backward" if grad else "forward",
        "hsa_seconds": seconds["hsa"],
        "sdpa_seconds": seconds["sdpa"],
        "limit_seconds": 2 * seconds["copy"],
        "speedup": seconds["sdpa"] / seconds["hsa"],
    }


def training_step(quick: bool) -> Row:
    """Two layers of a small tree encoder on different texts, against its flat twin.

    The twin has the same weights and attends with SDPA over the padded batch.
    """
    count, width, heads = (8 if quick else 64), 128, 4
    trees, source = text_trees(count)
    forest = SignalTree.batch(trees)
    lengths = torch.tensor([tree.num_rows for tree in trees])
    longest = int(lengths.max())
    mask = (torch.arange(longest) < lengths[:, None])[:, None, None, :]
    ours = nn.ModuleList(HTELayer(width, heads) for _ in range(2))
    theirs = nn.ModuleList(_FlatLayer(width, heads) for _ in range(2))
    packed, padded = torch.randn(forest.num_rows, width), torch.randn(count, longest, width)

    def step(layers: nn.ModuleList, x: Tensor, *structure: Any) -> None:
        for layer in layers:
            x = layer(x, *structure)
        x.square().mean().backward()

    seconds = best_seconds(
        {
            "hsa": lambda: step(ours, packed, forest),
            "flat": lambda: step(theirs, padded, mask),
        },
        3,
    )
    return {
        "texts": count,
        "source": source,
        "tokens": forest.num_rows,
        "padded_tokens": count * longest,
        "hsa_seconds": seconds["hsa"],
        "flat_seconds": seconds["flat"],
        "speedup": seconds["flat"] / seconds["hsa"],
        "bar": STEP_BAR,
    }


class _FlatLayer(nn.Module):
    """An `HTELayer` whose attention is softmax over the padded batch."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.project = heads, nn.Linear(width, 3 * width)
        self.merge, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        parts = self.project(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        query, key = (nn.functional.layer_norm(part, part.shape[-1:]) for part in parts[:2])
        attended = scaled_dot_product_attention(query, key, parts[2], attn_mask=mask) + query
        x = self.norm(self.merge(attended.transpose(1, 2).flatten(2)))
        return x + self.mlp(x)


def compiled(quick: bool) -> list[Row]:
    """`torch.compile`d: the operation, and flex_attention without a mask as the dense peer."""
    from torch.nn.attention.flex_attention import flex_attention

    size = 512 if quick else 4096
    tree = SignalTree.from_windows(size, WINDOWS)
    tensors = _inputs(1, HEADS, size, WIDTH, grad=False)
    ours = torch.compile(lambda q, k, v: hsa_attention(q, k, v, tree))
    flex = torch.compile(flex_attention)
    seconds = best_seconds(
        {
            "hsa": _step(lambda q, k, v: hsa_attention(q, k, v, tree), tensors, False),
            "hsa, compiled": _step(ours, tensors, False),
            "sdpa": _step(scaled_dot_product_attention, tensors, False),
            "flex_attention, compiled": _step(flex, tensors, False),
        },
        3,
    )
    return [{"name": name, "size": size, "seconds": found} for name, found in seconds.items()]


def compare_texts(texts: int, *, tie: str = "blocks", grad: bool = False, rounds: int = 3) -> Row:
    """A batch of different text trees, packed, against SDPA on the padded batch with its mask."""
    trees, source = text_trees(texts)
    forest = SignalTree.batch(trees)
    lengths = torch.tensor([tree.num_rows for tree in trees])
    longest = int(lengths.max())
    mask = (torch.arange(longest) < lengths[:, None])[:, None, None, :]
    ours = _inputs(HEADS, forest.num_rows, WIDTH, grad=grad)
    theirs = _inputs(texts, HEADS, longest, WIDTH, grad=grad)
    seconds = best_seconds(
        {
            "hsa": _step(lambda q, k, v: hsa_attention(q, k, v, forest, tie=tie), ours, grad),
            "sdpa": _step(
                lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=mask),
                theirs,
                grad,
            ),
        },
        rounds,
    )
    return {
        "case": f"{texts} texts, {tie}",
        "size": texts,
        "source": source,
        "pass": "forward+backward" if grad else "forward",
        "tokens": forest.num_rows,
        "padded_tokens": texts * longest,
        "hsa_seconds": seconds["hsa"],
        "sdpa_seconds": seconds["sdpa"],
        "speedup": seconds["sdpa"] / seconds["hsa"],
    }


def compare_layers(size: int, rounds: int) -> list[Row]:
    """HSA with both ties, and every peer."""
    d_model = HEADS * WIDTH
    tree = SignalTree.from_windows(size, (*WINDOWS, 16, 16, 16))
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
    return {
        "context": context,
        "seconds_per_token": best / tokens,
        "dense_seconds_per_token": _dense_seconds(layer, x, keys, values, tokens, rounds),
        "entries": cache.size,
    }


def chunked(quick: bool) -> list[Row]:
    """Several new tokens at once over a cache, beside the same tokens one after the other."""
    context, sizes = (256, (16,)) if quick else (16384, (16, 64, 256, 1024))
    return [chunk_seconds(context, size) for size in sizes]


def chunk_seconds(context: int, tokens: int, rounds: int = 3) -> Row:
    """Time of a causal layer for a chunk of tokens after `context` others."""
    layer = HSAAttention(HEADS * WIDTH, HEADS, tie="columns", causal=True).eval()
    x = torch.randn(1, tokens, HEADS * WIDTH)
    keys, values = (torch.randn(1, HEADS, context, WIDTH) for _ in range(2))
    closes = _closes(torch.arange(context + tokens), context + tokens)[None]

    def feed(step: int) -> float:
        cache = HSACache()
        cache.start(keys, values, closes[:, :context], torch.tensor([context]))
        begin = time.perf_counter()
        for t in range(0, tokens, step):
            now = closes[:, context + t : context + t + step]
            layer(x[:, t : t + step], cache=cache, closes=now)
        return time.perf_counter() - begin

    with torch.no_grad():
        seconds = {step: min(feed(step) for _ in range(rounds + 1)) for step in (tokens, 1)}
    return {
        "context": context,
        "tokens": tokens,
        "seconds": seconds[tokens],
        "stepwise_seconds": seconds[1],
        "speedup": seconds[1] / seconds[tokens],
    }


def _dense_seconds(
    layer: HSAAttention, x: Tensor, keys: Tensor, values: Tensor, tokens: int, rounds: int
) -> float:
    """Time per token of softmax attention with the same projections and a cache of all tokens."""
    context = keys.shape[2]
    room = [torch.zeros(1, HEADS, context + tokens, WIDTH) for _ in range(2)]
    for kept, part in zip(room, (keys, values), strict=True):
        kept[:, :, :context] = part
    best = math.inf
    with torch.no_grad():
        for _ in range(rounds + 1):
            begin = time.perf_counter()
            for t in range(context, context + tokens):
                query, key, value = layer._project(x, None)
                room[0][:, :, t : t + 1], room[1][:, :, t : t + 1] = key, value
                attended = scaled_dot_product_attention(
                    query, room[0][:, :, : t + 1], room[1][:, :, : t + 1]
                )
                layer.out_proj(attended.transpose(1, 2).flatten(2))
            best = min(best, time.perf_counter() - begin)
    return best / tokens


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


def _step(attend: Callable[..., Any], tensors: list[Tensor], grad: bool) -> Callable[[], None]:
    def once() -> None:
        if not grad:
            with torch.no_grad():
                attend(*tensors)
            return
        output = attend(*tensors)
        torch.autograd.grad(output, tensors, output.detach())

    return once


PARTS: dict[str, Callable[[bool], Any]] = {
    "operation": operation,
    "texts": texts,
    "growth": growth,
    "training_step": training_step,
    "decoding": decoding,
    "chunked": chunked,
    "layers": layers,
    "compiled": compiled,
    "memory": memory,
}

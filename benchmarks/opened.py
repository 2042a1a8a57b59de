"""Speed, memory and choice of opened attention against softmax attention and against peers.

`polyscale bench opened` runs everything here and writes JSON, a Markdown table and a plot.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.opened_peers import (
    CHOOSERS,
    kept_by,
    open_by,
    places_of,
    settings_of,
    streaming,
)
from benchmarks.opened_tables import draw, to_markdown
from benchmarks.timing import added_memory, best_seconds, machine
from polyscale.ops.hsa import hsa_attention
from polyscale.ops.opened import opened_attention
from polyscale.ops.opened.flex import block_mask
from polyscale.trees import SignalTree

__all__ = ["draw", "run", "to_markdown"]

HEADS, KEY_HEADS, WIDTH = 9, 3, 64
WINDOWS = (16, 16, 16, 16)
LONGEST_WITH_ALL_HEADS = 32768  # beyond it SDPA is timed on one head and multiplied
Row = dict[str, Any]

# What is asked of the code, as (N, pass): at least this many times faster than SDPA.
BARS = {
    (2048, "forward"): 1.3,
    (8192, "forward"): 4.0,
    (32768, "forward"): 7.0,
    (8192, "forward+backward"): 4.0,
}
FLOPS_BAR = 1.6  # times what its products take at SDPA's own rate, at most


def run(quick: bool = False, announce: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure everything; `quick` leaves out what takes minutes."""
    torch.manual_seed(0)
    sizes = (1024, 2048) if quick else (1024, 2048, 8192, 32768, 65536)
    rows = []
    for size in sizes:
        announce(f"N = {size:,}")
        rounds = {1024: 9, 2048: 9, 8192: 3}.get(size, 1)
        rows.append(compare(size, rounds=rounds))
        if size <= 8192:
            rows.append(compare(size, grad=True, rounds=min(rounds, 3)))
    for row in rows:
        row["bar"] = BARS.get((row["size"], row["pass"]))
    announce("ways to choose")
    return {
        "benchmark": "opened",
        "machine": machine(),
        "heads": HEADS,
        "key_heads": KEY_HEADS,
        "width": WIDTH,
        "operation": rows,
        "flops_bar": FLOPS_BAR,
        "endings": [compare_endings(size) for size in ((1024,) if quick else (4096, 8192))],
        "flex": [compare_flex(size) for size in sizes],
        "choices": compare_choices(1024 if quick else 2048),
        "peak_bytes": {str(size): peak_bytes(size) for size in sizes},
    }


def inputs(size: int, heads: int = HEADS, key_heads: int = KEY_HEADS) -> list[Tensor]:
    """Query, key and value of normally distributed numbers."""
    return [torch.randn(1, n, size, WIDTH) for n in (heads, key_heads, key_heads)]


def compare(size: int, *, grad: bool = False, rounds: int = 3) -> Row:
    """`opened_attention`, causal, with its defaults, against SDPA on expanded keys, and HSA."""
    ours = [x.requires_grad_(grad) for x in inputs(size)]
    timed_heads = HEADS if size <= LONGEST_WITH_ALL_HEADS else 1
    group = HEADS // KEY_HEADS
    theirs = [ours[0], *(x.repeat_interleave(group, 1) for x in ours[1:])]
    theirs = [x[:, :timed_heads].detach().contiguous().requires_grad_(grad) for x in theirs]
    tree = SignalTree.from_windows(size, WINDOWS)
    seconds = best_seconds(
        {
            "opened": _step(opened_attention, ours, grad),
            "strict": _step(partial(opened_attention, strict=True), ours, grad),
            "sdpa": _step(
                lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True),
                theirs,
                grad,
            ),
            "hsa": _step(
                lambda q, k, v: hsa_attention(q, k, v, tree, tie="columns", causal=True),
                theirs,
                grad,
            ),
        },
        rounds,
    )
    with torch.no_grad():
        _, audit = opened_attention(*ours, return_audit=True)
        _, strict = opened_attention(*ours, strict=True, return_audit=True)
    sdpa = seconds["sdpa"] * HEADS / timed_heads
    # Of SDPA's products, which are 2 for each pair: the sampled scores and those of the views.
    products = (1 / 16 + audit.share * (3.5 if grad else 1)) / (3.5 if grad else 1)
    return {
        "size": size,
        "pass": "forward+backward" if grad else "forward",
        "opened_seconds": seconds["opened"],
        "sdpa_seconds": sdpa,
        "hsa_seconds": seconds["hsa"] * HEADS / timed_heads,
        "strict_seconds": seconds["strict"],
        "strict_share": strict.share,
        "strict_kept": float(strict.kept.mean()),
        "heads_timed": timed_heads,
        "speedup": sdpa / seconds["opened"],
        "share": audit.share,
        "kept": float(audit.kept.mean()),
        "kl": float(audit.kl.mean()),
        "of_its_products": seconds["opened"] / (sdpa * products),
    }


def compare_endings(size: int, last: int = 128) -> Row:
    """The last positions as a part of the prompt with a finer sample, or densely."""
    query, key, value = inputs(size)
    ending = query[:, :, -last:]
    wide_key, wide_value = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key, value))
    seen = torch.arange(size) <= torch.arange(size - last, size)[:, None]
    with torch.no_grad():
        seconds = best_seconds(
            {
                "whole": lambda: opened_attention(query, key, value),
                "sample_8": lambda: opened_attention(ending, key, value),
                "sample_4": lambda: opened_attention(ending, key, value, sample=4),
                "dense": lambda: scaled_dot_product_attention(
                    ending, wide_key, wide_value, attn_mask=seen
                ),
            }
        )
    return {"size": size, **{f"{name}_seconds": value for name, value in seconds.items()}}


def compare_flex(size: int) -> Row:
    """Torch's compiled flex_attention with the same choice as a block mask."""
    from torch.nn.attention.flex_attention import flex_attention

    query, key, value = inputs(size)
    with torch.no_grad():
        _, audit = opened_attention(query, key, value, return_audit=True)
        opened, heads = audit.opened, HEADS
        if size > LONGEST_WITH_ALL_HEADS:  # one group of heads, and multiplied
            heads, opened = HEADS // KEY_HEADS, opened[:, :1]
        mask = block_mask(opened, heads, audit.places, audit.settings)
        compiled = torch.compile(flex_attention, dynamic=False)
        wide_key, wide_value = (
            x.repeat_interleave(HEADS // KEY_HEADS, 1)[:, :heads] for x in (key, value)
        )
        timed_query = query[:, :heads].contiguous()
        seconds = best_seconds(
            {
                "flex": lambda: compiled(timed_query, wide_key, wide_value, block_mask=mask),
                "opened": lambda: opened_attention(query, key, value),
            },
            rounds=2 if size <= 8192 else 1,
        )
    return {
        "size": size,
        "flex_seconds": seconds["flex"] * HEADS / heads,
        "opened_seconds": seconds["opened"],
        "heads_timed": heads,
        "tiles": float(mask.to_dense().float().mean()),
    }


def grouped_tokens(size: int, *, steady: bool, topics: int = 64) -> list[Tensor]:
    """Query and key of a made-up text: runs of tokens about one topic, queries that ask for one.

    What is asked for stays for a run of tokens (`steady`), or changes from token to token. Not a
    language model: it tells ways to choose apart, and by how much in a model it does not say.
    """
    generator = torch.Generator().manual_seed(0)

    def runs(length: int) -> Tensor:
        drawn = torch.randint(topics, (size // length + 1,), generator=generator)
        return drawn.repeat_interleave(length)[:size]

    centres = torch.randn(KEY_HEADS, topics, WIDTH, generator=generator)
    topic, asked = runs(12), runs(24)
    if not steady:
        asked = torch.where(torch.rand(size, generator=generator) < 0.5, topic, asked)
    noise = [
        torch.randn(1, heads, size, WIDTH, generator=generator) for heads in (HEADS, KEY_HEADS)
    ]
    query = centres[:, asked].repeat_interleave(HEADS // KEY_HEADS, 0)[None] + 0.8 * noise[0]
    return [query, centres[:, topic][None] + noise[1]]


def compare_choices(size: int) -> list[Row]:
    """The mass of all queries that each way to choose keeps, at an equal number of key blocks."""
    with torch.no_grad():
        return [
            row
            for steady in (True, False)
            for heavy in (128, 256, 512)
            for row in _compare_choices(size, heavy, steady)
        ]


def _compare_choices(size: int, heavy: int, steady: bool) -> list[Row]:
    query, key = grouped_tokens(size, steady=steady)
    chosen = settings_of(WIDTH, heavy=heavy)
    found = {
        name: kept_by(open_by(chooser, query, key, chosen), query, key, chosen)
        for name, chooser in CHOOSERS.items()
    }
    near = streaming(chosen)
    shape = places_of(query).query_blocks(near)[1], places_of(query).key_blocks(near)[1]
    nothing = torch.zeros(1, KEY_HEADS, *shape, dtype=torch.bool)
    found["near and sinks (streaming)"] = kept_by(nothing, query, key, near)
    rows = []
    for name, kept in found.items():
        late = kept[..., size // 2 :]  # rows that do not see nearly everything anyway
        worst = float(late.flatten().kthvalue(late.numel() // 100)[0])
        mean = float(late.mean())
        rows.append(
            {
                "steady": steady,
                "heavy": heavy,
                "chooser": name,
                "kept": mean,
                "worst_percent": worst,
            }
        )
    return rows


def peak_bytes(size: int) -> int:
    """What a forward pass adds to the peak memory of a fresh process."""
    code = f"from benchmarks.opened import _peak_here; print(_peak_here({size}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(run.stdout)


def _peak_here(size: int) -> int:
    opened_attention(*inputs(64))
    tensors = inputs(size)
    return added_memory(lambda: opened_attention(*tensors))


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

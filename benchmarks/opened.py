"""Speed, memory and choice of opened attention against softmax attention and against peers.

`polyscale bench opened` runs everything here and writes JSON, a Markdown table and a plot.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
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
from benchmarks.timing import added_memory, best_seconds, machine, milliseconds
from polyscale.ops.hsa import hsa_attention
from polyscale.ops.opened import opened_attention
from polyscale.ops.opened.flex import block_mask
from polyscale.trees import SignalTree

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


def run(quick: bool = False, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure everything; `quick` leaves out what takes minutes."""
    torch.manual_seed(0)
    sizes = (1024, 2048) if quick else (1024, 2048, 8192, 32768, 65536)
    rows = []
    for size in sizes:
        say(f"N = {size:,}")
        rounds = {1024: 9, 2048: 9, 8192: 3}.get(size, 1)
        rows.append(compare(size, rounds=rounds))
        if size <= 8192:
            rows.append(compare(size, grad=True, rounds=min(rounds, 3)))
    for row in rows:
        row["bar"] = BARS.get((row["size"], row["pass"]))
    say("ways to choose")
    return {
        "benchmark": "opened",
        "machine": machine(),
        "heads": HEADS,
        "key_heads": KEY_HEADS,
        "width": WIDTH,
        "operation": rows,
        "flops_bar": FLOPS_BAR,
        "flex": [compare_flex(size) for size in ((1024,) if quick else (2048, 8192))],
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
    sdpa = seconds["sdpa"] * HEADS / timed_heads
    # Of SDPA's products, which are 2 for each pair: the sampled scores and those of the views.
    products = (1 / 16 + audit.share * (3.5 if grad else 1)) / (3.5 if grad else 1)
    return {
        "size": size,
        "pass": "forward+backward" if grad else "forward",
        "opened_seconds": seconds["opened"],
        "sdpa_seconds": sdpa,
        "hsa_seconds": seconds["hsa"] * HEADS / timed_heads,
        "heads_timed": timed_heads,
        "speedup": sdpa / seconds["opened"],
        "share": audit.share,
        "kept": float(audit.kept.mean()),
        "kl": float(audit.kl.mean()),
        "of_its_products": seconds["opened"] / (sdpa * products),
    }


def compare_flex(size: int) -> Row:
    """Torch's compiled flex_attention with the same choice as a block mask."""
    from torch.nn.attention.flex_attention import flex_attention

    query, key, value = inputs(size)
    with torch.no_grad():
        _, audit = opened_attention(query, key, value, return_audit=True)
        mask = block_mask(audit.opened, HEADS, audit.places, audit.settings)
        compiled = torch.compile(flex_attention, dynamic=False)
        wide_key, wide_value = (x.repeat_interleave(HEADS // KEY_HEADS, 1) for x in (key, value))
        seconds = best_seconds(
            {
                "flex": lambda: compiled(query, wide_key, wide_value, block_mask=mask),
                "opened": lambda: opened_attention(query, key, value),
            },
            rounds=2,
        )
    tiles = mask.to_dense().float().mean()
    return {
        "size": size,
        "flex_seconds": seconds["flex"],
        "opened_seconds": seconds["opened"],
        "tiles": float(tiles),
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


def to_markdown(result: dict[str, Any]) -> str:
    """The tables that stand beside the JSON."""
    about = result["machine"]
    lines = [
        "# Opened attention: speed, memory and choice",
        "",
        f"{result['heads']} heads, {result['key_heads']} of keys, width {result['width']}, causal, "
        f"the defaults, float32, {about['processor']}, {about['threads']} threads, torch "
        f"{about['torch']}, {about['date']}. Candidates take turns in one process; the best time "
        "counts. SDPA and HSA have their keys expanded outside of the clock. Made by `polyscale "
        "bench opened`.",
        "",
        "| N | pass | opened | SDPA | speed-up | target | of its products | HSA, columns | share |"
        " kept |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["operation"]:
        scaled = "" if row["heads_timed"] == result["heads"] else " (from 1 head)"
        bar = "" if row["bar"] is None else f"{row['bar']:g}x"
        lines.append(
            f"| {row['size']:,} | {row['pass']} | {milliseconds(row['opened_seconds'])} | "
            f"{milliseconds(row['sdpa_seconds'])}{scaled} | {row['speedup']:.2f}x | {bar} | "
            f"{row['of_its_products']:.2f} | {milliseconds(row['hsa_seconds'])}{scaled} | "
            f"{row['share']:.1%} | {row['kept']:.3f} |"
        )
    lines += [
        "",
        "*Of its products*: the time over what selection and attention would take at SDPA's own "
        f"rate; the target is at most {result['flops_bar']:g}. *Share* and *kept*, the audit's, "
        "are those of normally distributed numbers, which have no heavy keys: what a model keeps "
        "is another matter.",
        "",
        "| N | peak memory of a forward pass | per position |",
        "|---|---|---|",
    ]
    for size, count in result["peak_bytes"].items():
        lines.append(
            f"| {int(size):,} | {count / 2**20:,.0f} MiB | {count / int(size) / 1024:.1f} KiB |"
        )
    lines += [
        "",
        "## The same choice in torch's compiled flex_attention, on this CPU",
        "",
        "| N | flex_attention, its block mask given | opened, choice included | tiles of 128 |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['size']:,} | {milliseconds(row['flex_seconds'])} | "
        f"{milliseconds(row['opened_seconds'])} | {row['tiles']:.1%} |"
        for row in result["flex"]
    ]
    return "\n".join([*lines, "", *choice_lines(result["choices"])]) + "\n"


def choice_lines(choices: list[Row]) -> list[str]:
    """What each way to choose keeps."""
    cases = sorted({(not row["steady"], row["heavy"]) for row in choices})
    head = [f"{'changing' if other else 'steady'}, heavy {heavy}" for other, heavy in cases]
    lines = [
        "## Ways to choose, at an equal number of key blocks",
        "",
        "A made-up text: runs of tokens about one topic, and queries that ask for one, the same "
        "for a run of tokens (steady) or another from token to token (changing), where a sample "
        "says little about the queries beside it. Queries of the second half: the mean softmax "
        "mass kept, and that of the worst hundredth.",
        "",
        "| chosen by | " + " | ".join(head) + " |",
        "|---|" + "---|" * len(cases),
    ]
    for name in dict.fromkeys(row["chooser"] for row in choices):
        mine = {(not row["steady"], row["heavy"]): row for row in choices if row["chooser"] == name}
        cells = [f"{mine[case]['kept']:.3f}, {mine[case]['worst_percent']:.3f}" for case in cases]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def draw(result: dict[str, Any], path: Path) -> None:
    """Time against N, both axes logarithmic."""
    from polyscale._extras import require

    figure = require("matplotlib.figure", "train", "a plot").Figure(
        figsize=(6, 4), layout="constrained"
    )
    axes = figure.add_subplot()
    for name, label, style in (
        ("opened_seconds", "opened", "o-"),
        ("sdpa_seconds", "SDPA", "s--"),
        ("hsa_seconds", "HSA, columns", "^:"),
    ):
        rows = [row for row in result["operation"] if row["pass"] == "forward"]
        axes.loglog([row["size"] for row in rows], [row[name] for row in rows], style, label=label)
    axes.set_xlabel("N")
    axes.set_ylabel("seconds, forward")
    axes.set_title("Opened attention, defaults, causal", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)

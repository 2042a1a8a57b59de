"""The tables and the plot of `benchmarks.hsa`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peers import peer_lines
from benchmarks.timing import milliseconds


def _bar(bar: float | None) -> str:
    return "" if bar is None else f"{bar:g}x"


def to_markdown(result: dict[str, Any]) -> str:
    """The tables that stand beside the JSON."""
    about = result["machine"]
    lines = [
        "# HSA: speed and memory",
        "",
        f"{result['heads']} heads of width {result['width']}, float32, {about['processor']}, "
        f"{about['threads']} threads, torch {about['torch']}, {about['date']}. Candidates take "
        "turns in one process; the best time counts. Made by `polyscale bench hsa`.",
    ]
    for name, table in _TABLES.items():
        if name in result:
            lines += ["", *table(result[name], result)]
    return "\n".join(lines) + "\n"


def _operation(rows: list[dict[str, Any]], result: dict[str, Any]) -> list[str]:
    lines = [
        f"## The operation against scaled_dot_product_attention, windows {result['windows']}",
        "",
        "The limit is reading q, k and v and writing the output once, as a copy does.",
        "",
        "| case | batch x N | pass | HSA | SDPA | speed-up | target | limit |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['case']} | {row['batch']} x {row['size']:,} | {row['pass']} | "
        f"{row['hsa_seconds'] * 1e3:,.2f} ms | {milliseconds(row['sdpa_seconds'])} | "
        f"{row['speedup']:.1f}x | {_bar(row['bar'])} | {row['limit_seconds'] * 1e3:,.2f} ms |"
        for row in rows
    ]
    return lines


def _texts(rows: list[dict[str, Any]], result: dict[str, Any]) -> list[str]:
    lines = [
        "## Different text trees, packed, against SDPA on the padded batch",
        "",
        f"{rows[0]['size']} {rows[0]['source']}.",
        "",
        "| case | tokens | pass | HSA | SDPA | speed-up | target |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['case']} | {row['tokens']:,} | {row['pass']} | "
        f"{milliseconds(row['hsa_seconds'])} | {milliseconds(row['sdpa_seconds'])} | "
        f"{row['speedup']:.1f}x | {_bar(row['bar'])} |"
        for row in rows
    ]
    return lines


def _growth(found: dict[str, Any], result: dict[str, Any]) -> list[str]:
    times = ", ".join(
        f"{milliseconds(seconds)} at {size:,}"
        for size, seconds in zip(found["sizes"], found["seconds"], strict=True)
    )
    return [
        f"Time (blocks, forward, one text) grows as N^{found['exponent']:.2f} ({times}); the "
        f"target is at most {found['bar']}.",
    ]


def _memory(found: dict[str, int], result: dict[str, Any]) -> list[str]:
    lines = ["| N | peak memory of forward+backward | per row |", "|---|---|---|"]
    for size, count in found.items():
        per_row = count / int(size) / 1024
        lines.append(f"| {int(size):,} | {count / 2**20:,.0f} MiB | {per_row:.1f} KiB |")
    return lines


def _step(row: dict[str, Any], result: dict[str, Any]) -> list[str]:
    return [
        f"A training step of two small tree encoder layers on {row['texts']} {row['source']} "
        f"({row['tokens']:,} tokens, {row['padded_tokens']:,} padded) takes "
        f"{milliseconds(row['hsa_seconds'])}, its flat twin {milliseconds(row['flat_seconds'])}: "
        f"{row['speedup']:.2f}x, the target is {row['bar']:g}x.",
    ]


def _decoding(rows: list[dict[str, Any]], result: dict[str, Any]) -> list[str]:
    lines = [
        "## Decoding, one layer, windows of 16",
        "",
        "| context | time per token | with a dense cache | entries in the cache |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['context']:,} | {row['seconds_per_token'] * 1e6:,.0f} us | "
        f"{row['dense_seconds_per_token'] * 1e6:,.0f} us | {row['entries']} |"
        for row in rows
    ]
    return lines


def _chunked(rows: list[dict[str, Any]], result: dict[str, Any]) -> list[str]:
    lines = [
        f"## Several new tokens at once after {rows[0]['context']:,}, one layer, windows of 16",
        "",
        "| new tokens | at once | one after the other | speed-up |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {row['tokens']:,} | {milliseconds(row['seconds'])} | "
        f"{milliseconds(row['stepwise_seconds'])} | {row['speedup']:.1f}x |"
        for row in rows
    ]
    return lines


def _compiled(rows: list[dict[str, Any]], result: dict[str, Any]) -> list[str]:
    lines = ["## Compiled, forward, one text", "", "| what | N | time |", "|---|---|---|"]
    lines += [f"| {r['name']} | {r['size']:,} | {milliseconds(r['seconds'])} |" for r in rows]
    return lines


def _layers(rows: list[dict[str, Any]], result: dict[str, Any]) -> list[str]:
    return ["## Layers, projections included, forward", "", *peer_lines(rows, "N")]


_TABLES: dict[str, Callable[[Any, dict[str, Any]], list[str]]] = {
    "operation": _operation,
    "texts": _texts,
    "growth": _growth,
    "memory": _memory,
    "training_step": _step,
    "decoding": _decoding,
    "chunked": _chunked,
    "compiled": _compiled,
    "layers": _layers,
}


def draw(result: dict[str, Any], path: Path) -> None:
    """Speed-up against N, with the targets."""
    from polyscale._extras import require

    figure = require("matplotlib.figure", "train", "a plot").Figure(
        figsize=(6, 4), layout="constrained"
    )
    axes = figure.add_subplot()
    for case, passed in (
        ("blocks", "forward"),
        ("blocks", "forward+backward"),
        ("columns, causal", "forward"),
    ):
        rows = [r for r in result["operation"] if r["case"] == case and r["pass"] == passed]
        sizes = [row["size"] for row in rows]
        (line,) = axes.loglog(sizes, [r["speedup"] for r in rows], "o-", label=f"{case}, {passed}")
        axes.loglog(sizes, [r["bar"] for r in rows], ":", color=line.get_color())
    axes.set_xlabel("N")
    axes.set_ylabel("times as fast as SDPA")
    axes.set_title("HSA against softmax attention; targets dotted", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)

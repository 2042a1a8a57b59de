"""The HKT benchmark as Markdown tables and a plot, with its targets."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.hkt_accuracy import accuracy_lines
from benchmarks.hkt_limits import downsampling_bytes, step_flops_by_part
from benchmarks.peers import peer_lines
from benchmarks.timing import milliseconds

# Targets: (median, largest) ratio of the time to that of SDPA.
BARS = {"forward": (1.00, 1.15), "forward+backward": (1.10, 1.25)}
TRAINING_BAR = 1.15  # a step with three levels over one with one level, at most
DECODE_BAR = 0.75  # tokens per second at 8,192, three levels over one, at least
MEMORY_BAR = 1.5  # extra peak at T = 8,192 over that of SDPA, at most


def to_markdown(result: dict[str, Any]) -> str:
    """The tables of the benchmark as Markdown."""
    about = result["machine"]
    lines = [
        "# HKT: speed and memory",
        "",
        f"{result['levels']} levels, float32, {about['processor']}, {about['threads']} threads, "
        f"torch {about['torch']}, {about['date']}. Candidates take turns in one process; the best "
        "time counts. Made by `polyscale bench hkt`.",
        "",
        *_operation_lines(result),
        *_training_lines(result),
        *_decoding_lines(result),
    ]
    peak = result["peak_bytes"]
    lines += [
        "",
        f"Peak memory of forward+backward at T = {peak['length']:,} (1, 4, T, 64): HKT "
        f"{peak['hkt'] / 2**20:,.0f} MiB, SDPA {peak['sdpa'] / 2**20:,.0f} MiB, ratio "
        f"{peak['hkt'] / peak['sdpa']:.2f} (target: at most {MEMORY_BAR}).",
        "",
        *accuracy_lines(result["accuracy"]),
        "## Layers, projections included, forward, bidirectional",
        "",
        *peer_lines(result["layers"], "T"),
    ]
    return "\n".join(lines) + "\n"


def _operation_lines(result: dict[str, Any]) -> list[str]:
    lines = [
        "## The operation against scaled_dot_product_attention, causal",
        "",
        "| B, H, T, D | pass | HKT | SDPA | ratio | HKT GFLOP/s | SDPA GFLOP/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["operation"]:
        shape = ", ".join(str(n) for n in row["shape"])
        lines.append(
            f"| {shape} | {row['pass']} | {milliseconds(row['hkt_seconds'])} | "
            f"{milliseconds(row['sdpa_seconds'])} | {row['ratio']:.2f} | {row['gigaflops']:.0f} | "
            f"{row['sdpa_gigaflops']:.0f} |"
        )
    lines.append("")
    for name, (median, largest) in BARS.items():
        ratios = [row["ratio"] for row in result["operation"] if row["pass"] == name]
        lines.append(
            f"- {name}: median ratio {statistics.median(ratios):.2f} (target: {median:.2f}), "
            f"largest {max(ratios):.2f} (target: {largest:.2f})"
        )
    if result["exponent"] is not None:
        lines.append(
            f"- forward time per head grows as T^{result['exponent']:.2f} "
            f"(SDPA T^{result['sdpa_exponent']:.2f})"
        )
    return lines


def _training_lines(result: dict[str, Any]) -> list[str]:
    about = result["machine"]
    lines = [
        "",
        f"## A training step of a small transformer, {result['levels']} levels against one",
        "",
        f"Target: at most {TRAINING_BAR}. Of several fresh processes the one with the median "
        "ratio, and the range. Limit: the standard step, and what HKT adds to it (products, and "
        "downsampling) at the rates of a large matrix product and a large copy, taken in turn. "
        + (
            "Freed memory is kept for the next tensor, as in `polyscale train`."
            if about["keeps_freed_memory"]
            else "Freed memory goes back to the system."
        ),
        "",
        "| batch | T | HKT | standard | ratio | range | limit | products alone |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in result["training"]:
        lines.append(
            f"| {row['batch']} | {row['length']:,} | {milliseconds(row['hkt_seconds'])} | "
            f"{milliseconds(row['standard_seconds'])} | {row['ratio']:.3f} | "
            f"{min(row['ratios']):.3f} to {max(row['ratios']):.3f} | "
            f"{row['limit_ratio']:.3f} | {row['flop_ratio']:.3f} |"
        )
    lines += [
        "",
        "Where the time of such a step goes (profiled, each part the best of several steps of all "
        "processes), and at what rate. Products: by what factor HKT has more of them.",
        "",
        "| T | part | HKT | standard | ratio | products | HKT rate | standard rate | peak |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["training"]:
        lines += _rates_by_part(row, result["levels"])
    return lines


def _decoding_lines(result: dict[str, Any]) -> list[str]:
    lines = [
        "",
        "## Decoding with a cache, tokens per second",
        "",
        f"Target: at least {DECODE_BAR} at 8,192. Bytes: the ratio of what a token must read "
        "(weights, keys of every level, values), which is the limit where memory is.",
        "",
        "| context | HKT | standard | ratio | bytes | HKT GB/s | standard GB/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in result["decoding"]:
        lines.append(
            f"| {row['context']:,} | {row['hkt_tokens_per_second']:,.0f} | "
            f"{row['standard_tokens_per_second']:,.0f} | {row['ratio']:.2f} | "
            f"{row['bandwidth_ratio']:.2f} | {row['hkt_gigabytes_per_second']:.1f} | "
            f"{row['standard_gigabytes_per_second']:.1f} |"
        )
    return lines


def _rates_by_part(row: dict[str, Any], levels: int) -> list[str]:
    batch, length = row["batch"], row["length"]
    flops, flat = (step_flops_by_part(batch, length, n) for n in (levels, 1))
    lines = []
    for part, seconds in row["hkt_parts"].items():
        standard = row["standard_parts"][part]
        cells = [f"{length:,}", part, milliseconds(seconds), milliseconds(standard)]
        if part in flops:
            cells += [
                f"{seconds / standard:.2f}",
                f"{flops[part] / flat[part]:.2f}",
                f"{flops[part] / seconds / 1e9:.0f} GFLOP/s",
                f"{flat[part] / standard / 1e9:.0f} GFLOP/s",
                f"{row['peak']['gigaflops']:.0f} GFLOP/s",
            ]
        elif part == "downsampling":
            rate = downsampling_bytes(batch, length, levels) / seconds / 1e9
            peak = row["peak"]["gigabytes_per_second"]
            cells += ["", "", f"{rate:.0f} GB/s", "", f"{peak:.0f} GB/s"]
        else:
            cells += [""] * 5
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def draw(result: dict[str, Any], path: Path) -> None:
    """Time per head against T, both axes logarithmic."""
    from polyscale._extras import require

    figure = require("matplotlib.figure", "train", "a plot").Figure(
        figsize=(6, 4), layout="constrained"
    )
    axes = figure.add_subplot()
    for width, marker in ((32, "o"), (64, "s")):
        rows = [
            row
            for row in result["operation"]
            if row["pass"] == "forward" and row["shape"][3] == width
        ]
        for name, line in (("hkt", "-"), ("sdpa", "--")):
            seconds = [row[f"{name}_seconds"] / (row["shape"][0] * row["shape"][1]) for row in rows]
            axes.loglog(
                [row["shape"][2] for row in rows],
                seconds,
                marker + line,
                label=f"{name.upper()}, D = {width}",
            )
    axes.set_xlabel("T")
    axes.set_ylabel("seconds per head, forward")
    axes.set_title("HKT with three levels, causal", loc="left")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    figure.savefig(path)

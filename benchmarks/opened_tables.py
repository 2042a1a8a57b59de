"""The page and the plot of the benchmark of opened attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.timing import milliseconds

Row = dict[str, Any]


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
        " kept | KL |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["operation"]:
        scaled = _scaled(row, result["heads"])
        bar = "" if row["bar"] is None else f"{row['bar']:g}x"
        lines.append(
            f"| {row['size']:,} | {row['pass']} | {milliseconds(row['opened_seconds'])} | "
            f"{milliseconds(row['sdpa_seconds'])}{scaled} | {row['speedup']:.2f}x | {bar} | "
            f"{row['of_its_products']:.2f} | {milliseconds(row['hsa_seconds'])}{scaled} | "
            f"{row['share']:.1%} | {row['kept']:.3f} | {row['kl']:.2f} |"
        )
    lines += [
        "",
        "*Of its products*: the time over what selection and attention would take at SDPA's own "
        f"rate; the target is at most {result['flops_bar']:g}. *Share*, *kept* and "
        "*KL* (nats), the audit's, are those of normally distributed numbers, which have no heavy "
        "keys: what a model keeps is another matter.",
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
        *strict_lines(result["operation"], result["heads"]),
        "",
        *ending_lines(result["endings"]),
        "",
        *flex_lines(result["flex"], result["heads"]),
        "",
        *choice_lines(result["choices"]),
    ]
    return "\n".join(lines) + "\n"


def strict_lines(rows: list[Row], heads: int) -> list[str]:
    """What it costs that no later row chooses."""
    lines = [
        "## `strict=True`",
        "",
        "The same inputs and settings; a view for each group of 8 positions, chosen by no later "
        "row.",
        "",
        "| N | pass | strict | times the other mode's | SDPA over strict | share | kept |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        seconds = row["strict_seconds"]
        lines.append(
            f"| {row['size']:,} | {row['pass']} | {milliseconds(seconds)} | "
            f"{seconds / row['opened_seconds']:.2f} | {row['sdpa_seconds'] / seconds:.2f}x"
            f"{_scaled(row, heads)} | {row['strict_share']:.1%} | {row['strict_kept']:.3f} |"
        )
    return lines


def ending_lines(rows: list[Row]) -> list[str]:
    """What it costs to look at the end of a prompt more closely."""
    lines = [
        "## The last 128 positions, looked at more closely",
        "",
        "Read as a part of the prompt with `sample=8` and with `sample=4`, or densely by SDPA with "
        "a mask, as the injection's `ending=128` does.",
        "",
        "| N | the whole prompt | last 128, sample 8 | last 128, sample 4 | last 128, densely |",
        "|---|---|---|---|---|",
    ]
    names = ("whole_seconds", "sample_8_seconds", "sample_4_seconds", "dense_seconds")
    for row in rows:
        cells = " | ".join(milliseconds(row[name]) for name in names)
        lines.append(f"| {row['size']:,} | {cells} |")
    return lines


def flex_lines(rows: list[Row], heads: int) -> list[str]:
    """The choice as a block mask."""
    return [
        "## The same choice in torch's compiled flex_attention, on this CPU",
        "",
        "| N | flex_attention, its block mask given | opened, choice included | tiles of 128 |",
        "|---|---|---|---|",
        *(
            f"| {row['size']:,} | {milliseconds(row['flex_seconds'])}{_scaled(row, heads)} | "
            f"{milliseconds(row['opened_seconds'])} | {row['tiles']:.1%} |"
            for row in rows
        ),
    ]


def _scaled(row: Row, heads: int) -> str:
    timed = row["heads_timed"]
    return "" if timed == heads else f" (from {timed} head{'s' if timed > 1 else ''})"


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
        ("strict_seconds", "opened, strict", "o:"),
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

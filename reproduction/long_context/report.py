"""RESULTS.md and results.json from the measurements."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from reproduction.long_context.articles import CHOOSING
from reproduction.long_context.figure import draw_quality
from reproduction.long_context.results import Results
from reproduction.long_context.settings import DENSE

KINDS = ("perplexity", "needles", "continuations", "timing")
DRAWS = {
    "held out": f"held-out articles (from number {CHOOSING})",
    "choosing": f"the {CHOOSING} articles that chose the defaults",
}
PERPLEXITY = (
    "prompt",
    "setting",
    "pairs",
    "articles",
    "times softmax attention's",
    "standard error",
    "worst",
    "of article",
)


def write_report(folder: Path) -> str:
    """Write `results.json` and `RESULTS.md` of a folder of measurements; return the text."""
    found = {kind: Results(folder, kind) for kind in KINDS if (folder / f"{kind}.jsonl").is_file()}
    summary: dict[str, Any] = {}
    text = ["# Long prompts: what is lost, and how fast", ""]
    text.append(
        "Made by `python -m reproduction.long_context report` from the measurements beside it, one "
        "line of JSON each; [notes](NOTES.md)."
    )
    if "perplexity" in found:
        summary["perplexity"] = _perplexities(found["perplexity"])
        for draw, title in DRAWS.items():
            rows = [row for row in summary["perplexity"] if row["draw"] == draw]
            if rows:
                text += ["", f"## Perplexity of what follows the prompt: {title}", ""]
                text += _table(PERPLEXITY, [_perplexity_row(row) for row in rows])
    if "needles" in found:
        summary["needles"] = _counts(found["needles"], "found")
        text += ["", "## Seven-digit numbers found", ""]
        text += _table(
            ("setting", "found", "of", "missed"),
            [
                (row["setting"], str(row["found"]), str(row["of"]), "; ".join(row["missed"]))
                for row in summary["needles"]
            ],
        )
    compared = _continuations(found["continuations"]) if "continuations" in found else []
    if compared:
        summary["continuations"] = compared
        text += ["", "## Greedy continuations equal to softmax attention's", ""]
        text += _table(
            ("setting", "texts", "whole", "tokens until the first difference", "gaps there"),
            [
                (
                    row["setting"],
                    str(row["texts"]),
                    str(row["whole"]),
                    ", ".join(map(str, row["same"])),
                    ", ".join(f"{gap:.3f}" for gap in row["gaps"]),
                )
                for row in summary["continuations"]
            ],
        )
    if "timing" in found:
        summary["timing"] = _timings(found["timing"])
        text += ["", "## Time", ""]
        text += _table(
            ("what", "setting", "seconds", "tokens/s", "times dense", "cache"),
            [
                (
                    row["item"],
                    row["setting"],
                    f"{row['seconds']:.4f}",
                    "" if row["rate"] is None else f"{row['rate']:.1f}",
                    f"{row['gain']:.2f}",
                    "" if row["held"] is None else f"{row['held'] / 2**20:.0f} MiB",
                )
                for row in summary["timing"]
            ],
        )
    if draw_quality(summary, folder / "quality.svg"):
        text += ["", "## Quality against work", "", "![Perplexity against pairs](quality.svg)", ""]
        text.append(
            "Held-out articles, prompts of 4,096 tokens. Peers choose in plain PyTorch and attend "
            "on the same kernel; their seconds include the choice."
        )
    (folder / "results.json").write_text(json.dumps(summary, indent=1) + "\n")
    whole = "\n".join(text) + "\n"
    (folder / "RESULTS.md").write_text(whole)
    return whole


def _perplexities(results: Results) -> list[dict[str, Any]]:
    """One row for each draw, length and setting, over the articles that softmax has, too."""
    dense = results.of(DENSE)
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    shares: dict[tuple[str, str, str], list[float]] = {}
    for (name, item), record in results.records.items():
        if name == DENSE or item not in dense:
            continue
        length, number = item.split(", article ")
        group = ("choosing" if int(number) < CHOOSING else "held out", length, name)
        found.setdefault(group, {})[int(number)] = math.exp(record["loss"] - dense[item]["loss"])
        if record.get("share") is not None:
            shares.setdefault(group, []).append(record["share"])
    rows = []
    for group, by_article in found.items():
        draw, length, name = group
        ratios = list(by_article.values())
        mean = sum(ratios) / len(ratios)
        spread = sum((ratio - mean) ** 2 for ratio in ratios)
        counted = shares.get(group)
        rows.append(
            {
                "draw": draw,
                "length": length,
                "setting": name,
                "share": sum(counted) / len(counted) if counted else None,
                "articles": len(ratios),
                "ratio": mean,
                # One article says nothing of the spread.
                "error": math.sqrt(spread / (len(ratios) - 1) / len(ratios)) if spread else None,
                "worst": max(ratios),
                "worst_article": max(by_article, key=lambda number: by_article[number]),
                "ratios": {str(number): by_article[number] for number in sorted(by_article)},
            }
        )
    return sorted(rows, key=lambda row: row["length"])


def _perplexity_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["length"],
        row["setting"],
        "" if row["share"] is None else f"{row['share']:.1%}",
        str(row["articles"]),
        f"{row['ratio']:.4f}",
        "" if row["error"] is None else f"{row['error']:.4f}",
        f"{row['worst']:.4f}",
        str(row["worst_article"]),
    )


def _counts(results: Results, field: str) -> list[dict[str, Any]]:
    rows = []
    for name in results.settings():
        own = results.of(name)
        missed = [item for item, record in own.items() if not record[field]]
        rows.append(
            {"setting": name, "found": len(own) - len(missed), "of": len(own), "missed": missed}
        )
    return rows


def _continuations(results: Results) -> list[dict[str, Any]]:
    rows = []
    for name in results.settings():
        own = [record for record in results.of(name).values() if "same" in record]
        if not own:
            continue
        rows.append(
            {
                "setting": name,
                "texts": len(own),
                "whole": sum(record["same"] == record["of"] for record in own),
                "same": [record["same"] for record in own],
                "gaps": [record["gap"] for record in own if record["gap"] is not None],
            }
        )
    return rows


def _timings(results: Results) -> list[dict[str, Any]]:
    rows = []
    dense = results.of(DENSE)
    for (name, item), record in results.records.items():
        if item not in dense:
            continue
        seconds = float(record.get("step") or record["seconds"])
        softmax = float(dense[item].get("step") or dense[item]["seconds"])
        rows.append(
            {
                "item": item,
                "setting": name,
                "seconds": seconds,
                "rate": record.get("tokens_per_second"),
                "gain": softmax / seconds,
                "held": record.get("held"),
            }
        )
    return sorted(rows, key=lambda row: row["item"])


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]

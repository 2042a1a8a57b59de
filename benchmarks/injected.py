"""Injected models on real weights: short inputs, exact greedy output, and the planner's own time.

`python -m benchmarks.injected PART --model FOLDER` measures one part and adds it to
`benchmarks/results/injected.json`; `injected.md` is made of that file. The parts:

- `short`: seconds of the model as it is and injected by default, for inputs of few tokens. What is
  asked of the code is at least 0.97 of the original's speed from 64 tokens on.
- `exact`: greedy output by `exact_decoding` after a long prompt, beside `generate` without an
  injection: the same tokens, in how many seconds.
- `plan`: what `plan_injection` takes and proposes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, StoppingCriteria

import polyscale as ps
from benchmarks.timing import machine
from polyscale._files import write_text
from reproduction.long_context.articles import read_pages

RESULTS = Path("benchmarks/results/injected.json")
BAR = 0.97
STEPS = 12  # decoded tokens on the clock of `short`
Row = dict[str, Any]


def load(folder: Path, writes: bool) -> tuple[Any, Any]:
    """Return the model and the tokenizer of a folder."""
    kind = AutoModelForCausalLM if writes else AutoModel
    return kind.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def measure_short(model: Any, ids: Tensor, writes: bool, rounds: int) -> list[Row]:
    """Seconds of one length, by turns: reading, and for decoders the tokens after that.

    It is one model that is injected and restored, off the clock, since a copy of its weights may
    be faster or slower for where they lie in memory.
    """
    options = {"use_cache": True, "logits_to_keep": 1} if writes else {}
    works: dict[str, Callable[[], object]] = {"read": partial(model, ids, **options)}
    found: dict[str, dict[str, float]] = {}
    for turn in range(rounds + 1):  # the first one warms up
        for name in ("original", "injected"):
            if name == "injected":
                ps.inject_opened(model)
            if writes:
                works[f"{STEPS} tokens"] = _decoding(model, ids)
            for what, work in works.items():
                began = time.perf_counter()
                work()
                took = time.perf_counter() - began
                if turn:
                    times = found.setdefault(what, {})
                    times[name] = min(times.get(name, took), took)
            ps.restore(model)
    sizes = {"tokens": ids.shape[1], "batch": len(ids)}
    return [{**sizes, "what": what, **times} for what, times in found.items()]


def _decoding(model: Any, ids: Tensor) -> Callable[[], object]:
    cache = model(ids, use_cache=True, logits_to_keep=1).past_key_values
    model(ids[:, :1], past_key_values=cache, use_cache=True)  # may set up what it decodes from

    def steps() -> None:
        for at in range(STEPS):
            model(ids[:, at : at + 1], past_key_values=cache, use_cache=True)

    return steps


class Clock(StoppingCriteria):
    """Notes when each token came."""

    def __init__(self) -> None:
        self.times = [time.perf_counter()]

    def __call__(self, input_ids: Tensor, scores: Any, **options: Any) -> Tensor:
        """Never stops."""
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)


def measure_exact(model: Any, ids: Tensor, new_tokens: int) -> Row:
    """Greedy output as it is and by `exact_decoding`: seconds, and whether it is the same."""
    found: dict[str, Tensor] = {}
    row: Row = {"prompt": ids.shape[1], "new_tokens": new_tokens}
    model.generation_config.eos_token_id = None
    for name in ("original", "exact"):
        options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False}
        if name == "exact":
            ps.inject_opened(model)
            options["custom_generate"] = ps.exact_decoding
        clock = Clock()
        found[name] = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            pad_token_id=0,
            stopping_criteria=[clock],
            **options,
        )
        ps.restore(model)
        row[name] = {
            "first": clock.times[1] - clock.times[0],
            "others": clock.times[-1] - clock.times[1],
        }
    same = found["original"] == found["exact"]
    row["same_tokens"] = int(same[0, ids.shape[1] :].long().cumprod(0).sum())
    row["speedup_of_writing"] = row["original"]["others"] / row["exact"]["others"]
    return row


def measure_plan(model: Any, tokenizer: Any, texts: list[str], **options: Any) -> Row:
    """What the planner takes and proposes."""
    began = time.perf_counter()
    plan = ps.plan_injection(model, texts, tokenizer, progress=False, announce=print, **options)
    took = time.perf_counter() - began
    print(plan)
    return {"options": options, "took": took, "plan": json.loads(plan.to_json())}


def to_markdown(results: dict[str, Any]) -> str:
    """Tables of what is in the file."""
    lines = [
        "# Injected models on real weights",
        "",
        "Made by `python -m benchmarks.injected`; machine, options and all figures are in "
        "`injected.json`. Candidates take turns in one process, and the best time counts.",
    ]
    for name, part in results.items():
        about = part["machine"]
        lines += ["", f"## {name}", "", f"{about['processor']}, {about['threads']} threads.", ""]
        if part["part"] == "short":
            lines += [
                "| batch | tokens | | original | injected | speed |",
                "|---|---|---|---|---|---|",
            ]
            lines += [
                f"| {row['batch']} | {row['tokens']:,} | {row['what']} | {row['original']:.4f} s | "
                f"{row['injected']:.4f} s | {row['original'] / row['injected']:.2f} |"
                for row in part["rows"]
            ]
            lines += ["", f"Target: at least {BAR:g}."]
        elif part["part"] == "exact":
            lines += [
                "| prompt | written | the same | original | exact | times as fast | first token |",
                "|---|---|---|---|---|---|---|",
            ]
            for row in part["rows"]:
                first = f"{row['original']['first']:.1f} s, {row['exact']['first']:.1f} s"
                lines.append(
                    f"| {row['prompt']:,} | {row['new_tokens']} | {row['same_tokens']} | "
                    f"{row['original']['others']:.2f} s | {row['exact']['others']:.2f} s | "
                    f"{row['speedup_of_writing']:.2f} | {first} |"
                )
        else:
            for row in part["rows"]:
                plan = ps.inject.InjectionPlan.from_json(json.dumps(row["plan"]))
                lines += [f"`{row['options']}`, {row['took']:.0f} s:", "", "```", str(plan), "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure one part, and write the file and the page anew."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=("short", "exact", "plan", "page"))
    parser.add_argument("--model", type=Path)
    parser.add_argument("--name", default="model", help="of the model, in the tables")
    parser.add_argument("--encoder", action="store_true")
    parser.add_argument("--data-dir", type=Path, help="folder with enwik8_20mb.gz")
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--texts", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=81)
    parser.add_argument("--tolerance", type=float)
    parser.add_argument("--speedup", type=float)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.is_file() else {}
    if given.part != "page":
        title, rows = _measured(given)
        part = results.setdefault(title, {"part": given.part, "rows": []})
        part["machine"] = machine()
        new = {_key(row) for row in rows}
        part["rows"] = [row for row in part["rows"] if _key(row) not in new] + rows
        write_text(RESULTS, json.dumps(results, indent=1) + "\n")
    write_text(RESULTS.with_suffix(".md"), to_markdown(results))


def _key(row: Row) -> tuple[Any, ...]:
    """What tells a row from others of its part; a later one takes its place."""
    return tuple(str(row.get(name)) for name in ("tokens", "batch", "what", "prompt", "options"))


def _measured(given: argparse.Namespace) -> tuple[str, list[Row]]:
    model, tokenizer = load(given.model, not given.encoder)
    pages = iter(read_pages(given.data_dir))
    texts = [next(pages) for _ in range(given.texts)]
    title = f"{given.part}, {given.name}"
    longest = max(given.lengths)
    if given.part == "plan":
        options = {"tolerance": given.tolerance, "speedup": given.speedup, "max_length": longest}
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        return title, [measure_plan(model, tokenizer, texts, **options)]
    ids = torch.tensor([tokenizer(text)["input_ids"][:longest] for text in texts[: given.batch]])
    rows: list[Row] = []
    with torch.no_grad():
        for length in given.lengths:
            if given.part == "exact":
                rows.append(measure_exact(model, ids[:1, :length], given.new_tokens))
            else:
                rows += measure_short(model, ids[:, :length], not given.encoder, given.rounds)
    for row in rows:
        print(row)
    return title, rows


if __name__ == "__main__":
    main()

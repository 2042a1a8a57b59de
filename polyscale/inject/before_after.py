"""A model before and after its injection: seconds, memory, and what it makes of one text."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel

from polyscale.inject.api import restore
from polyscale.inject.level_cache import LevelCache
from polyscale.inject.measure import make_batches, run
from polyscale.inject.plan import InjectionPlan, show_change
from polyscale.inject.texts import limit_of

WRITTEN = 48  # tokens that continue the text
ASKED = 0.75  # of the text is the prompt, so that there is something to compare with


@dataclass(frozen=True)
class BeforeAfter:
    """Rows of a table (name, before, after), and what both made of one text."""

    rows: tuple[tuple[str, str, str], ...]
    example: tuple[str, ...]

    def __str__(self) -> str:
        rows = [("", "before", "after"), *self.rows]
        widths = [max(len(row[at]) for row in rows) for at in range(3)]
        lines = [
            f"{name:<{widths[0]}}  {before:>{widths[1]}}  {after:>{widths[2]}}".rstrip()
            for name, before, after in rows
        ]
        return "\n".join([*lines, "", *self.example])


def compare(
    model: PreTrainedModel,
    tokenizer: Any,
    text: str,
    plan: InjectionPlan,
    *,
    max_length: int | None = None,
) -> BeforeAfter:
    """Run a model before and after `plan`, which is left in it.

    >>> print(compare(model, tokenizer, text, plan))  # doctest: +SKIP
    """
    proposal = plan.proposal
    if proposal is None:
        raise ValueError("plan must propose an injection, got one by which nothing pays")
    limit = min(limit_of(model, tokenizer), max_length or limit_of(model, tokenizer))
    restore(model)
    writes = plan.new_tokens is not None
    measured = []
    for injected in (False, True):
        if injected:
            plan.apply(model)
        peak = PeakMemory()
        one = (
            _continued(model, tokenizer, text, limit)
            if writes
            else _passed(model, tokenizer, text, limit)
        )
        measured.append((one, peak.read()))
    (before, peak_before), (after, peak_after) = measured
    memory: list[tuple[str, str, str]] = []
    if peak_before is not None and peak_after is not None:
        memory.append(("memory at most (MiB)", *_mebibytes(peak_before, peak_after)))
    change = (plan.measure, "0", show_change(plan.change))
    if not writes:
        rows = [
            ("seconds of a text", f"{plan.reading:.3g}", f"{proposal.reading:.3g}"),
            *memory,
            change,
        ]
        cosine = float(F.cosine_similarity(before["vector"], after["vector"], dim=-1).mean())
        return BeforeAfter(
            tuple(rows), (f"{before['name']} of {text[:60]!r}: cosine {cosine:.5f}",)
        )
    rows = [
        ("seconds to the first token", f"{before['first']:.3g}", f"{after['first']:.3g}"),
        ("tokens per second", f"{before['pace']:.3g}", f"{after['pace']:.3g}"),
        ("cache (MiB)", *_mebibytes(before["cache"], after["cache"])),
        *memory,
        change,
    ]
    where = f"after the first {before['prompt']} tokens of {text[:40]!r}"
    return BeforeAfter(
        tuple(rows),
        (where, f"before: {before['text']!r}", f"after:  {after['text']!r}"),
    )


@torch.no_grad()
def _continued(model: PreTrainedModel, tokenizer: Any, text: str, limit: int) -> dict[str, Any]:
    """Let a model continue a text greedily, on the clock."""
    ids = tokenizer(text, return_tensors="pt", truncation=True, max_length=limit)["input_ids"]
    ids = ids[:, : max(1, int(ASKED * ids.shape[1]))].to(model.device)
    began = time.perf_counter()
    output = model(ids, use_cache=True)
    first = time.perf_counter() - began
    cache, written = output.past_key_values, [output.logits[:, -1].argmax(-1, keepdim=True)]
    output = model(written[-1], past_key_values=cache, use_cache=True)  # may set up what it reads
    written.append(output.logits[:, -1].argmax(-1, keepdim=True))
    began = time.perf_counter()
    for _ in range(WRITTEN - 2):
        output = model(written[-1], past_key_values=cache, use_cache=True)
        written.append(output.logits[:, -1].argmax(-1, keepdim=True))
    pace = (WRITTEN - 2) / (time.perf_counter() - began)
    found = tokenizer.decode(torch.cat(written, 1)[0], skip_special_tokens=True)
    return {
        "first": first,
        "pace": pace,
        "cache": _held(cache),
        "prompt": ids.shape[1],
        "text": found,
    }


def _held(cache: Any) -> int:
    """The bytes of keys and values that a cache holds."""
    if isinstance(cache, LevelCache):
        return int(cache.report()["bytes_held"]) + sum(
            layer.keys.nbytes + layer.values.nbytes
            for layer in cache.layers
            if type(layer).__name__ in ("DynamicLayer", "DynamicSlidingWindowLayer")
        )
    assert isinstance(cache, DynamicCache)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def _passed(model: PreTrainedModel, tokenizer: Any, text: str, limit: int) -> dict[str, Any]:
    """Read a text by a model that writes nothing."""
    (batch,) = make_batches([text], tokenizer, 1, limit)
    kind, vector = run(model, batch)
    name = "embedding" if kind == "embedding" else "log-probabilities"
    return {"vector": vector.double(), "name": name}


def _mebibytes(before: int, after: int) -> tuple[str, str]:
    return f"{before / 2**20:,.0f}", f"{after / 2**20:,.0f}"


class PeakMemory:
    """The most memory that the process held since this was made; Linux alone knows."""

    def __init__(self) -> None:
        self.known = True
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        except OSError:
            self.known = False

    def read(self) -> int | None:
        """Return bytes, or None where nobody knows."""
        if not self.known:
            return None
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
        return None

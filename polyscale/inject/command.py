"""`polyscale inject MODEL --plan texts.txt --output DIR`: plan, inject, save, compare."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel

from polyscale.inject.before_after import BeforeAfter, compare
from polyscale.inject.plan import InjectionPlan
from polyscale.inject.search import NEW_TOKENS, plan_injection
from polyscale.inject.storage import class_of, save_injected

PLAN_FILE = "polyscale_plan.json"


def run_inject(
    model: str,
    plan_texts: Path,
    output: Path,
    *,
    tolerance: float | None = None,
    speedup: float | None = None,
    new_tokens: int = NEW_TOKENS,
    max_texts: int = 32,
    max_length: int | None = None,
    progress: bool = False,
    announce: Callable[[str], None] | None = None,
) -> tuple[InjectionPlan, BeforeAfter | None]:
    """Plan an injection on a file of texts, one a line, save the injected model and compare both.

    `output` gets the model, its tokenizer, the injection and the plan; `load_injected` reads it. If
    nothing pays, nothing is written and there is nothing to compare.

    >>> plan, table = run_inject("folder", Path("texts.txt"), Path("out"))  # doctest: +SKIP
    """
    texts = read_texts(plan_texts, max_texts)
    if output.exists() and not output.is_dir():
        raise ValueError(f"output must be a folder, got a file, {output}")
    loaded, tokenizer = _load(model)
    plan = plan_injection(
        loaded,
        texts,
        tokenizer,
        tolerance=tolerance,
        speedup=speedup,
        new_tokens=new_tokens,
        max_length=max_length,
        progress=progress,
        announce=announce,
    )
    if not plan.pays:
        return plan, None
    if announce is not None:
        announce("comparing the model before and after")
    longest = max(texts, key=len)
    found = compare(loaded, tokenizer, longest, plan, max_length=max_length)
    save_injected(loaded, output)
    tokenizer.save_pretrained(output)
    (output / PLAN_FILE).write_text(plan.to_json() + "\n")
    return plan, found


def _load(model: str) -> tuple[PreTrainedModel, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # for batches; padding is masked
    loaded = class_of(model).from_pretrained(model, use_safetensors=True, trust_remote_code=False)
    return loaded.eval(), tokenizer


def read_texts(path: Path, most: int) -> list[str]:
    """Return the lines of a file that are not blank, `most` at most."""
    if not path.is_file():
        raise ValueError(f"plan must be a text file with one text a line, got {path}, no file")
    texts = []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                texts.append(line.strip())
            if len(texts) == most:
                break
    if not texts:
        raise ValueError(f"plan must have one text a line, got {path}, which has no text")
    return texts

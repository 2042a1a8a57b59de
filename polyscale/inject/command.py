"""`polyscale inject MODEL --plan texts.txt --output DIR`: plan, inject, save."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from polyscale.inject.measure import Say
from polyscale.inject.plan import Plan
from polyscale.inject.search import HIERARCHIES, plan_injection
from polyscale.inject.settings import SENTENCES
from polyscale.inject.storage import class_of, save_injected

PLAN_FILE = "polyscale_plan.json"


def run_inject(
    model: str,
    plan_texts: Path,
    output: Path,
    *,
    budget: float | None = None,
    tolerance: float | None = None,
    hierarchies: Sequence[Any] = HIERARCHIES,
    ties: Sequence[str] | None = None,
    max_texts: int = 32,
    max_length: int = 256,
    batch_size: int = 8,
    say: Say | None = None,
) -> Plan:
    """Plan an injection on a file of texts, one a line, and save the injected model.

    `output` gets the model, its tokenizer, the injection and the plan; `load_injected` reads it.
    Budget 0.5 is taken if neither budget nor tolerance is given.

    >>> plan = run_inject("folder", Path("texts.txt"), Path("out"))  # doctest: +SKIP
    """
    texts = read_texts(plan_texts, max_texts)
    if output.exists() and not output.is_dir():
        raise ValueError(f"output: {output} is not a folder")
    if budget is None and tolerance is None:
        budget = 0.5
    tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=False)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token  # for planning; padding is masked
    loaded = class_of(model).from_pretrained(model, use_safetensors=True, trust_remote_code=False)
    loaded.eval()
    plan = plan_injection(
        loaded,
        texts,
        tokenizer,
        budget=budget,
        tolerance=tolerance,
        hierarchies=hierarchies,
        ties=ties,
        max_length=max_length,
        batch_size=batch_size,
        say=say,
    )
    plan.apply(loaded)
    save_injected(loaded, output)
    tokenizer.save_pretrained(output)
    (output / PLAN_FILE).write_text(plan.to_json() + "\n")
    return plan


def read_texts(path: Path, most: int) -> list[str]:
    """Return the lines of a file that are not blank, `most` at most."""
    if not path.is_file():
        raise ValueError(f"plan: {path} is not a file; takes a text file with one text a line")
    texts = []
    with open(path, encoding="utf-8") as lines:
        for line in lines:
            if line.strip():
                texts.append(line.strip())
            if len(texts) == most:
                break
    if not texts:
        raise ValueError(f"plan: {path} has no text; takes one text a line")
    return texts


def parse_hierarchies(names: Sequence[str]) -> list[tuple[int, ...] | str]:
    """Return hierarchies as a command line gives them.

    >>> parse_hierarchies(["2,4,8", "sentences"])
    [(2, 4, 8), 'sentences']
    """
    found: list[tuple[int, ...] | str] = []
    for name in names:
        if name == SENTENCES:
            found.append(name)
            continue
        try:
            found.append(tuple(int(part) for part in name.split(",")))
        except ValueError:
            raise ValueError(
                f"hierarchy must be windows such as 2,4,8,16, or sentences, got {name!r}"
            ) from None
    return found

"""What is measured of a setting: perplexity of what follows, hidden numbers, continuations."""

from __future__ import annotations

import random
import time
from typing import Any

import torch
from torch import Tensor

from reproduction.long_context.reading import Reader
from reproduction.long_context.results import Results
from reproduction.long_context.settings import Setting

DEPTHS = 8
NEEDLE = "\n\nThe secret number is {number}. Remember it.\n\n"
QUESTION = "\n\nQuestion: What is the secret number?\nAnswer: The secret number is"


def measure_perplexity(
    reader: Reader,
    results: Results,
    settings: dict[str, Setting],
    texts: dict[int, Tensor],
    prompt: int,
) -> None:
    """Score what follows the first `prompt` tokens of each text, by the number of its article."""
    for number, ids in texts.items():
        item = f"{prompt} + {ids.shape[1] - prompt - 1}, article {number}"
        for name, setting in settings.items():
            if results.find(name, item):
                continue
            begin = time.perf_counter()
            cache, _ = reader.read(f"article{number}-{prompt}", ids[:, :prompt], setting)
            read, share = time.perf_counter(), reader.share
            losses, report = reader.losses(cache, ids[:, prompt:], setting)
            results.add(
                name,
                item,
                loss=float(losses.mean()),
                read=round(read - begin, 2),
                scored=round(time.perf_counter() - read, 2),
                losses=[round(float(loss), 4) for loss in losses],
                report=report,
                share=share,
            )


def needle_prompt(tokenizer: Any, text: Tensor, length: int, depth: int) -> tuple[Tensor, str]:
    """Return `length` token ids `[1, length]` of text with a number in it, and the number.

    The number stands at the middle of the `depth`-th of eight equal parts; the question is the
    end of the prompt.
    """
    number = str(random.Random(1_000 * length + depth).randint(1_000_000, 9_999_999))
    needle, question = (
        torch.tensor(tokenizer(part, add_special_tokens=False).input_ids)
        for part in (NEEDLE.format(number=number), QUESTION)
    )
    around = length - len(needle) - len(question)
    at = around * (2 * depth + 1) // (2 * DEPTHS)
    parts = [text[0, :at], needle, text[0, at:around], question]
    return torch.cat(parts)[None], number


def measure_needles(
    reader: Reader,
    results: Results,
    settings: dict[str, Setting],
    texts: list[Tensor],
    tokenizer: Any,
    lengths: list[int],
) -> None:
    """Hide a number at eight depths of each length, and ask for it at the end of the prompt."""
    for length in lengths:
        for depth in range(DEPTHS):
            ids, number = needle_prompt(tokenizer, texts[depth % len(texts)], length, depth)
            for name, setting in settings.items():
                item = f"{length} tokens, depth {depth}"
                if results.find(name, item):
                    continue
                cache, logits = reader.read(f"needle-{length}-{depth}", ids, setting)
                tokens, _ = reader.greedy(cache, logits, 12, setting)
                answer = tokenizer.decode(tokens)
                digits = "".join(letter for letter in answer if letter.isdigit())
                results.add(
                    name, item, found=digits.startswith(number), number=number, answer=answer
                )


def measure_continuations(
    reader: Reader,
    results: Results,
    settings: dict[str, Setting],
    texts: dict[int, Tensor],
    prompt: int,
    count: int,
) -> None:
    """Continue each text greedily, and compare with softmax attention's own continuation."""
    for number, ids in texts.items():
        item = f"{prompt} + {count}, article {number}"
        for name, setting in {"dense": Setting(), **settings}.items():
            if results.find(name, item):
                continue
            cache, logits = reader.read(f"article{number}-{prompt}", ids[:, :prompt], setting)
            tokens, gaps = reader.greedy(cache, logits, count, setting)
            dense = results.find("dense", item)
            if dense is None:
                results.add(name, item, tokens=tokens, gaps=[round(gap, 5) for gap in gaps])
                continue
            same = 0
            while same < count and tokens[same] == dense["tokens"][same]:
                same += 1
            gap = None if same == count else dense["gaps"][same]
            results.add(name, item, same=same, of=count, gap=gap, tokens=tokens)

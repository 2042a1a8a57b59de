"""Trees of texts for `benchmarks.hsa`: IMDB reviews if there are any, otherwise synthetic texts."""

from __future__ import annotations

import random
import re

from polyscale.data.files import find_folder
from polyscale.data.texts import load_texts
from polyscale.trees import SignalTree

MOST_TOKENS = 512  # of a review, as in the paper's experiments
_WORD = re.compile(r"\w+|[^\w\s]")


def text_trees(count: int) -> tuple[list[SignalTree], str]:
    """Trees of paragraphs, sentences and words, and what they are of.

    Reviews are read from the folder that the environment variable POLYSCALE_DATA names.
    """
    if find_folder(None) is None:
        rng = random.Random(0)
        return [random_text_tree(rng) for _ in range(count)], "synthetic texts"
    texts = load_texts("imdb-char").train.texts[:count]
    return [_review_tree(text) for text in texts], f"IMDB reviews, first {MOST_TOKENS} words"


def _review_tree(text: str) -> SignalTree:
    spans = [match.span() for match in _WORD.finditer(text)][:MOST_TOKENS]
    return SignalTree.from_text(text[: spans[-1][1]], encoding={"offset_mapping": spans})


def random_text_tree(rng: random.Random, tokens: int = 250) -> SignalTree:
    """A tree shaped like a text: paragraphs, sentences, tokens, a special token at either end."""
    parents = [-1, 0]
    left = max(3, round(rng.gauss(tokens, tokens / 6))) - 2
    while left > 0:
        parents.append(0)
        paragraph = len(parents) - 1
        for _ in range(rng.randint(1, 6)):
            if left <= 0:
                break
            parents.append(paragraph)
            length = min(left, max(1, round(rng.gauss(22, 10))))
            parents.extend([len(parents) - 1] * length)
            left -= length
    parents.append(0)
    return SignalTree.from_parents(parents)

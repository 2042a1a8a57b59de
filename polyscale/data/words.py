"""IMDB, AG News and SST-2 as trees of words, for the hierarchical encoder and its baselines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from polyscale.checks import check_choice, check_integer
from polyscale.data.documents import (
    TEXT,
    TREES,
    DocumentSplit,
    TreeCollate,
    read_document,
    split_words,
)
from polyscale.data.splits import TaskData
from polyscale.data.texts import LabelledTexts, load_texts
from polyscale.data.vectors import embed_words

# The set of texts of each task.
TEXTS = {"imdb-words": "imdb-char", "agnews-words": "agnews", "sst2-words": "sst2"}


def load_words(
    name: str,
    data_dir: Path | str | None,
    seed: int,
    *,
    embedding: str,
    width: int,
    tree: str,
    max_tokens: int | None,
    sizes: dict[str, int | None],
) -> TaskData:
    """A set of texts as trees. Vocabulary and vectors come from all training texts.

    `sizes` are the numbers of texts of the splits, sampled at random; None for all of them.
    """
    check_choice("tree", tree, TREES)
    check_integer("width", width, least=1)
    if max_tokens is not None:
        check_integer("max_tokens", max_tokens, least=1)
    texts = load_texts(TEXTS[name], data_dir, seed=seed, task=name)
    words = embed_words([split_words(text) for text in texts.train.texts], embedding, width, seed)
    splits, cut = {}, {}
    for part, size in sizes.items():
        side = sample_texts(getattr(texts, part), part, size, seed)
        documents = [read_document(text, max_tokens) for text in side.texts]
        if max_tokens is not None:
            cut[part] = sum(len(split_words(text)) > max_tokens for text in side.texts)
        splits[part] = DocumentSplit(documents, side.labels, words.vocabulary, tree=tree, seed=seed)
    test = splits["test"]
    source: dict[str, Any] = {
        **texts.source,
        "splits": {part: len(split) for part, split in splits.items()},
        "whole_splits": texts.source["splits"],
        "vectors": words.source,
        "cut_to_max_tokens": cut,
    }
    return TaskData(
        name=name,
        kind="classification",
        train=splits["train"],
        validation=splits["validation"],
        test=test,
        collate=TreeCollate(words.tables(TEXT)),
        vocab_size=None,
        input_channels=None,
        num_labels=len(texts.label_names),
        max_length=max(int(split.lengths.max()) for split in splits.values()),
        pad_token_id=None,
        label_names=texts.label_names,
        source=source,
        example=f"{test.text(0)[:400]} -> {texts.label_names[int(test.labels[0])]}",
        modalities={TEXT: words.kind},
    )


def sample_texts(side: LabelledTexts, part: str, size: int | None, seed: int) -> LabelledTexts:
    """`size` texts of a split, sampled at random, in their order; all of them if None."""
    if size is None:
        return side
    check_integer(part, size, least=1, most=len(side), hint="None takes all texts")
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(side), generator=generator)[:size].sort().values
    return LabelledTexts([side.texts[index] for index in chosen.tolist()], side.labels[chosen])

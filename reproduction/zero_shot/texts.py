"""The texts of one task as tokens: training, validation, and two parts of the test set."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyscale.data.splits import TaskData, TokenSplit, collate
from polyscale.data.texts import LabelledTexts, load_texts
from reproduction.zero_shot.presets import TaskSize


@dataclass(frozen=True)
class TaskTexts:
    """The texts of a task; the grid is the test set of `data`."""

    data: TaskData
    final: TokenSplit  # test texts that are not in the grid
    plan_texts: list[str]  # training texts for the planner, which needs no labels
    grid_texts: list[str]


def load_task_texts(
    size: TaskSize, tokenizer: Any, data_dir: Path | str | None, seed: int
) -> TaskTexts:
    """Draw texts by the seed and tokenize them.

    The grid and the final texts are disjoint: what is chosen on one is measured on the other.
    """
    source = load_texts(size.name, data_dir, seed=seed)
    train = _choose("train", source.train, size.train, seed)
    validation = _choose("validation", source.validation, size.validation, seed)
    test = _choose("test", source.test, size.grid + size.final, seed)
    grid = LabelledTexts(test.texts[: size.grid], test.labels[: size.grid])
    rest = LabelledTexts(test.texts[size.grid :], test.labels[size.grid :])
    parts = {"train": train, "validation": validation, "test": grid, "final": rest}
    splits = {name: _tokens(part, tokenizer, size.length) for name, part in parts.items()}
    data = TaskData(
        name=size.name,
        kind="classification",
        train=splits["train"],
        validation=splits["validation"],
        test=splits["test"],
        collate=partial(collate, pad_id=tokenizer.pad_token_id),
        vocab_size=len(tokenizer),
        input_channels=None,
        num_labels=len(source.label_names),
        max_length=size.length,
        pad_token_id=tokenizer.pad_token_id,
        label_names=source.label_names,
        source={**source.source, "used": {name: len(part) for name, part in parts.items()}},
        example=grid.texts[0],
    )
    plan_texts = [text for text in train.texts if len(text.split()) >= size.plan_words]
    if not plan_texts:
        raise ValueError(
            f"plan_words must be at most the length of some training text, got {size.plan_words}"
        )
    return TaskTexts(data, splits["final"], plan_texts, grid.texts)


def tokenize(texts: Sequence[str], tokenizer: Any, length: int) -> list[list[int]]:
    """Return the token ids of texts with special tokens, truncated to `length`."""
    return tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]


def _choose(name: str, texts: LabelledTexts, count: int, seed: int) -> LabelledTexts:
    if count > len(texts):
        raise ValueError(
            f"preset must ask for at most the {len(texts)} {name} texts that there are, got {count}"
        )
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    chosen = order[:count].tolist()
    return LabelledTexts([texts.texts[index] for index in chosen], texts.labels[chosen])


def _tokens(texts: LabelledTexts, tokenizer: Any, length: int) -> TokenSplit:
    rows = [torch.tensor(row) for row in tokenize(texts.texts, tokenizer, length)]
    sizes: Tensor = torch.tensor([0, *(len(row) for row in rows)])
    decode = tokenizer.decode
    return TokenSplit(torch.cat(rows), sizes.cumsum(0), texts.labels, decode=decode)

"""The documents of each task as trees of sentences, with labels and parts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from torch import Tensor

from polyscale.documents import Reading, read_markdown
from polyscale.trees import SignalTree
from reproduction.documents.articles import TOPICS, Article, read_articles
from reproduction.documents.presets import Preset

PARTS = ("train", "validation", "test")
_READING = Reading(sentences=True, max_family=None)


@dataclass(frozen=True, eq=False)
class Sample:
    """A document: its text, its tree, its sentences by number, and its label."""

    text: str
    tree: SignalTree
    sentences: Tensor  # [N], numbers of the task's sentences
    label: int
    turn: int = -1  # of training: only in epochs of this turn; -1 for all
    number: int = 0  # among all documents of the task


@dataclass
class Task:
    """Documents in three parts."""

    name: str
    label_names: tuple[str, ...]
    parts: dict[str, list[Sample]]
    sentences: list[str]
    key_names: tuple[str, ...]
    turns: int = 1

    def labels(self, part: str) -> Tensor:
        return torch.tensor([sample.label for sample in self.parts[part]])

    def epoch(self, number: int) -> list[Sample]:
        """The training documents of an epoch."""
        turn = number % self.turns
        return [one for one in self.parts["train"] if one.turn in (-1, turn)]

    def compared(self) -> list[Sample]:
        """The documents of the first epoch and those of the other parts, by their numbers."""
        return [one for one in self.samples() if one.turn in (-1, 0)]

    def samples(self) -> Iterator[Sample]:
        """All documents, in the order of their numbers."""
        yield from sorted((one for part in PARTS for one in self.parts[part]), key=_number)


def _number(sample: Sample) -> int:
    return sample.number


@dataclass
class _Maker:
    """Numbers sentences while it reads documents."""

    numbers: dict[str, int] = field(default_factory=dict)
    keys: dict[str, None] = field(default_factory=dict)
    count: int = 0

    def sample(self, text: str, label: int, turn: int = -1) -> Sample:
        document = read_markdown(text, _READING)
        self.keys.update(dict.fromkeys(document.tree.key_names))
        # The description of an image stands for it; there are none in these texts.
        values = [value if isinstance(value, str) else "image" for value in document.values]
        numbers = [self.numbers.setdefault(value, len(self.numbers)) for value in values]
        tree = document.tree.with_modality("text")
        self.count += 1
        return Sample(text, tree, torch.tensor(numbers), label, turn, self.count - 1)

    def task(
        self, name: str, labels: Sequence[str], parts: dict[str, list[Sample]], turns: int = 1
    ) -> Task:
        return Task(name, tuple(labels), parts, list(self.numbers), tuple(self.keys), turns)


def make_tasks(preset: Preset, data_dir: Path, seed: int = 0) -> list[Task]:
    """Read and label the documents; the seed chooses the parts. The tasks share their sentences."""
    articles, maker = read_articles(data_dir, *preset.words), _Maker()
    order, topics = _order(articles, preset, seed, maker), _topics(articles, preset, seed, maker)
    return [replace(task, sentences=list(maker.numbers)) for task in (order, topics)]


def _topics(articles: list[Article], preset: Preset, seed: int, maker: _Maker) -> Task:
    names = list(TOPICS)
    known = [one for one in articles if one.topic is not None]
    maker.count, parts = 0, {}
    for part, some in _divided(known, preset, seed).items():
        texts = [(first + "".join(rest), one) for one in some for first, rest in [one.sections()]]
        parts[part] = [maker.sample(text, names.index(str(one.topic))) for text, one in texts]
    return maker.task("topics", names, parts)


def _order(articles: list[Article], preset: Preset, seed: int, maker: _Maker) -> Task:
    """Every article twice: its sections as they are, and in another order."""
    chosen = random.Random(seed)
    known = [one for one in articles if len(one.sections()[1]) >= 3]
    maker.count, parts = 0, {}
    for part, some in _divided(known, preset, seed).items():
        found: list[Sample] = []
        for article in some:
            first, sections = article.sections()
            found.append(maker.sample(first + "".join(sections), 0))
            for turn in range(preset.orders if part == "train" else 1):
                text = first + "".join(_another_order(sections, chosen))
                found.append(maker.sample(text, 1, turn if part == "train" else -1))
        parts[part] = found
    return maker.task("order", ("in order", "not in order"), parts, preset.orders)


def _another_order(sections: list[str], chosen: random.Random) -> list[str]:
    order = list(range(len(sections)))
    while order == sorted(order):
        chosen.shuffle(order)
    # The last one may have no line break at its end.
    return [sections[index].rstrip("\n") + "\n\n" for index in order]


def _divided(articles: list[Article], preset: Preset, seed: int) -> dict[str, list[Article]]:
    """The articles in three parts, none in two."""
    order = list(articles)
    random.Random(seed).shuffle(order)
    train = round(preset.shares[0] * len(order))
    validation = train + round(preset.shares[1] * len(order))
    return dict(
        zip(PARTS, (order[:train], order[train:validation], order[validation:]), strict=True)
    )

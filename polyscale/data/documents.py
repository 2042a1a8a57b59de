"""Texts as trees of paragraphs, sentences and words, stored compactly."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from polyscale.data.splits import Split
from polyscale.trees import SignalTree
from polyscale.trees.assembly import assemble
from polyscale.trees.checks import DOMAINS
from polyscale.trees.sentences import split_paragraphs, split_sentences
from polyscale.trees.structure import index_in_family

TREES = ("semantic", "windows", "random")
TEXT = "text"  # the modality of words

_WORD = re.compile(r"<br\s*/?>|([^\W_]+(?:['\u2019][^\W_]+)*)")


@dataclass(frozen=True)
class Document:
    """The words of a text, and the sizes of its sentences and paragraphs."""

    words: list[str]
    sentences: list[int]  # words of each
    paragraphs: list[int]  # sentences of each


def split_words(text: str) -> list[str]:
    """Words in lower case, without punctuation and tags.

    >>> split_words("It isn't <br />GOOD, is it?")
    ['it', "isn't", 'good', 'is', 'it']
    """
    return [word for word in _WORD.findall(text.lower()) if word]


def read_document(text: str, max_tokens: int | None = None) -> Document:
    """Paragraphs, sentences and words of a text, truncated to `max_tokens` words.

    Sentences without words are dropped; a text without words becomes one empty word.

    >>> read_document("One two. Three!<br /><br />Four.")
    Document(words=['one', 'two', 'three', 'four'], sentences=[2, 1, 1], paragraphs=[2, 1])
    """
    words: list[str] = []
    sentences: list[int] = []
    paragraphs: list[int] = []
    for begin, end in split_paragraphs(text):
        paragraph = text[begin:end]
        before = len(sentences)
        for first, last in split_sentences(paragraph):
            found = split_words(paragraph[first:last])
            if max_tokens is not None:
                found = found[: max_tokens - len(words)]
            if found:
                words += found
                sentences.append(len(found))
        if len(sentences) > before:
            paragraphs.append(len(sentences) - before)
    return Document(words, sentences, paragraphs) if words else Document([""], [1], [1])


def document_tree(
    sentences: Sequence[int], paragraphs: Sequence[int], rows: Tensor | None = None
) -> SignalTree:
    """The tree of a text from the sizes of its families; leaf i has row `rows[i]`, or i.

    >>> document_tree([2, 1, 1], [2, 1]).leaf_count.tolist()
    [4, 3, 1, 2, 1, 1, 1, 1, 1, 1]
    """
    tree = _tree_of_sizes(tuple(sentences), tuple(paragraphs))
    if rows is None:
        return tree
    leaf_row = tree.leaf_row.clone()
    leaf_row[tree.leaf_order] = rows
    return assemble(
        tree.parent,
        leaf_row,
        domain=tree.domain,
        position=tree.position,
        key=tree.key,
        modality=tree.modality,
        modality_names=tree.modality_names,
        tree_rows=tree.tree_rows,
    )


# Captions and single sentences have few distinct shapes, and trees are immutable.
@lru_cache(maxsize=1024)
def _tree_of_sizes(sentences: tuple[int, ...], paragraphs: tuple[int, ...]) -> SignalTree:
    per_sentence, per_paragraph = torch.tensor(sentences), torch.tensor(paragraphs)
    above = 1 + len(paragraphs)  # nodes: the root, paragraphs, sentences, words
    parent = torch.cat(
        [
            torch.tensor([-1]),
            torch.zeros(len(paragraphs), dtype=torch.int64),
            torch.arange(1, above).repeat_interleave(per_paragraph),
            torch.arange(above, above + len(sentences)).repeat_interleave(per_sentence),
        ]
    )
    is_leaf = torch.arange(len(parent)) >= above + len(sentences)
    position = torch.zeros(len(parent), 2, dtype=torch.int64)
    position[:, 0] = index_in_family(parent)
    return assemble(
        parent,
        domain=torch.where(is_leaf, -1, DOMAINS.index("sequence")),
        position=position,
        key=torch.full_like(parent, -1),
        modality=torch.where(is_leaf, 0, -1),
        modality_names=(TEXT,),
    )


def even_sizes(total: int, parts: int) -> list[int]:
    """`total` as a sum of `parts` integers that differ by at most one.

    >>> even_sizes(7, 3)
    [3, 2, 2]
    """
    return [total // parts + (part < total % parts) for part in range(parts)]


class Ragged:
    """Lists of integers, concatenated in one tensor.

    >>> Ragged([[4, 5], [6]])[1].tolist()
    [6]
    """

    def __init__(self, rows: Sequence[Sequence[int]]) -> None:
        self.values = torch.tensor([value for row in rows for value in row], dtype=torch.int32)
        self.offsets = torch.tensor([*accumulate(map(len, rows), initial=0)])

    def __getitem__(self, index: int) -> Tensor:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()


class DocumentSplit(Split):
    """Classified texts as word ids and trees.

    `tree` is "semantic"; "windows", with as many sentences and paragraphs, all of even sizes; or
    "random", the semantic tree with the words shuffled among its leaves.

    >>> documents = [read_document("One two. Three.")]
    >>> split = DocumentSplit(documents, torch.tensor([0]), ["", "one", "two", "three"])
    >>> split[0]["inputs"]["text"].tolist(), split[0]["tree"].leaf_count.tolist()[:4]
    ([1, 2, 3], [3, 3, 2, 1])
    """

    def __init__(
        self,
        documents: Sequence[Document],
        labels: Tensor,
        vocabulary: Sequence[str],
        *,
        tree: str = "semantic",
        seed: int = 0,
    ) -> None:
        number = {word: index for index, word in enumerate(vocabulary)}
        # Id 0 is for words that are not in the vocabulary.
        self.words = Ragged([[number.get(w, 0) for w in document.words] for document in documents])
        self.sentences = Ragged([document.sentences for document in documents])
        self.paragraphs = Ragged([document.paragraphs for document in documents])
        self.labels: Tensor = labels.long()
        self.lengths = self.words.lengths
        self.groups = {"length": self.lengths, "sentences": self.sentences.lengths}
        self.vocabulary = vocabulary
        self.shape = tree
        self.seed = seed

    def tree(self, index: int) -> SignalTree:
        """The tree of sample `index`."""
        sentences, paragraphs = self.sentences[index].tolist(), self.paragraphs[index].tolist()
        if self.shape == "windows":
            paragraphs = even_sizes(len(sentences), len(paragraphs))
            sentences = even_sizes(int(self.lengths[index]), len(sentences))
        if self.shape != "random":
            return document_tree(sentences, paragraphs)
        # By the seed and the index only, so that every epoch sees the same tree.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        rows = torch.randperm(int(self.lengths[index]), generator=generator)
        return document_tree(sentences, paragraphs, rows)

    def _sample(self, index: int) -> dict[str, Any]:
        return {
            "inputs": {TEXT: self.words[index].long()},
            "tree": self.tree(index),
            "labels": self.labels[index],
        }

    def _text(self, index: int) -> str:
        return " ".join(self.vocabulary[word] or "?" for word in self.words[index].tolist())


@dataclass(frozen=True)
class TreeCollate:
    """Batches samples with trees, and replaces word ids by their frozen vectors.

    The table belongs to the data, not to a model: it is not trained, counted or saved with one.

    >>> tree = SignalTree.from_windows(2, modality="text")
    >>> sample = {"inputs": {"text": torch.tensor([1, 0])}, "tree": tree, "labels": torch.tensor(0)}
    >>> TreeCollate({"text": torch.tensor([[0.0], [5.0]])})([sample])["inputs"]["text"].tolist()
    [[5.0], [0.0]]
    """

    vectors: dict[str, Tensor]  # [vocabulary, width] for each modality with vectors

    def __call__(self, samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
        from polyscale.models import collate_trees  # imports transformers

        batch = collate_trees(samples)
        for name, table in self.vectors.items():
            if name in batch["inputs"]:
                batch["inputs"][name] = table[batch["inputs"][name]]
        return batch

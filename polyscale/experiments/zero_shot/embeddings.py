"""Sentence embeddings of the model as it was published: what an injection does to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from polyscale.data.texts import load_texts
from polyscale.experiments.zero_shot.injections import Injection
from polyscale.experiments.zero_shot.lab import Lab, Unit
from polyscale.experiments.zero_shot.measures import injected
from polyscale.experiments.zero_shot.presets import reference_layers
from polyscale.inject.measure import make_batches
from polyscale.trees.sentences import split_sentences

WORDS = (5, 60)  # of a sentence that is taken
SOURCE = "imdb-char"


def embedding_units(lab: Lab) -> Iterator[Unit]:
    """One unit for each injection."""
    holder = _Originals(lab)
    for injection in embedding_injections(lab):
        yield Unit(
            f"embeddings/{injection.name}",
            "embeddings",
            None,
            injection.as_dict(),
            partial(holder.compare, injection),
        )


def embedding_injections(lab: Lab) -> list[Injection]:
    """Every hierarchy and tie in the reference layers, in all but the last, and in all layers."""
    count = lab.layers
    reference = reference_layers(count)
    early = tuple(range(count - 1))  # the last layer is the most sensitive one
    sets = dict.fromkeys((reference, early, tuple(range(count))))
    ties = ("blocks", "columns")
    found = [
        Injection(layers, tree, tie)
        for layers in sets
        if layers
        for tree in lab.preset.trees
        for tie in ties
    ]
    found += [Injection(reference, tree, tie, ()) for tree in lab.preset.trees for tie in ties]
    return list(dict.fromkeys(found))


class _Originals:
    """The texts and their embeddings by the original model, made once."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.parts: dict[str, tuple[list[str], int, Tensor]] = {}

    def compare(self, injection: Injection) -> dict[str, Any]:
        """Compare the embeddings of sentences and of whole reviews."""
        lab = self.lab
        if not self.parts:
            lengths = {"sentences": 128, "reviews": lab.preset.review_length}
            for name, texts in choose_texts(lab).items():
                found = embed(lab.encoder, texts, lab.tokenizer, lengths[name])
                self.parts[name] = (texts, lengths[name], found)
        values: dict[str, Any] = {}
        with injected(lab.encoder, injection, lab.tokenizer):
            for name, (texts, length, before) in self.parts.items():
                after = embed(lab.encoder, texts, lab.tokenizer, length)
                values[name] = {"texts": len(texts), **agreement(before, after)}
        return values


def choose_texts(lab: Lab) -> dict[str, list[str]]:
    """Sentences, no two of them alike and each of another review, and whole reviews."""
    reviews = load_texts(SOURCE, lab.data_dir, seed=lab.seed).test.texts
    order = torch.randperm(len(reviews), generator=torch.Generator().manual_seed(lab.seed))
    sentences: dict[str, None] = {}
    for index in order.tolist():
        if len(sentences) == lab.preset.sentences:
            break
        spans = split_sentences(reviews[index])
        begin, end = spans[len(spans) // 2]
        text = reviews[index][begin:end].replace("<br />", " ").strip()
        if WORDS[0] <= len(text.split()) <= WORDS[1]:
            sentences[text] = None
    if len(sentences) < 3:
        raise ValueError(f"data_dir: its reviews have {len(sentences)} sentences of {WORDS} words")
    whole = [reviews[index] for index in order[: lab.preset.reviews].tolist()]
    return {"sentences": list(sentences), "reviews": whole}


@torch.no_grad()
def embed(model: PreTrainedModel, texts: Sequence[str], tokenizer: Any, length: int) -> Tensor:
    """Return the mean of the last hidden states of each text, of length 1, [N, C].

    Rows are in the order of `sorted(texts, key=len)`.
    """
    rows = []
    for batch in make_batches(list(texts), tokenizer, 32, length):
        hidden = model(**batch).last_hidden_state  # [B, T, C]
        mask = batch["attention_mask"][..., None].to(hidden.dtype)
        rows.append(F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(rows)


def agreement(before: Tensor, after: Tensor) -> dict[str, float]:
    """The mean cosine to the original, and the rank correlation of all pairs' similarities.

    >>> rows = F.normalize(torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, 2.0]]), dim=-1)
    >>> round(agreement(rows, rows)["spearman"], 6)
    1.0
    """
    one, other = torch.triu_indices(len(before), len(before), 1)
    pairs = [(rows[one] * rows[other]).sum(-1).double() for rows in (before, after)]
    cosine = F.cosine_similarity(before, after, dim=-1)
    return {
        "cosine": float(cosine.double().mean()),
        "cosine_lowest": float(cosine.min()),
        "spearman": spearman(*pairs),
    }


def spearman(one: Tensor, other: Tensor) -> float:
    """Spearman's rank correlation of two lists of numbers; equal ones share their mean rank.

    >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 30.0, 20.0])), 6)
    0.5
    """
    if len(one) != len(other) or len(one) < 2:
        raise ValueError(f"got {len(one)} and {len(other)} numbers, takes as many of both, 2 up")
    ranks = [_ranks(part) for part in (one, other)]
    x, y = (part - part.mean() for part in ranks)
    spread = float(x.norm() * y.norm())
    if spread == 0.0:
        raise ValueError("got numbers that are all equal, which have no ranks")
    return float(x @ y) / spread


def _ranks(numbers: Tensor) -> Tensor:
    _, place, count = numbers.unique(return_inverse=True, return_counts=True)
    return (count.cumsum(0) - (count - 1) / 2)[place].double()

"""How an injection changes the sentence embeddings of the published model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import spearmanr
from torch import Tensor
from transformers import PreTrainedModel

from polyscale.data.texts import load_texts
from polyscale.inject.measure import make_batches
from polyscale.trees.sentences import split_sentences
from reproduction.measuring import Measurement
from reproduction.zero_shot.injections import Injection
from reproduction.zero_shot.lab import Lab
from reproduction.zero_shot.measures import injected
from reproduction.zero_shot.presets import Preset, reference_layers

WORDS = (5, 60)  # least and most words of a sentence
SOURCE = "imdb-char"


def embedding_units(preset: Preset, layers: int) -> Iterator[Measurement]:
    """One measurement for each injection."""
    for injection in embedding_injections(preset, layers):
        yield Measurement(
            f"embeddings/{injection.name}",
            "embeddings",
            None,
            injection.as_dict(),
            partial(_compare, injection=injection),
        )


def embedding_injections(preset: Preset, count: int) -> list[Injection]:
    """Every hierarchy and tie in the reference layers, in all but the last, and in all layers."""
    reference = reference_layers(count)
    early = tuple(range(count - 1))  # the last layer is the most sensitive one
    sets = dict.fromkeys((reference, early, tuple(range(count))))
    ties = ("blocks", "columns")
    found = [
        Injection(layers, tree, tie)
        for layers in sets
        if layers
        for tree in preset.trees
        for tie in ties
    ]
    found += [Injection(reference, tree, tie, ()) for tree in preset.trees for tie in ties]
    return list(dict.fromkeys(found))


def _compare(lab: Lab, injection: Injection) -> dict[str, Any]:
    """Compare the embeddings of sentences and of whole reviews with the original's."""
    if not lab.originals:
        lengths = {"sentences": 128, "reviews": lab.preset.review_length}
        for name, texts in choose_texts(lab).items():
            found = embed(lab.encoder, texts, lab.tokenizer, lengths[name])
            lab.originals[name] = (texts, lengths[name], found)
    values: dict[str, Any] = {}
    with injected(lab.encoder, injection, lab.tokenizer):
        for name, (texts, length, before) in lab.originals.items():
            after = embed(lab.encoder, texts, lab.tokenizer, length)
            values[name] = {"texts": len(texts), **agreement(before, after)}
    return values


def choose_texts(lab: Lab) -> dict[str, list[str]]:
    """Distinct sentences, each from another review, and whole reviews."""
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
        raise ValueError(
            f"data_dir must hold reviews with at least 3 sentences of {WORDS[0]} to {WORDS[1]} "
            f"words, got {len(sentences)}"
        )
    whole = [reviews[index] for index in order[: lab.preset.reviews].tolist()]
    return {"sentences": list(sentences), "reviews": whole}


@torch.no_grad()
def embed(model: PreTrainedModel, texts: Sequence[str], tokenizer: Any, length: int) -> Tensor:
    """Return the mean of the last hidden states of each text, normalised, `[N, C]`.

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
    """Spearman's rank correlation of two lists of numbers; equal numbers share their mean rank.

    >>> round(spearman(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([10.0, 30.0, 20.0])), 6)
    0.5
    """
    if len(one) != len(other) or len(one) < 2:
        raise ValueError(
            f"one and other must have the same length, at least 2, got {len(one)} and {len(other)}"
        )
    if one.unique().numel() == 1 or other.unique().numel() == 1:
        raise ValueError("one and other must not be constant: their ranks have no correlation")
    return float(spearmanr(one.numpy(), other.numpy()).statistic)

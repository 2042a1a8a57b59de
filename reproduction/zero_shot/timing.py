"""Wall-clock of one attention layer and of the whole model, by length."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.timing import best_seconds, machine
from polyscale.data.texts import load_texts
from polyscale.inject.attention import attend
from polyscale.inject.layout import Tokens, find_layout
from reproduction.measuring import Measurement
from reproduction.zero_shot.injections import Injection
from reproduction.zero_shot.lab import Lab
from reproduction.zero_shot.presets import Preset, reference_layers
from reproduction.zero_shot.texts import tokenize

ORIGINAL = "original"


def timing_units(preset: Preset) -> Iterator[Measurement]:
    """One measurement for each length."""
    for length in preset.timing_lengths:
        yield Measurement(
            f"timing/{length}",
            "timing",
            None,
            {"length": length, "batch": preset.timing_batch, "rounds": preset.timing_rounds},
            partial(_time, length=length),
        )


def _time(lab: Lab, length: int) -> dict[str, Any]:
    ids = long_texts(lab, length)  # [B, N]
    kinds = [
        Injection((0,), tree, tie) for tree in lab.preset.trees for tie in ("blocks", "columns")
    ]
    rounds = lab.preset.timing_rounds
    with torch.no_grad():
        attention = best_seconds(_attention(lab, ids, kinds), rounds)
        model = best_seconds(_models(lab, ids, kinds), rounds)
    return {"attention": attention, "model": model, "machine": machine()}


def long_texts(lab: Lab, length: int) -> Tensor:
    """Return texts of exactly `length` tokens, `[B, N]`; short ones continue with the next text."""
    reviews = load_texts("imdb-char", lab.data_dir, seed=lab.seed).test.texts
    order = torch.randperm(len(reviews), generator=torch.Generator().manual_seed(lab.seed))
    tokens: list[int] = []
    # Four reviews for each row are usually enough; if not, the texts are repeated below.
    for index in order[: 4 * lab.preset.timing_batch].tolist():
        tokens += tokenize([reviews[index]], lab.tokenizer, length)[0][1:-1]
    inner = length - 2
    needed = inner * lab.preset.timing_batch
    tokens = (tokens * (needed // max(1, len(tokens)) + 1))[:needed]
    first, last = lab.tokenizer.cls_token_id, lab.tokenizer.sep_token_id
    rows = [[first, *tokens[at : at + inner], last] for at in range(0, needed, inner)]
    return torch.tensor(rows)


def _attention(lab: Lab, ids: Tensor, kinds: list[Injection]) -> dict[str, Callable[[], object]]:
    """One layer, from queries, keys and values to its output, including building the tree."""
    heads, width = lab.head_shape
    generator = torch.Generator().manual_seed(lab.seed)
    query, key, value = (
        torch.randn(len(ids), heads, ids.shape[1], width, generator=generator) for _ in range(3)
    )  # [B, H, N, D]
    scale = width**-0.5

    def hierarchical(kind: Injection) -> Tensor:
        settings = kind.settings(lab.tokenizer)
        layout = find_layout(settings, None, query, False, Tokens(ids))
        return attend(settings, layout, query, key, value, False, scale)

    found: dict[str, Callable[[], object]] = {
        ORIGINAL: lambda: F.scaled_dot_product_attention(query, key, value)
    }
    return {**found, **{kind.kind: partial(hierarchical, kind) for kind in kinds}}


def _models(lab: Lab, ids: Tensor, kinds: list[Injection]) -> dict[str, Callable[[], object]]:
    """The whole model, with the reference layers injected, and with all of them."""
    mask = torch.ones_like(ids)
    found: dict[str, Callable[[], object]] = {
        ORIGINAL: partial(lab.encoder, input_ids=ids, attention_mask=mask)
    }
    for layers in (reference_layers(lab.layers), tuple(range(lab.layers))):
        for kind in kinds:
            chosen = Injection(layers, kind.hierarchy, kind.tie)
            model = chosen.apply(_twin(lab.encoder), lab.tokenizer)
            found[chosen.name] = partial(model, input_ids=ids, attention_mask=mask)
    return found


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy that shares its weights with the original, to inject into."""
    shared = {id(weight): weight for weight in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared)

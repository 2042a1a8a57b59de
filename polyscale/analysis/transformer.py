"""The analysis of any Hugging Face encoder or decoder: maps, kernel, symmetry and normality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polyscale.analysis.builder import NORMALITY_NOTE, SCORES_NOTE, AnalysisBuilder
from polyscale.analysis.entries import (
    NORMALITY_ROWS,
    Entry,
    eigen_rows,
    form_entry,
    normality_entries,
    score_entries,
    symmetry_entries,
)
from polyscale.analysis.maps import MapCollection
from polyscale.analysis.recording import (
    AttentionCall,
    attention_calls,
    forward_names,
    projection_weights,
)
from polyscale.analysis.schema import Analysis
from polyscale.checks import check_integer
from polyscale.theory.kernel import pick, product_spectrum

FORMS_NOTE = (
    "Eigenvalues of M_s = (M + M^T) / 2 with M = W_Q W_K^T of each head, not scaled; those not "
    "listed are 0. With grouped queries heads of a group share W_K. Rotary positions are not part "
    "of the forms (they are those at distance 0), but of the scores on data."
)


def analyze_attention(
    model: nn.Module,
    batch: Mapping[str, Any] | Tensor,
    *,
    tokens: Sequence[str] | None = None,
    text: str | None = None,
    title: str | None = None,
    example: int = 0,
    max_length: int = 1024,
    maps: bool = True,
) -> Analysis:
    """Attention maps, kernel, symmetry and normality of the self-attention of a transformer.

    Takes any model that attends through the attention interface of transformers (BERT, RoBERTa,
    DistilBERT, GPT-2, Llama, ViT, ...). Bilinear forms need projections that are known: separate
    query and key layers, or GPT-2's fused one.

    Args:
        model: a Hugging Face model.
        batch: what it takes: a dict such as a tokenizer returns, or `input_ids` alone.
        tokens: names of the example's tokens, padding left out or not.
        text: the text of the example.
        title: of the report.
        example: the entry of the batch that is analyzed, without its padding.
        max_length: longer sequences are cut after the model has run.
        maps: whether to add attention and score matrices for display.

    Example:
        >>> from transformers import BertConfig, BertModel
        >>> config = BertConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
        >>> found = analyze_attention(BertModel(config), torch.arange(20)[None])
        >>> found["meta"]["kind"], len(found["kernel"]["forms"])
        ('transformer', 2)
    """
    check_integer("max_length", max_length, least=1)
    builder = AnalysisBuilder("transformer", type(model).__name__, title)
    calls, kept, real = _calls(model, batch, example, max_length, builder.notes)
    heads = calls[0].query.shape[0]
    builder.meta |= {"layers": len(calls), "heads": heads, "rows_used": len(kept)}
    builder.set_example(len(kept), tokens, text, real)
    return builder.build(_sections(calls, kept, maps, builder.notes))


def _sections(
    calls: list[AttentionCall], kept: Tensor, maps: bool, notes: list[str]
) -> dict[str, Any]:
    """The sections of the analysis; what they leave out is added to the notes."""
    rows = eigen_rows([len(kept)] * sum(call.query.shape[0] for call in calls))
    notes += _notes(len(kept), rows)
    forms: list[Entry] = []
    scores: list[Entry] = []
    parts: list[Entry] = []
    normality: list[Entry] = []
    sizes = [len(kept)] * calls[0].query.shape[0] if maps else []
    collection = MapCollection(len(calls), sizes, sizes)
    for number, call in enumerate(calls):
        forms += _form_entries(number, call)
        own = call.scores()[:, kept][:, :, kept]
        scores += score_entries(number, 0, own, rows)
        parts += symmetry_entries(number, 0, [own])
        normality += normality_entries(number, 0, [own])
        if maps:
            collection.add(number, 0, call.attention()[:, kept][:, :, kept], own)
    notes += [*_layer_notes(calls, forms), *collection.notes]
    return {
        "kernel": {"forms": forms, "scores": scores, "note": FORMS_NOTE},
        "symmetry": {"parts": parts, "maps": collection.parts},
        "normality": {"levels": normality, "over_training": []},
        "attention": collection.attention,
    }


def _layer_notes(calls: list[AttentionCall], forms: list[Entry]) -> list[str]:
    notes = []
    unknown = len(calls) - len({entry["layer"] for entry in forms})
    if unknown:
        notes.append(
            f"{unknown} of {len(calls)} layers have projections of an unknown kind: no bilinear "
            "forms for them."
        )
    injected = [str(number) for number, call in enumerate(calls) if call.weights is not None]
    if injected:
        notes.append(
            f"HSA is injected in layers {', '.join(injected)}: their attention maps are the "
            "weights that HSA applies, their scores are those of all pairs of tokens."
        )
    return notes


def _notes(length: int, rows: int) -> list[str]:
    notes = [
        "Levels, error and cost belong to HKT and do not apply.",
        SCORES_NOTE,
        NORMALITY_NOTE,
    ]
    if rows < length:
        notes.append(f"Eigenvalues of scores are those of the first {rows} tokens.")
    if length > NORMALITY_ROWS:
        notes.append(f"Normality uses {NORMALITY_ROWS} rows of the scores, evenly spaced.")
    return notes


def transformer_normality(
    model: nn.Module,
    batch: Mapping[str, Any] | Tensor,
    *,
    example: int = 0,
    max_length: int = 1024,
    **_: Any,
) -> list[Entry]:
    """The normality entries of `analyze_attention` without QQ points, and nothing else."""
    calls, kept, _real = _calls(model, batch, example, max_length, [])
    found: list[Entry] = []
    for number, call in enumerate(calls):
        found += normality_entries(number, 0, [call.scores()[:, kept][:, :, kept]], qq=False)
    return found


def _calls(
    model: nn.Module,
    batch: Mapping[str, Any] | Tensor,
    example: int,
    max_length: int,
    notes: list[str],
) -> tuple[list[AttentionCall], Tensor, Tensor | None]:
    """Self-attention of one example, the columns to analyze, and which columns are not padding."""
    inputs, real = _one_example(model, batch, example)
    calls, others = attention_calls(model, inputs)
    length = calls[0].query.shape[1]
    if any(call.query.shape[1] != length for call in calls):
        calls = [call for call in calls if call.query.shape[1] == length]
        notes.append("Layers that attend over another length than the first are left out.")
    if others:
        notes.append(f"{others} cross-attention layers are left out.")
    # Some models put tokens of their own before the text; the mask does not fit in that case.
    columns = torch.ones(length, dtype=torch.bool)
    if real is not None and len(real) == length:
        columns = real
    kept = columns.nonzero().flatten()
    if len(kept) > max_length:
        notes.append(f"Tokens after the first {max_length} (of {len(kept)}) are left out.")
        kept = kept[:max_length]
    return calls, kept, real


def _one_example(
    model: nn.Module, batch: Mapping[str, Any] | Tensor, example: int
) -> tuple[dict[str, Any], Tensor | None]:
    """One batch entry as arguments of the model, and which of its columns are not padding."""
    if isinstance(batch, Tensor):
        batch = {"input_ids": batch}
    if not isinstance(batch, Mapping):
        raise TypeError(f"batch must be a dict or input_ids, got {type(batch).__name__}")
    tensors = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    if not tensors:
        raise ValueError("batch must hold at least one tensor, got none")
    count = min(len(value) for value in tensors.values())
    if not 0 <= example < count:
        raise ValueError(f"example must be from 0 to {count - 1}, got {example}")
    taken = forward_names(model)
    chosen: dict[str, Any] = {
        name: value[example : example + 1] for name, value in tensors.items() if name in taken
    }
    if "use_cache" in taken:
        chosen["use_cache"] = False
    mask = tensors.get("attention_mask")
    real = None if mask is None or mask.dim() != 2 else mask[example].bool().cpu()
    if real is not None and not bool(real.any()):
        raise ValueError(f"example {example} must have at least one token, got only padding")
    return chosen, real


def _form_entries(number: int, call: AttentionCall) -> list[Entry]:
    heads = call.query.shape[0]
    weights = projection_weights(call.module, heads, call.groups)
    if weights is None:
        return []
    form = product_spectrum(weights[0], weights[1])
    biased = None
    if len(weights) == 4:
        biased = product_spectrum(
            torch.cat((weights[0], weights[2]), 1), torch.cat((weights[1], weights[3]), 1)
        )
    return [
        form_entry(number, head, None, pick(form, head), biased and pick(biased, head))
        for head in range(heads)
    ]
